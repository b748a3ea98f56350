"""A machine with one thing made better: any cost model, some of its costs scaled or gone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median_low

from sparda.engine.plan import COPY, HOST, MAIN, Op, Plan
from sparda.sim.costs import CostModel, Machine
from sparda.sim.rates import PREFETCH_KIND
from sparda.sim.wrapped import Wrapped

SMALL_NS = 1000.0


@dataclass(frozen=True)
class Relaxed(Wrapped):
    """``costs`` on a better machine; with the defaults it is ``costs`` itself.

    ``link``, ``hbm``: how many times as fast. Copies move as many times more bytes as the link. Of an operation's
    time, what its bytes take at the HBM's full rate shrinks with it; launch, latency and whatever else it takes do not.
    ``disturbed`` False: an operation beside a copy is no slower for the SM slots and the traffic that the copy takes,
    and leaves it room (HBM is still shared). ``launched`` False: no joins, no start of a copy, nothing outside the
    operations. ``fixed_ns`` is taken off every operation, as far as it lasts: see ``fixed_ns()``.
    """

    link: float = 1.0
    hbm: float = 1.0
    disturbed: bool = True
    launched: bool = True
    fixed_ns: float = 0.0

    @property
    def machine(self) -> Machine:
        m = self.costs.machine
        return replace(
            m,
            hbm_gb_s=m.hbm_gb_s * self.hbm,
            link_h2d_gb_s=m.link_h2d_gb_s * self.link,
            link_d2h_gb_s=m.link_d2h_gb_s * self.link,
            engine_h2d_gb_s=m.engine_h2d_gb_s * self.link,
        )

    def alone_ns(self, op: Op, plan: Plan) -> float:
        alone = self.costs.alone_ns(op, plan)
        if op.stream in (COPY, HOST):
            return alone / self.link if op.stream == COPY else alone
        spared = at_hbm_ns(self.costs, op, alone) * (1 - 1 / self.hbm)
        return max(0.0, alone - spared - self.fixed_ns)

    def slowdown(self, op: Op, plan: Plan, ctas: int) -> float:
        return self.costs.slowdown(op, plan, ctas) if self.disturbed else 1.0

    def transfer_start_ns(self, plan: Plan) -> float:
        return self.costs.transfer_start_ns(plan) if self.launched else 0.0

    def transfer_gb_s(self, plan: Plan, ctas: int) -> float:
        return self.costs.transfer_gb_s(plan, ctas) * self.link

    def places(self, op: Op, plan: Plan) -> int | None:
        return self.costs.places(op, plan) if self.disturbed else None

    def join_ns(self, op: Op, plan: Plan) -> float:
        return self.costs.join_ns(op, plan) if self.launched else 0.0

    def issue_ns(self, op: Op, plan: Plan) -> float:
        return self.costs.issue_ns(op, plan) if self.launched else 0.0

    def step_ns(self, plan: Plan) -> float:
        return self.costs.step_ns(plan) if self.launched else 0.0


def at_hbm_ns(costs: CostModel, op: Op, alone_ns: float) -> float:
    """Nanoseconds of ``alone_ns`` that the operation's bytes take at the HBM's full rate; never more than all."""
    return min(alone_ns, op.work.hbm_bytes / costs.machine.hbm_gb_s)


def fixed_ns(costs: CostModel, plan: Plan) -> float:
    """What a kernel that does next to nothing takes inside a step's graph: an upper bound of what launching it costs.

    The median over the main stream's kinds of operation whose bytes HBM moves in less than SMALL_NS; 0 without any.
    """
    small = {
        op.kind: costs.alone_ns(op, plan)
        for op in plan
        if op.stream == MAIN and op.kind != PREFETCH_KIND and op.work.hbm_bytes < SMALL_NS * costs.machine.hbm_gb_s
    }
    return median_low(small.values()) if small else 0.0
