"""What a profiler would record of a step, made from the step's timeline."""

from __future__ import annotations

from random import Random

from sparda.calibrate.launched import KERNELS, MERGE, MERGING
from sparda.calibrate.step_trace import KernelEvent
from sparda.engine.config import Config, Workload
from sparda.engine.plan import Plan
from sparda.engine.policies import make_plan
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.sim.timeline import Timeline

SMALL = ModelShape("small", layers=5, d_model=256, heads=4, kv_heads=2, head_dim=64, ffn=512, vocab=1024)
WAITING_INSIDE = {"norm", "qkv", "append", "oproj", "ffn_norm", "gateup", "down", "final_norm", "lm_head"}
"""Kinds whose kernel may be launched while the one before it on its stream still runs."""


def plan_of(policy: str = "sparda", lookahead: int = 1, workload: Workload | None = None) -> Plan:
    config = Config(policy=policy, lookahead=lookahead, score_layer=1)
    return make_plan(SMALL, SparseSpec(), workload or Workload(), config)


def recorded(
    timeline: Timeline, *, zero_ns: int = 1000, merged: bool = True, early_ns: int = 0, suffix: str = "", seed: int = 0
) -> list[KernelEvent]:
    """Events in no order: each operation's time in equal parts, one a kernel; some start ``early_ns`` too soon."""
    events = []
    for span in timeline.spans:
        names = [*KERNELS[span.kind], *([MERGE] if merged and span.kind in MERGING else [])]
        cuts = [span.start_ns + span.ns * i // len(names) for i in range(len(names) + 1)]
        for number, name in enumerate(names):
            early = early_ns if span.kind in WAITING_INSIDE else 0
            events.append(KernelEvent(name + suffix, zero_ns + cuts[number] - early, zero_ns + cuts[number + 1]))
    Random(seed).shuffle(events)
    return events
