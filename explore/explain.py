"""Where a step's time goes, what its critical path is, which regime it is in, and what would make it shorter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

from sparda.engine.config import Config, Workload
from sparda.engine.loader import to_plain
from sparda.engine.plan import MAIN, Plan
from sparda.engine.policies import make_plan
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.explore.blame import JOIN, LAUNCH, causes
from sparda.sim.costs import CostModel
from sparda.sim.fluid import ROUNDING_NS
from sparda.sim.player import play
from sparda.sim.relaxed import Relaxed, at_hbm_ns, fixed_ns
from sparda.sim.timeline import Timeline
from sparda.sim.trace import ATTENTION

LINEARS = ("qkv", "oproj", "gateup", "down")
CHOOSING = (
    "score", "headscore", "select", "shallow_score", "bias", "shortlist", "partial_query", "partial_score",
)  # fmt: skip
COPIES = ("prefetch", "writeback", "report", "gather", "upload", "scatter")
HEAD = ("final_norm", "lm_head", "sample")

LINEAR_PART, ATTENTION_PART, CHOOSING_PART = "linear layers", "attention", "choosing blocks"
SMALL_PART, HEAD_PART = "norms and small kernels", "head and sampling"
SLOWED_PART, COPY_PART, WAIT_PART = "slowed by what runs beside", "copies that main waits for", "other waits"
LAUNCH_PART = "joins and launch"
PARTS = (
    LINEAR_PART, ATTENTION_PART, CHOOSING_PART, SMALL_PART, HEAD_PART, SLOWED_PART, COPY_PART, WAIT_PART, LAUNCH_PART,
)  # fmt: skip
"""Each nanosecond of a step is in exactly one of these. The first five are the main stream's work as it would be alone;
choosing also holds the waits for a choice made on another stream."""

OWN = ((LINEARS, LINEAR_PART), (ATTENTION, ATTENTION_PART), (HEAD, HEAD_PART))
"""Parts of other kinds that the main stream runs; what is left is small."""

RULE = (
    "link-bound: the link needs longer for its bytes than the main stream for its work, or main waits longer for "
    "copies than any other of these takes; else the longest of the weights' bytes at the HBM's rate (weight-bound), "
    "those of keys and values read by attention and choosing (KV-bound), and all else that the main stream spends "
    "(latency-bound)"
)


@dataclass(frozen=True, slots=True)
class Path:
    """The critical path: its operations and their microseconds by stream, the time between them, changes of stream.

    ``copies_us``: microseconds of those operations that are copies.
    """

    operations: int
    us: dict[str, float]
    copies_us: float
    gaps_us: float
    changes: int


@dataclass(frozen=True, slots=True)
class Gain:
    """A step with one thing made better: ``gain`` is the share of the step's time that it spares."""

    name: str
    about: str
    step_us: float
    gain: float


@dataclass(frozen=True, slots=True)
class Regime:
    """What bounds the step, by RULE, and the microseconds that decide it."""

    word: str
    weights_us: float
    kv_us: float
    latency_us: float
    copies_us: float
    """Microseconds in which the main stream waits for copies."""
    link_us: float
    """What the link needs for the step's bytes at its full rate."""
    main_us: float
    """What the main stream's own work, copies aside, takes alone."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything about one step; ``parts_us`` by PARTS add up to ``step_us``, ``gains`` the largest first."""

    step_us: float
    parts_us: dict[str, float]
    path: Path
    gains: tuple[Gain, ...]
    regime: Regime

    def to_dict(self) -> dict[str, object]:
        return {**to_plain(self), "rule": RULE}


def explain(
    costs: CostModel, shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config
) -> tuple[Explanation, Timeline]:
    """The account of a step, and the step itself. Raises SpardaError where the combination cannot be."""
    plan = make_plan(shape, spec, workload, config)
    timeline = play(plan, costs)
    parts = parts_us(timeline, costs)
    explanation = Explanation(
        timeline.step_us, parts, path_of(timeline), gains(plan, costs, timeline.step_us), regime_of(plan, costs, parts)
    )
    return explanation, timeline


def parts_us(timeline: Timeline, costs: CostModel | None = None) -> dict[str, float]:
    """Microseconds of the step by PARTS, in their order; they add up to the step.

    Without ``costs``, for a step that was measured, it is not known how long an operation takes alone: what it was
    slowed by stays in its own part.
    """
    ns = dict.fromkeys(PARTS, 0)
    for cause, spent, span in causes(timeline):
        alone = spent
        if costs is not None and span is not None and span.kind not in COPIES:
            alone = min(spent, ceil(costs.alone_ns(span.op, timeline.plan) - ROUNDING_NS))
        ns[_part(cause, own=span is not None)] += alone
        ns[SLOWED_PART] += spent - alone
    return {part: spent / 1e3 for part, spent in ns.items()}


def _part(cause: str, *, own: bool) -> str:
    """The part of a kind, LAUNCH or JOIN; ``own``: it ran on the main stream, which otherwise waited for it."""
    if cause in (LAUNCH, JOIN):
        return LAUNCH_PART
    if cause in COPIES:
        return COPY_PART
    if cause in CHOOSING:
        return CHOOSING_PART
    if not own:
        return WAIT_PART
    return next((part for kinds, part in OWN if cause in kinds), SMALL_PART)


def path_of(timeline: Timeline) -> Path:
    """The critical path in a few numbers; what lies between its operations are joins, copies' starts and launch."""
    spans = timeline.critical_path()
    us = dict.fromkeys(timeline.plan.streams, 0.0)
    for span in spans:
        us[span.stream] += span.ns / 1e3
    copies = sum(span.ns for span in spans if span.kind in COPIES) / 1e3
    gaps = timeline.step_us - sum(span.ns for span in spans) / 1e3
    return Path(len(spans), us, copies, gaps, sum(a.stream != b.stream for a, b in pairwise(spans)))


def gains(plan: Plan, costs: CostModel, step_us: float) -> tuple[Gain, ...]:
    """The step again with one thing made better, for each thing, the largest gain first."""
    found = []
    for name, about, better, changed in _relaxations(plan, costs):
        us = play(changed, better).step_us
        found.append(Gain(name, about, us, 1 - us / step_us))
    return tuple(sorted(found, key=lambda g: g.step_us))


def _relaxations(plan: Plan, costs: CostModel) -> Iterator[tuple[str, str, CostModel, Plan]]:
    fixed = fixed_ns(costs, plan)
    faster = "HBM one and a half times as fast (launch and latency as they are)"
    apart = "copies that take no SM slots from what runs beside them"
    yield "link x 2", "a link twice as fast, and copies that fill it as well", Relaxed(costs, link=2.0), plan
    yield "HBM x 1.5", faster, Relaxed(costs, hbm=1.5), plan
    yield "no slow-down", apart, Relaxed(costs, disturbed=False), plan
    none = make_plan(plan.shape, plan.spec, replace(plan.workload, miss_rate=0.0), plan.config)
    yield "no misses", "every chosen block already on the GPU", costs, none
    about = (
        f"no joins, copy starts or graph launch, every operation {fixed / 1e3:.1f} us shorter (what a small one takes)"
    )
    yield "no launches", about, Relaxed(costs, launched=False, fixed_ns=fixed), plan


def regime_of(plan: Plan, costs: CostModel, parts: dict[str, float]) -> Regime:
    """What bounds the step; ``parts`` are those of ``parts_us``."""
    weights = kv = main = 0.0
    for op in plan:
        if op.stream != MAIN or op.kind in COPIES:
            continue
        alone = costs.alone_ns(op, plan)
        main += alone
        if op.kind in (*LINEARS, "lm_head"):
            weights += at_hbm_ns(costs, op, alone)
        elif op.kind in (*ATTENTION, *CHOOSING):
            kv += at_hbm_ns(costs, op, alone)
    link = sum(op.work.h2d_bytes for op in plan) / costs.machine.link_h2d_gb_s
    latency, copies = main - weights - kv + 1e3 * parts[LAUNCH_PART], 1e3 * parts[COPY_PART]
    words = {"weight-bound": weights, "KV-bound": kv, "latency-bound": latency, "link-bound": copies}
    word = "link-bound" if link >= main else max(words, key=words.__getitem__)
    return Regime(word, weights / 1e3, kv / 1e3, latency / 1e3, copies / 1e3, link / 1e3, main / 1e3)
