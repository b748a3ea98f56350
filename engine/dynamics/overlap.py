"""How alike the choices of two steps are: the share of the free picks that an earlier step had freely picked too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparda.engine.dynamics.choices import Choices
from sparda.engine.errors import SpardaError

Floats = npt.NDArray[np.float64]

LAGS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean and what it is the mean of: the least, the middle and the most over layers or documents."""

    mean: float
    low: float
    median: float
    high: float


def spread(by_layer: Floats, mean: float | None = None) -> Spread:
    """The spread of values by layer; ``mean`` where it is not the layers' own."""
    middle = float(np.mean(by_layer)) if mean is None else mean
    return Spread(middle, float(by_layer.min()), float(np.median(by_layer)), float(by_layer.max()))


def overlap(choices: Choices, lags: Sequence[int] = LAGS, *, skip: int = 0) -> dict[int, Floats]:
    """By lag, of each layer, float64 [layers]: share of the free picks of step t that were free picks of step t - lag.

    Blocks that were forced then do not count. Lags that the steps after ``skip`` do not reach are left out. Raises
    SpardaError for a lag below 1 and where nothing is freely picked.
    """
    if any(lag < 1 for lag in lags):
        raise SpardaError(f"a lag of {min(lags)} steps; give 1 or more.")
    if not bool(choices.free_picks()[skip:].any()):
        raise SpardaError("no block of this trace is freely chosen; record with a higher top_k or a longer context.")
    free = np.where(choices.forced(), -1, choices.blocks)
    reached = [lag for lag in lags if skip + lag < choices.steps]
    found = {lag: np.zeros(len(choices.facts.layers)) for lag in reached}
    for layer in range(len(choices.facts.layers)):
        for lag, (same, all_) in _matches(free[skip:, layer], choices.room, reached).items():
            found[lag][layer] = same / max(1, all_)
    return found


def reuse(choices: Choices, *, skip: int = 0) -> Floats:
    """Share of the free picks that the step before had freely picked too, of each layer: float64 [layers]."""
    if choices.steps - skip < 2:
        raise SpardaError(f"{choices.steps} steps, {skip} of them skipped; two at least show what comes back.")
    return overlap(choices, (1,), skip=skip)[1]


def _matches(ids: npt.NDArray[np.int16], room: int, lags: Sequence[int]) -> dict[int, tuple[int, int]]:
    """By lag: free picks of ``ids`` [steps, heads, top_k] found again, and free picks; a head at a time for memory."""
    totals = dict.fromkeys(lags, (0, 0))
    lines = np.arange(len(ids))[:, None]
    for head in range(ids.shape[1]):
        mine = ids[:, head].astype(np.int64)
        member = np.zeros((len(ids), room + 1), dtype=np.bool_)
        member[lines, mine] = True
        # What -1 has marked.
        member[:, -1] = False
        for lag in lags:
            # Only of streams that go on in both: an ended one has no picks.
            same = int(member[lines[:-lag], mine[lag:]].sum())
            totals[lag] = (totals[lag][0] + same, totals[lag][1] + int((mine[lag:] >= 0).sum()))
    return totals
