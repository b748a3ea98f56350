"""Costs fitted to one GPU's kernel, link and co-run rows; what the simulator plays a plan with."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import log2

from sparda.engine.config import POLICIES
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, to_plain
from sparda.engine.occupancy import free_beside_attention
from sparda.engine.plan import COPY, HOST, MAIN, SELECT, Op, Plan
from sparda.engine.policies import make_plan
from sparda.sim.costs import Machine
from sparda.sim.rates import PREFETCH_KIND

CHUNK_BYTES = 16384
"""Chunk that decoding copies in; link rows with other chunks inform, but do not enter the fit."""

SHALLOWEST = 2
"""Stages that a copy through registers counts as: like two stages it has one chunk on its way at a time."""

TINY = 12
"""Tiny kernels in a layer of the co-run row ``launches``: about as many as a layer of a step has."""

IN_ORDER = "attention in order"
"""Co-run rows of attention in a step's order: beside a copy that comes after it."""

LAYER = "layer"
"""Co-run rows of whole layers of the main stream, in a step's order, beside a copy. No table is fitted to them."""


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear through (xs, ys), xs ascending; the end values outside."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1]
    i = bisect_right(xs, x)
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Time of one kind alone, measured over batch and, for some kinds, a second axis.

    ``ns[i][j]`` at ``batches[i]`` and ``seconds[j]``; ``hbm_bytes[i][j]`` the least bytes moved there. A measured
    point is returned exactly; between points time is linear in either axis, since bytes are; outside, the
    boundary's share of HBM bandwidth is held.
    """

    second: str
    batches: tuple[float, ...]
    seconds: tuple[float, ...]
    ns: tuple[tuple[float, ...], ...]
    hbm_bytes: tuple[tuple[float, ...], ...]

    def at(self, batch: float, second: float, hbm_bytes: float) -> float:
        """Nanoseconds at (batch, second) for an operation that moves ``hbm_bytes``."""
        known = self._surface(self.hbm_bytes, batch, second)
        # Launch and latency do not shrink with the bytes, so only growth beyond the table is scaled.
        return self._surface(self.ns, batch, second) * max(1.0, hbm_bytes / known if known else 1.0)

    def _surface(self, table: tuple[tuple[float, ...], ...], batch: float, second: float) -> float:
        across = [interpolate(self.seconds, row, second) for row in table]
        return interpolate(self.batches, across, batch)


@lru_cache
def _logarithms(ctas: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(log2(c) for c in ctas)


@dataclass(frozen=True, slots=True)
class CtaCurve:
    """Something measured over CTAs at one pipeline depth; between points linear in the logarithm of the CTAs."""

    stages: int
    ctas: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, ctas: float) -> float:
        """The value at ``ctas``; the end values outside."""
        return interpolate(_logarithms(self.ctas), self.values, log2(max(1.0, ctas)))


def at_depth(curves: Sequence[CtaCurve], stages: float, ctas: float) -> float:
    """The value between the curves of the depths around ``stages``; curves ascend by depth."""
    return interpolate([c.stages for c in curves], [c.at(ctas) for c in curves], max(SHALLOWEST, stages))


@dataclass(frozen=True, slots=True)
class Beside:
    """One kind beside a running prefetch, at one batch: its slow-down, and the copy's GB/s meanwhile."""

    batch: float
    slowdown: tuple[CtaCurve, ...]
    gb_s: tuple[CtaCurve, ...]


@dataclass(frozen=True, slots=True)
class BlockCurve:
    """Nanoseconds by blocks moved: linear between points, in proportion beyond the last; no blocks take no time."""

    blocks: tuple[int, ...]
    ns: tuple[float, ...]

    def at(self, blocks: float) -> float:
        if not blocks:
            return 0.0
        return interpolate(self.blocks, self.ns, blocks) * max(1.0, blocks / self.blocks[-1])


@dataclass(frozen=True, slots=True)
class PathCosts:
    """Transfers by way of the host.

    ``listed``: until the host has made its list of copies, by path; ``started``: from then until it has started every
    one. ``by_blocks``: of each kind of operation, of ``blocks`` and ``batch`` from the first copy's start to the last
    byte. ``round_trip_ns``: from a report's end on the GPU to the GPU's doing what the host starts upon it.
    """

    listed: Mapping[str, BlockCurve]
    started: Mapping[str, BlockCurve]
    by_blocks: Mapping[str, BlockCurve]
    round_trip_ns: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a calibration finds.

    ``transfer``: GB/s of a prefetch alone, by depth and CTAs. ``beside``: every kind beside a copy that was there
    first. ``in_order``: attention beside the CTAs that found room beside it. ``start_ns``: before a copy's first byte.
    ``lanes``: (batch, nanoseconds) that an attention loses to the selection streams beside it; ``launches``: what any
    other operation of the main stream loses in a graph that branches so. ``step_ns``: a whole graph beyond its kernels.
    """

    kernels: Mapping[str, KernelCost]
    transfer: tuple[CtaCurve, ...]
    beside: Mapping[str, tuple[Beside, ...]]
    in_order: tuple[Beside, ...]
    start_ns: float
    lanes: tuple[tuple[float, float], ...]
    launches: tuple[tuple[float, float], ...]
    step_ns: float
    paths: PathCosts | None = None


ALIASES = {"ffn_norm": "norm", "final_norm": "norm", "headscore": "score"}
"""Kinds whose behaviour beside a prefetch is that of another kind: the same kernel, or the same reads."""


BY_HOST = ("gather", "upload", "scatter", "enlist", "blocks", "batch")
"""Kinds whose time is known by the blocks that they move."""

ATTENTIONS = ("attention", "biased_attention")
"""Kinds whose thread blocks have a multiprocessor each, to their end: a copy's find room on the others alone."""


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """The simulator's cost model of one measured GPU (``sim.costs.CostModel``)."""

    machine: Machine
    fitted: Fitted
    _memo: dict[tuple[str, str, int, int, int], float] = field(default_factory=dict, compare=False, repr=False)
    """Values beside a copy by (table, kind, batch, stages, CTAs): a search asks for the same ones over and over."""

    def alone_ns(self, op: Op, plan: Plan) -> float:
        if op.kind in BY_HOST and self.fitted.paths is not None:
            return self._by_blocks(op, plan, self.fitted.paths)
        cost, batch = self._kernel(op, plan), plan.workload.batch
        alone = cost.at(batch, second_axis(cost.second, plan), op.work.hbm_bytes)
        # A graph with side streams launches every kernel of its main stream a little later than a straight one.
        branches = op.stream == MAIN and op.kind not in ATTENTIONS and SELECT in plan.streams
        return alone + (by_batch(self.fitted.launches, batch) if branches else 0.0)

    def _by_blocks(self, op: Op, plan: Plan, paths: PathCosts) -> float:
        moved = op.work.h2d_bytes or op.work.host_bytes / 2 or op.work.hbm_bytes / 2
        blocks = op.work.copies or moved / plan.shape.block_bytes(plan.spec)
        # Of a list of copies the host's time is to make it; starting them is issuing what is on the other stream.
        curve = paths.listed[plan.config.path] if op.kind == "enlist" else paths.by_blocks[op.kind]
        return curve.at(blocks)

    def _kernel(self, op: Op, plan: Plan) -> KernelCost:
        """Raises SpardaError where the kind was not measured: nothing is made up."""
        cost = self.fitted.kernels.get(op.kind)
        if cost is None:
            known, policies = ", ".join(self.fitted.kernels), ", ".join(self.policies(plan)) or "none"
            raise SpardaError(
                f"{self.machine.name} has no measured cost for {op.kind!r}, which policy {plan.config.policy!r} needs; "
                f"measured kinds: {known}. Choose a policy that these can price ({policies}), or measure the kind and "
                "calibrate again."
            )
        return cost

    def policies(self, plan: Plan) -> list[str]:
        """The policies that can be priced for the plan's model and workload: each of their kinds was measured."""
        found = []
        priced = {*self.fitted.kernels, PREFETCH_KIND, *(BY_HOST if self.fitted.paths else ())}
        for policy in POLICIES:
            try:
                other = make_plan(plan.shape, plan.spec, plan.workload, replace(plan.config, policy=policy))
            except SpardaError:
                continue
            if {op.kind for op in other} <= priced:
                found.append(policy)
        return found

    def slowdown(self, op: Op, plan: Plan, ctas: int) -> float:
        if ctas < 1:
            return 1.0
        places = self.places(op, plan)
        in_order = op.kind in ATTENTIONS and (places is None or ctas <= places)
        return max(1.0, self._beside("in_order" if in_order else "beside", "slowdown", op.kind, plan, ctas) or 1.0)

    def places(self, op: Op, plan: Plan) -> int | None:
        # A copy through registers needs no shared memory: its thread blocks start beside any other.
        if op.kind not in ATTENTIONS or plan.config.prefetch_stages == 1:
            return None
        heads = plan.workload.batch * plan.shape.kv_heads
        return free_beside_attention(heads, plan.config.top_k, self.machine.sms)

    def transfer_start_ns(self, plan: Plan) -> float:
        return self.fitted.start_ns

    def transfer_gb_s(self, plan: Plan, ctas: int) -> float:
        rate = at_depth(self.fitted.transfer, plan.config.prefetch_stages, ctas)
        return min(rate, self.machine.link_h2d_gb_s)

    def transfer_share(self, op: Op, plan: Plan, ctas: int) -> float:
        rate = self._beside("beside", "gb_s", op.kind, plan, ctas)
        return 1.0 if rate is None else min(1.0, rate / self.transfer_gb_s(plan, ctas))

    def _beside(self, table: str, value: str, kind: str, plan: Plan, ctas: int) -> float | None:
        """``value`` ("slowdown" or "gb_s") at the plan's batch and depth and ``ctas``; None where not measured."""
        kind = ALIASES.get(kind, kind)
        rows = self.fitted.in_order if table == "in_order" else self.fitted.beside.get(kind, ())
        if not rows:
            return None
        batch, stages = plan.workload.batch, plan.config.prefetch_stages
        key = (table + value, kind, batch, stages, ctas)
        if key not in self._memo:
            at = [at_depth(b.slowdown if value == "slowdown" else b.gb_s, stages, ctas) for b in rows]
            self._memo[key] = interpolate([b.batch for b in rows], at, batch)
        return self._memo[key]

    def join_ns(self, op: Op, plan: Plan) -> float:
        # Measured as what the selection streams cost the main stream in a layer; there the attention waits for them.
        if op.stream == HOST:
            return self.fitted.paths.round_trip_ns if self.fitted.paths else 0.0
        if op.kind not in ATTENTIONS or op.index not in plan.beside_choice:
            return 0.0
        return by_batch(self.fitted.lanes, plan.workload.batch)

    def issue_ns(self, op: Op, plan: Plan) -> float:
        paths = self.fitted.paths
        if op.stream == COPY and paths is not None and op.kind in paths.started:
            return paths.started[op.kind].at(op.work.copies)
        return self.fitted.step_ns

    def step_ns(self, plan: Plan) -> float:
        return self.fitted.step_ns

    def to_plain(self) -> dict[str, object]:
        return to_plain(self.fitted)

    @classmethod
    def from_plain(cls, machine: Machine, plain: Mapping[str, object], where: str = "costs") -> FittedCosts:
        """Raises SpardaError, naming ``where``, for an unknown key or a wrong type."""
        return cls(machine, read(Fitted, plain, where=where))


def by_batch(points: Sequence[tuple[float, float]], batch: int) -> float:
    """Piecewise linear through (batch, value) points."""
    return interpolate([b for b, _ in points], [value for _, value in points], batch)


def second_axis(name: str, plan: Plan) -> float:
    """The plan's value on a kernel table's second axis ("" where there is none)."""
    if name == "context_tokens":
        return plan.workload.context_tokens
    return plan.config.top_k if name == "top_k" else 0.0
