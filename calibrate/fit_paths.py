"""What transfers by way of the host take, from link rows: gathering, uploading, copies block by block, reports."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from sparda.calibrate.costs import BlockCurve, PathCosts
from sparda.calibrate.store import Row

BY_BLOCKS = ("gather", "upload", "blocks", "batch", "scatter")
COPIES = ("blocks", "batch")
USUAL_THREADS = 0
"""Threads of the host's gather in its rows: as many as torch takes by itself."""


def fit_paths(rows: Sequence[Row]) -> PathCosts | None:
    """Costs of the host's paths; None where they were not measured.

    The host starts copies one after the other while the first ones run already: of ``blocks`` and ``batch`` the
    engine's time is all that follows the making of the list.
    """
    found = {op: [r for r in rows if r.op == op] for op in (*BY_BLOCKS, "report")}
    found["gather"] = [r for r in found["gather"] if r.number("threads") == USUAL_THREADS]
    if not all(found.values()):
        return None
    made = {op: _curve(found[op], [r.values["enlist_us"] for r in found[op]]) for op in COPIES}
    started = {op: _curve(found[op], [r.values["host_us"] - r.values["enlist_us"] for r in found[op]]) for op in COPIES}
    rest = {op: _curve(found[op], [r.us - r.values["enlist_us"] for r in found[op]]) for op in COPIES}
    whole = {op: _curve(found[op], [r.us for r in found[op]]) for op in ("gather", "upload", "scatter")}
    trips = [r.values["round_trip_us"] - r.us for r in found["report"]]
    return PathCosts(listed=made, started=started, by_blocks={**whole, **rest}, round_trip_ns=1e3 * median(trips))


def _curve(rows: Sequence[Row], us: Sequence[float]) -> BlockCurve:
    at = sorted({int(r.number("blocks")): 1e3 * value for r, value in zip(rows, us, strict=True)}.items())
    return BlockCurve(tuple(blocks for blocks, _ in at), tuple(ns for _, ns in at))
