"""How fast operations go beside one another: a pure function from what runs to the rate of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sparda.engine.plan import COPY, HOST, Op, Plan
from sparda.sim.costs import CostModel
from sparda.sim.fair import max_min_share

PREFETCH_KIND = "prefetch"


class Role(Enum):
    """How an operation uses the machine."""

    COMPUTE = "compute"
    PREFETCH = "prefetch"
    """A copy by thread blocks that read host memory."""
    ENGINE = "engine"
    """A transfer by a copy engine."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an operation asks of the machine. Operations of one kind and one work, in any layer, share a load.

    ``amount`` is link bytes for a copy by thread blocks or copy engine, and nanoseconds alone for all else; ``hbm`` and
    ``d2h`` are bytes of GPU memory, and bytes to the host, per unit of ``amount``: GB/s at full speed, or bytes per
    byte. ``fastest``: bytes per nanosecond of a copy engine's transfer alone. ``places``: CTAs of a copy that can start
    while a compute operation runs; None where it hinders none. ``ctas``: those of a copy that get a block of its list.
    """

    index: int
    op: Op
    role: Role
    amount: float
    hbm: float
    d2h: float = 0.0
    fastest: float = 0.0
    places: int | None = None
    ctas: int = 0

    @property
    def copies(self) -> bool:
        return self.role is not Role.COMPUTE


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
        per_byte = work.hbm_bytes / work.h2d_bytes if work.h2d_bytes else 0.0
        if op.kind == PREFETCH_KIND:
            blocks = -(-work.h2d_bytes // self._plan.shape.block_bytes(self._plan.spec))
            ctas = max(1, min(work.ctas, blocks))
            return Load(index, op, Role.PREFETCH, float(work.h2d_bytes), per_byte, ctas=ctas)
        alone = self._costs.alone_ns(op, self._plan)
        if op.stream == COPY:
            fastest = work.h2d_bytes / alone if alone > 0 else self._costs.machine.link_h2d_gb_s
            return Load(index, op, Role.ENGINE, float(work.h2d_bytes), per_byte, fastest=fastest)
        # An operation may be measured faster than the machine's sustained HBM rate (its input was in L2). What
        # it cannot do is ask for more than there is: by itself it must run at exactly its measured speed.
        machine = self._costs.machine
        hbm = min(work.hbm_bytes / alone, machine.hbm_gb_s) if alone > 0 else 0.0
        d2h = min(work.d2h_bytes / alone, machine.link_d2h_gb_s) if alone > 0 else 0.0
        places = None if op.stream == HOST else self._costs.places(op, self._plan)
        return Load(index, op, Role.COMPUTE, alone, hbm, d2h, places=places)


def share_rates(running: Running, plan: Plan, costs: CostModel) -> Rates:
    """Rates of everything in ``running``, side by side.

    Copies share the link max-min fair: one by thread blocks asks for what so many CTAs move alone times the worst
    factor of the compute operations beside it, one by a copy engine for what it moves alone. Their HBM writes have
    first claim; compute operations share what is left of HBM, and the link towards the host, max-min fair, and each is
    slowed further by the factor measured beside that many CTAs. A compute operation by itself runs at full speed.
    """
    if len(running) == 1 and not running[0][0].copies:
        return Rates((1.0,), 0.0, running[0][0].hbm)
    machine = costs.machine
    computes = [load for load, _ in running if not load.copies]
    copies = [(load, held) for load, held in running if load.copies]
    ctas = sum(held for _, held in copies)
    moved = _move(copies, computes, plan, costs)
    written = sum(rate * load.hbm for rate, (load, _) in zip(moved, copies, strict=True))
    given = max_min_share([load.hbm for load in computes], machine.hbm_gb_s - written)
    sent = max_min_share([load.d2h for load in computes], machine.link_d2h_gb_s)
    computed = []
    for load, got, up in zip(computes, given, sent, strict=True):
        ratio = min(got / load.hbm if load.hbm else 1.0, up / load.d2h if load.d2h else 1.0)
        computed.append(ratio / costs.slowdown(load.op, plan, ctas) if ctas else ratio)
    used = sum(rate * load.hbm for rate, load in zip(computed, computes, strict=True))
    copy_rates, compute_rates = iter(moved), iter(computed)
    each = tuple(next(copy_rates if load.copies else compute_rates) for load, _ in running)
    return Rates(each, sum(moved), written + used)


def _move(copies: Running, computes: Sequence[Load], plan: Plan, costs: CostModel) -> list[float]:
    """GB/s of each of ``copies``, all thread blocks that copy counted as one flow."""
    if not copies:
        return []
    machine, ctas = costs.machine, sum(held for _, held in copies)
    # A copy writes what it moves: a link wider than HBM is as wide as HBM.
    writes = max(load.hbm for load, _ in copies)
    engines = [load.fastest for load, _ in copies if load.role is Role.ENGINE]
    # What thread blocks get out of a link is a little less than a copy engine gets.
    width = max(machine.link_h2d_gb_s, *engines) if engines else machine.link_h2d_gb_s
    width = min(width, machine.hbm_gb_s / writes) if writes else width
    by_blocks = 0.0
    if ctas:
        beside = min((costs.transfer_share(load.op, plan, ctas) for load in computes), default=1.0)
        by_blocks = costs.transfer_gb_s(plan, ctas) * beside
    shared, *by_engine = max_min_share([by_blocks, *engines], width)
    rates = iter(by_engine)
    return [next(rates) if load.role is Role.ENGINE else shared * held / ctas for load, held in copies]
