"""A cost model simple enough to check by hand, and plans of a few operations."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from sparda.engine.config import FETCHING, POLICIES, TRANSFERS, Config, Workload
from sparda.engine.plan import COPY, HOST, Op, Plan, PlanBuilder
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, ModelShape, SparseSpec
from sparda.sim.costs import Machine

MINICPM = MODELS["minicpm4.1-8b"]
SMALL = ModelShape("small", layers=4, d_model=256, heads=4, kv_heads=2, head_dim=64, ffn=512, vocab=1024)

PLAYED = POLICIES
"""Policies that can be simulated: all."""


@dataclass(frozen=True, slots=True)
class FakeCosts:
    """Roofline costs: the longest of flops, HBM and link time, plus ``floor_ns``. Rates in GB/s, times in ns."""

    hbm_gb_s: float = 4000.0
    link_gb_s: float = 50.0
    copy_gb_s: float = 45.0
    per_cta_gb_s: float = inf
    """Most that one thread block of a copy moves."""
    up_gb_s: float | None = None
    """The link towards the host; None where it is as wide as the other direction."""
    host_gb_s: float = 60.0
    tflop_s: float = 600.0
    floor_ns: float = 1500.0
    slower: float = 1.1
    share: float = 0.9
    transfer_start: float = 3000.0
    join: float = 1200.0
    step: float = 8000.0
    issue: float = 6000.0
    room: int | None = None
    """CTAs of a copy that find room beside attention; None where all do."""
    alone: dict[str, float] = field(default_factory=dict)
    """Durations by kind, where a test sets them."""

    @property
    def machine(self) -> Machine:
        up = self.link_gb_s if self.up_gb_s is None else self.up_gb_s
        return Machine("fake", "fake", 132, self.hbm_gb_s, self.link_gb_s, up, 1 << 37, 1 << 38)

    def alone_ns(self, op: Op, plan: Plan) -> float:
        if op.kind in self.alone:
            return self.alone[op.kind]
        if op.stream == HOST:
            return self.floor_ns + op.work.host_bytes / self.host_gb_s
        if op.stream == COPY:
            return self.floor_ns + op.work.h2d_bytes / self.link_gb_s
        moved_ns = max(op.work.hbm_bytes / self.hbm_gb_s, op.work.d2h_bytes / self.machine.link_d2h_gb_s)
        return max(moved_ns, op.work.flops / (self.tflop_s * 1e3)) + self.floor_ns

    def slowdown(self, op: Op, plan: Plan, ctas: int) -> float:
        return self.slower

    def transfer_start_ns(self, plan: Plan) -> float:
        return self.transfer_start

    def transfer_gb_s(self, plan: Plan, ctas: int) -> float:
        return min(self.copy_gb_s, self.link_gb_s, ctas * self.per_cta_gb_s)

    def transfer_share(self, op: Op, plan: Plan, ctas: int) -> float:
        return self.share

    def places(self, op: Op, plan: Plan) -> int | None:
        return self.room if op.kind == "attention" else None

    def join_ns(self, op: Op, plan: Plan) -> float:
        return self.join

    def issue_ns(self, op: Op, plan: Plan) -> float:
        return self.issue

    def step_ns(self, plan: Plan) -> float:
        return self.step


def step_plan(workload: Workload | None = None, config: Config | None = None, shape: ModelShape = MINICPM) -> Plan:
    return make_plan(shape, SparseSpec(), workload or Workload(), config or Config())


def transfers_of(policy: str) -> tuple[str, ...]:
    """Transfer paths that tell the policy's plans apart."""
    return TRANSFERS if policy in FETCHING else ("uva",)


def built(builder: PlanBuilder) -> Plan:
    """The plan of a few operations; model, workload and configuration do not matter."""
    return builder.plan(SMALL, SparseSpec(), Workload(), Config())
