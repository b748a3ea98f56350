"""How fast operations go beside one another: a pure function from what runs to the rate of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparda.engine.plan import Op, Plan
from sparda.sim.costs import CostModel
from sparda.sim.fair import max_min_share

PREFETCH_KIND = "prefetch"


@dataclass(frozen=True, slots=True)
class Load:
    """What an operation asks of the machine. Operations of one kind and one work, in any layer, share a load.

    ``amount`` is nanoseconds alone for a compute operation and link bytes for a copy; ``hbm`` is HBM bytes per
    unit of ``amount``, so GB/s at full speed for the one and bytes per byte for the other. ``places``: CTAs of a copy
    that can start while a compute operation runs; None where it hinders none.
    """

    index: int
    op: Op
    amount: float
    hbm: float
    copies: bool
    places: int | None = None
    ctas: int = 0


Running = Sequence[tuple[Load, int]]
"""What runs at some moment: each load with the CTAs that it holds then; 0 for compute operations."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Units of ``amount`` per nanosecond, one for each load given; the GB/s that they come to."""

    each: tuple[float, ...]
    link_gb_s: float
    hbm_gb_s: float


class Loads:
    """The loads of one plan on one machine, each costed once."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self._plan = plan
        self._costs = costs
        self._loads: dict[tuple[str, int, int, int, int, int], Load] = {}

    def of(self, op: Op) -> Load:
        """The load of ``op``."""
        # Width differs between layers (a first layer projects two selection queries), so the kind is not enough.
        # The fields of Work one by one: a tuple of integers hashes in a fraction of a dataclass's time.
        work = op.work
        key = (op.kind, work.flops, work.hbm_bytes, work.h2d_bytes, work.d2h_bytes, work.ctas)
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = self._cost(op)
        return load

    def _cost(self, op: Op) -> Load:
        index, work = len(self._loads), op.work
        if op.kind == PREFETCH_KIND:
            per_byte = work.hbm_bytes / work.h2d_bytes if work.h2d_bytes else 0.0
            blocks = -(-work.h2d_bytes // self._plan.shape.block_bytes(self._plan.spec))
            ctas = max(1, min(work.ctas, blocks))
            return Load(index, op, float(work.h2d_bytes), per_byte, copies=True, ctas=ctas)
        alone = self._costs.alone_ns(op, self._plan)
        # An operation may be measured faster than the machine's sustained HBM rate (its input was in L2). What
        # it cannot do is ask for more than there is: by itself it must run at exactly its measured speed.
        demand = min(work.hbm_bytes / alone, self._costs.machine.hbm_gb_s) if alone > 0 else 0.0
        return Load(index, op, alone, demand, copies=False, places=self._costs.places(op, self._plan))


def share_rates(running: Running, plan: Plan, costs: CostModel) -> Rates:
    """Rates of everything in ``running``, side by side.

    Copies share the link, each by the CTAs that it has running, all together no faster than so many CTAs alone times
    the worst factor of the compute operations beside them. Their HBM writes have first claim; compute operations share
    what is left of HBM max-min fair, and each is slowed further by the factor measured beside that many CTAs. A
    compute operation by itself runs at full speed.
    """
    if len(running) == 1 and not running[0][0].copies:
        return Rates((1.0,), 0.0, running[0][0].hbm)
    machine = costs.machine
    computes = [load for load, _ in running if not load.copies]
    copies = [(load, held) for load, held in running if load.copies]
    ctas = sum(held for _, held in copies)
    moved: list[float] = []
    if ctas:
        beside = min((costs.transfer_share(load.op, plan, ctas) for load in computes), default=1.0)
        # A copy writes what it moves: a link wider than HBM is as wide as HBM.
        writes = max(load.hbm for load, _ in copies)
        width = min(machine.link_h2d_gb_s, machine.hbm_gb_s / writes) if writes else machine.link_h2d_gb_s
        total = min(costs.transfer_gb_s(plan, ctas) * beside, width)
        moved = [total * held / ctas for _, held in copies]
    written = sum(rate * load.hbm for rate, (load, _) in zip(moved, copies, strict=True))
    given = max_min_share([load.hbm for load in computes], machine.hbm_gb_s - written)
    computed = []
    for load, got in zip(computes, given, strict=True):
        ratio = got / load.hbm if load.hbm else 1.0
        computed.append(ratio / costs.slowdown(load.op, plan, ctas) if ctas else ratio)
    used = sum(rate * load.hbm for rate, load in zip(computed, computes, strict=True))
    copy_rates, compute_rates = iter(moved), iter(computed)
    each = tuple(next(copy_rates if load.copies else compute_rates) for load, _ in running)
    return Rates(each, sum(moved), written + used)
