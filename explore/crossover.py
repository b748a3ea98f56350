"""What the policies' cells answer: where offloading wins, what looking further ahead adds, how near the floor it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sparda.engine.config import Workload
from sparda.explore.policies import Cell

RESIDENT = ("sparse-resident", "sparda-resident")
"""Policies that choose blocks and keep all of them on the GPU: what offloading must beat."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """From which batch on offloading decodes more tokens/s than keeping all on the GPU.

    ``from_batch``: the smallest measured batch at which, and at every larger one measured, sparda (lookahead 1)
    exceeds ``resident``, the fastest cell of a resident sparse policy at any batch that fits. None where it never
    does. ``resident`` is None where no such cell was measured; ``no_room_from`` is the smallest batch at which none
    of them fits, and ``no_room_gib`` what the smallest would need there.
    """

    context_tokens: int
    from_batch: int | None
    resident: Cell | None
    no_room_from: int | None
    no_room_gib: float | None


def crossover(cells: Sequence[Cell], context: int) -> Crossover | None:
    """The crossover at one context; None where sparda was not measured there."""
    here = [c for c in cells if c.workload.context_tokens == context]
    sparda = sorted((c for c in here if c.label == "sparda" and c.step_us), key=lambda c: c.workload.batch)
    if not sparda:
        return None
    resident = [c for c in here if c.config.policy in RESIDENT]
    best = max((c for c in resident if c.step_us), key=_speed, default=None)
    limit = _speed(best) if best else 0.0
    first: int | None = None
    for cell in sparda:
        if _speed(cell) <= limit:
            first = None
        elif first is None:
            first = cell.workload.batch
    batches = {c.workload.batch for c in resident} - {c.workload.batch for c in resident if c.fits}
    outside = min(batches, default=None)
    needs = min((c.gpu_gib for c in resident if c.workload.batch == outside), default=None)
    return Crossover(context, first, best, outside, needs)


def _speed(cell: Cell) -> float:
    return cell.tokens_per_s or 0.0


def lookahead_gains(cells: Sequence[Cell]) -> dict[tuple[int, int], dict[int, float]]:
    """What each lookahead above 1 adds to sparda's tokens/s, as a share, by (context, batch) and lookahead."""
    steps = {(c.workload, c.config.lookahead): c.step_us for c in cells if c.config.policy == "sparda"}
    found: dict[tuple[int, int], dict[int, float]] = {}
    for (workload, ahead), us in steps.items():
        usual = steps.get((workload, 1))
        if ahead > 1 and us and usual:
            found.setdefault((workload.context_tokens, workload.batch), {})[ahead] = usual / us - 1
    return found


def floor_share(cells: Sequence[Cell]) -> tuple[float | None, int]:
    """Median share of the floor that sparda's steps reach at lookahead 1, and of how many cells."""
    shares = [c.floor_share for c in cells if c.label == "sparda" and c.floor_share is not None]
    return (median(shares), len(shares)) if shares else (None, 0)


def offload_speedup(cells: Sequence[Cell]) -> tuple[Cell, Cell] | None:
    """The pair (sparda, sparse) of the same workload with the largest gain; sparda at its best lookahead there."""
    fastest: dict[tuple[Workload, str], Cell] = {}
    for c in cells:
        key = (c.workload, c.config.policy)
        if c.step_us and (key not in fastest or _speed(c) > _speed(fastest[key])):
            fastest[key] = c
    pairs = [(c, fastest[w, "sparse"]) for (w, p), c in fastest.items() if p == "sparda" and (w, "sparse") in fastest]
    return max(pairs, key=lambda pair: _speed(pair[0]) / _speed(pair[1]), default=None)
