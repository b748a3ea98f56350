"""How linears are cut into thread blocks, for a GPU with so many multiprocessors. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 128
"""Rows (sequences) that one thread block takes; more rows read the weights again."""
ROWS = 64
"""Weight rows of a narrow tile: what one warp group's tensor cores take."""
MAX_SPLITS = 8
LEAST_DEPTH = 256
"""Products that a part of a split sum has at the least."""
LONG = 8192
"""Columns from which a split sum is cut into twice as many parts."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a linear is cut: ``rows`` weight rows by ``depth`` columns at a time, ``splits`` parts of the sum.

    ``stages``: depth of the pipeline of loads.
    """

    rows: int
    depth: int
    splits: int
    stages: int
    warps: int


def splits_of(rows: int, columns: int, sms: int) -> int:
    """Parts to cut a sum of ``columns`` products into, for ``rows`` weight rows on ``sms`` multiprocessors.

    As few as give every multiprocessor a thread block; twice that for long sums, whose thread blocks then end closer
    together. Source: the fastest of many tilings of MiniCPM4.1-8B's linears on an H200.
    """
    tiles, splits = -(-rows // ROWS), 1
    while tiles * splits < 0.95 * sms and splits < MAX_SPLITS and columns // (2 * splits) >= LEAST_DEPTH:
        splits *= 2
    return 2 * splits if columns >= LONG and splits > 1 else splits


def tiling_for(
    rows: int, columns: int, batch: int, sms: int, *, splits: int, gated: bool = False, narrow: bool = False
) -> Tiling:
    """The tiling for ``rows`` weight rows and ``columns`` products each. Source: as for ``splits_of``.

    ``narrow``: short sums, or values that take more room than bf16.
    """
    if narrow:
        return Tiling(ROWS, 32, splits, 2, 4)
    blocks = -(-rows // ROWS) * splits
    # Wide tiles where narrow ones would give some multiprocessors two thread blocks and the others one, and where
    # the activations that each thread block reads again are no longer small beside its weights.
    wide = not gated and (sms < blocks < 1.5 * sms or (batch > 32 and blocks >= 1.5 * sms))
    if batch > 64:
        return Tiling(2 * ROWS if wide else ROWS, 64, splits, 3, 4)
    if wide:
        return Tiling(2 * ROWS, 128, splits, 4 if splits == 1 else 3, 8 if splits == 1 else 4)
    return Tiling(ROWS, 128, splits, 3 if gated and batch <= 32 else 4, 4)
