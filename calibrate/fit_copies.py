"""What a prefetch takes alone, and what it and compute cost each other, from link and co-run rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import nnls

from sparda.calibrate.costs import CHUNK_BYTES, IN_ORDER, LAYER, SHALLOWEST, TINY, Beside, CtaCurve, at_depth
from sparda.calibrate.store import Row, grouped
from sparda.engine.errors import SpardaError

LANE_ROWS = ("launches", "lanes", IN_ORDER, LAYER)
"""Rows of kind ``corun`` that are no operation beside a copy."""

MOST_SLOWED = 50.0
"""Slow-down beyond which a co-run row cannot tell how much longer it was."""


def depth_of(row: Row) -> int:
    """Pipeline depth that a row's stages count as."""
    return max(SHALLOWEST, int(row.number("stages")))


def fit_transfer(rows: Sequence[Row]) -> tuple[tuple[CtaCurve, ...], float]:
    """GB/s by depth and CTAs, and the time before the first byte, from link rows.

    Time of a copy = start + bytes / rate. ``start`` is common to all: non-negative least squares over the default
    depth's lists of 0 to 3072 blocks; rates then follow from the longest list at every depth.
    """
    copies = [r for r in rows if r.op == "prefetch" and r.case["chunk_bytes"] == CHUNK_BYTES]
    if not copies:
        raise SpardaError("no link rows with 16 KiB chunks; run `sparda measure --parts link`.")
    wide = [r for r in copies if r.number("blocks") and 4 <= r.number("ctas") <= 16 and r.number("stages") == 8]
    short = [r for r in copies if not r.number("blocks")]
    if not wide or not short:
        raise SpardaError("link rows lack lists of several lengths at 8 stages; run `sparda measure --parts link`.")
    design = np.array([[1.0, r.number("blocks")] for r in wide + short])
    times = np.array([r.us * 1e3 for r in wide + short])
    # Relative errors: a short copy's start must not drown in a long copy's noise.
    (start, _), _ = nnls(design / times[:, None], np.ones(len(times)))
    curves = []
    for depth, points in sorted(grouped(longest_copies(copies), depth_of).items()):
        rates = {int(r.number("ctas")): _bytes(r) / (r.us * 1e3 - start) for r in points}
        curves.append(CtaCurve(depth, tuple(sorted(rates)), tuple(rates[c] for c in sorted(rates))))
    if not curves:
        raise SpardaError("link rows lack copies of every block; run `sparda measure --parts link`.")
    return tuple(curves), float(start)


def longest_copies(rows: Sequence[Row]) -> list[Row]:
    """Of link rows those that the rates come from: every block copied, in the shape its depth is used with."""
    copies = (r for r in rows if r.op == "prefetch" and r.case["chunk_bytes"] == CHUNK_BYTES)
    return [r for r in copies if r.case["case"] == "all_miss" and _shape(r)]


def _shape(row: Row) -> bool:
    """Whether a row's warps are those that its depth is used with: one, or eight for a copy through registers."""
    return row.number("warps") == (8 if row.number("stages") == 1 else 1)


def _bytes(row: Row) -> float:
    return row.values["gb_s"] * row.us * 1e3


def fit_beside(rows: Sequence[Row], start_ns: float) -> tuple[dict[str, tuple[Beside, ...]], tuple[Beside, ...]]:
    """Slow-down of each kind and GB/s of the copy beside it, by batch, depth and CTAs, from co-run rows.

    By kind beside a copy that was there first; and attention beside one that came after it, from the rows in a step's
    order. Raises SpardaError where nothing was measured.
    """

    def gb_s(row: Row) -> float:
        return row.values["copy_bytes"] / (row.values["copy_us"] * 1e3 - start_ns)

    found = {}
    for kind, of_kind in grouped((r for r in rows if r.op not in LANE_ROWS), lambda r: r.op).items():
        by_batch = sorted(grouped(of_kind, lambda r: int(r.number("batch"))).items())
        found[kind] = tuple(
            Beside(batch, _curves(points, lambda r: max(1.0, r.values["slowdown"])), _curves(points, gb_s))
            for batch, points in by_batch
        )
    if "attention" not in found:
        raise SpardaError("no co-run rows: what a copy does to compute is unknown; run `sparda measure --parts corun`.")
    in_order = grouped((r for r in rows if r.op == IN_ORDER), lambda r: int(r.number("batch")))
    ordered = tuple(_in_order(b, in_order.get(int(b.batch), []), start_ns) for b in found["attention"])
    return found, ordered


def _in_order(beside: Beside, rows: Sequence[Row], start_ns: float) -> Beside:
    """``beside`` with the slow-downs of the rows in a step's order, where there are any.

    A layer longer by E beside a copy of length D: the attention did in D what takes it D - E alone. D follows from
    the copy's bytes and its rate beside attention.
    """

    def slowdown(row: Row) -> float:
        rate = at_depth(beside.gb_s, depth_of(row), row.number("ctas"))
        copy_ns = start_ns + row.values["copy_bytes"] / rate
        lost_ns = (row.us - row.values["alone_us"]) * 1e3
        return max(1.0, copy_ns / max(copy_ns - lost_ns, copy_ns / MOST_SLOWED))

    return Beside(beside.batch, _curves(rows, slowdown), beside.gb_s) if rows else beside


def fit_lanes(rows: Sequence[Row]) -> tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]:
    """What selection's streams cost the main stream, by batch: nanoseconds per attention, and per other operation.

    From the rows ``lanes`` (attention with the streams beside it and without) and ``launches`` (tiny kernels so).
    """
    lost = {
        (r.op, int(r.number("batch"))): max(0.0, r.us - r.values["alone_us"]) * 1e3
        for r in rows
        if r.op in ("lanes", "launches")
    }
    lanes = tuple(sorted((batch, ns) for (op, batch), ns in lost.items() if op == "lanes"))
    launches = tuple(sorted((batch, ns / TINY) for (op, batch), ns in lost.items() if op == "launches"))
    if not lanes or not launches:
        raise SpardaError("no co-run rows of the selection streams; run `sparda measure --parts corun`.")
    return lanes, launches


def _curves(points: Sequence[Row], value: Callable[[Row], float]) -> tuple[CtaCurve, ...]:
    curves = []
    for depth, rows in sorted(grouped(points, depth_of).items()):
        at = {int(r.number("ctas")): value(r) for r in rows}
        curves.append(CtaCurve(depth, tuple(sorted(at)), tuple(at[c] for c in sorted(at))))
    return tuple(curves)
