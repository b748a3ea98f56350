"""Errors of the fitted tables themselves: each inner point left out in turn and predicted from the points left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, TypeVar

import numpy as np
from scipy.optimize import nnls

from sparda.calibrate.costs import IN_ORDER, Beside, CtaCurve, Fitted, KernelCost, at_depth, interpolate
from sparda.calibrate.fit_copies import depth_of
from sparda.calibrate.store import Row

FEWEST = 3
"""Points on an axis that has an inner one: an end left out would be extrapolated, which no table does."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Errors of points left out along one axis, as shares of the measured value: |predicted / measured - 1|.

    None without points. The gap that a left-out point leaves is wider than predictions find there.
    """

    count: int
    median: float | None
    worst: float | None
    spread: float | None
    """Median run-to-run spread of the values themselves; None too where the rows keep no repeats of them."""


@dataclass(frozen=True, slots=True)
class Duel:
    """Median errors of a table and of a law of two parameters on the same left-out points, as shares.

    ``winner``: whose is smaller; "tie" where they differ by less than the values do from run to run; "none" without
    points.
    """

    table: float | None
    law: float | None
    winner: Literal["table", "law", "tie", "none"]


@dataclass(frozen=True, slots=True)
class KernelErrors:
    """Time of one kind alone, left out by batch and along its second axis; the law is launch + bytes / rate."""

    batch: LeftOut
    second: LeftOut
    duel: Duel


@dataclass(frozen=True, slots=True)
class CorunErrors:
    """One kind beside a prefetch: its slow-down and the copy's GB/s, left out by CTAs and by batch.

    A slow-down is worst where many deep CTAs bring compute to a stop, from one count to the next.
    """

    slowdown_ctas: LeftOut
    slowdown_batch: LeftOut
    gb_s_ctas: LeftOut
    gb_s_batch: LeftOut


@dataclass(frozen=True, slots=True)
class CopyErrors:
    """GB/s of a prefetch alone at one depth, left out by CTAs; the law is the lesser of link and ctas * rate."""

    stages: int
    ctas: LeftOut
    duel: Duel


@dataclass(frozen=True, slots=True)
class Errors:
    """What leaving out tells of a profile's tables, by kind of operation and by depth of the copy alone."""

    kernels: Mapping[str, KernelErrors]
    corun: Mapping[str, CorunErrors]
    copies: tuple[CopyErrors, ...]


Trials = list[tuple[float, float]]
"""Signed relative errors of (table, law) at the points left out."""

T = TypeVar("T")


def leave_one_out(fitted: Fitted, kernels: Sequence[Row], corun: Sequence[Row], copies: Sequence[Row]) -> Errors:
    """Errors of every table in ``fitted``. The rows are those it was fitted to: they know the run-to-run spreads."""
    return Errors(
        kernels={
            kind: kernel_errors(cost, _kernel_spread(cost, [r for r in kernels if r.op == kind]))
            for kind, cost in fitted.kernels.items()
        },
        corun={
            **{kind: corun_errors(b, _slowdown_spread(kind, corun)) for kind, b in fitted.beside.items()},
            IN_ORDER: corun_errors(fitted.in_order, _in_order_spread(fitted, corun)),
        },
        copies=tuple(copy_errors(curve, _copy_spread(curve, copies)) for curve in fitted.transfer),
    )


def kernel_errors(cost: KernelCost, spread: float | None) -> KernelErrors:
    """Errors of one kind's table; ``spread`` is its rows', as a share."""
    by_batch, by_second = _trials(cost)
    return KernelErrors(
        _left_out([e for e, _ in by_batch], spread),
        _left_out([e for e, _ in by_second], spread),
        _duel(by_batch + by_second, spread),
    )


def left_out_ratios(cost: KernelCost) -> list[float]:
    """Predicted over measured of every point of a table that lies between others, left out."""
    return [1.0 + error for trials in _trials(cost) for error, _ in trials]


def _trials(cost: KernelCost) -> tuple[Trials, Trials]:
    """A table's trials, left out by batch and along the second axis."""
    by_batch: Trials = []
    for i in _inner(cost.batches):
        rest = replace(cost, batches=_drop(cost.batches, i), ns=_drop(cost.ns, i), hbm_bytes=_drop(cost.hbm_bytes, i))
        by_batch += _kernel_trials(cost, rest, [(i, j) for j in range(len(cost.seconds))])
    by_second: Trials = []
    for j in _inner(cost.seconds):
        ns, hbm_bytes = (tuple(_drop(line, j) for line in table) for table in (cost.ns, cost.hbm_bytes))
        rest = replace(cost, seconds=_drop(cost.seconds, j), ns=ns, hbm_bytes=hbm_bytes)
        by_second += _kernel_trials(cost, rest, [(i, j) for i in range(len(cost.batches))])
    return by_batch, by_second


def _kernel_trials(cost: KernelCost, rest: KernelCost, points: Sequence[tuple[int, int]]) -> Trials:
    launch, ns_per_byte = fit_law(np.ravel(rest.hbm_bytes), np.ravel(rest.ns))
    found: Trials = []
    for i, j in points:
        ns, moved = cost.ns[i][j], cost.hbm_bytes[i][j]
        table = rest.at(cost.batches[i], cost.seconds[j], moved)
        found.append((table / ns - 1.0, (launch + moved * ns_per_byte) / ns - 1.0))
    return found


def fit_law(hbm_bytes: np.ndarray, ns: np.ndarray) -> tuple[float, float]:
    """(launch in ns, ns per byte) of time = launch + bytes / rate: least squares of relative errors, none below 0."""
    design = np.stack([np.ones_like(ns), hbm_bytes], axis=1) / ns[:, None]
    # Columns of one size: nanoseconds and bytes are many orders of magnitude apart, and the solver has one tolerance.
    size = design.max(axis=0)
    size[size == 0.0] = 1.0
    (launch, per_byte), _ = nnls(design / size, np.ones(len(ns)))
    return float(launch / size[0]), float(per_byte / size[1])


def corun_errors(beside: Sequence[Beside], spread: float | None) -> CorunErrors:
    """Errors of one kind's curves; ``spread`` is the slow-down's. Of the copy's time rows keep but the median."""
    slowdown, gb_s = [b.slowdown for b in beside], [b.gb_s for b in beside]
    batches = [b.batch for b in beside]
    return CorunErrors(
        _left_out([e for curves in slowdown for curve in curves for e in _by_ctas(curve)], spread),
        _left_out(list(_by_batch(batches, slowdown)), spread),
        _left_out([e for curves in gb_s for curve in curves for e in _by_ctas(curve)], None),
        _left_out(list(_by_batch(batches, gb_s)), None),
    )


def _by_ctas(curve: CtaCurve) -> Iterator[float]:
    for i in _inner(curve.ctas):
        yield _without(curve, i).at(curve.ctas[i]) / curve.values[i] - 1.0


def _by_batch(batches: Sequence[float], curves: Sequence[tuple[CtaCurve, ...]]) -> Iterator[float]:
    """A whole batch left out, every depth and CTA count of it predicted from the batches around."""
    for i in _inner(batches):
        around, left = _drop(tuple(curves), i), _drop(tuple(batches), i)
        for curve in curves[i]:
            for ctas, value in zip(curve.ctas, curve.values, strict=True):
                yield interpolate(left, [at_depth(c, curve.stages, ctas) for c in around], batches[i]) / value - 1.0


def copy_errors(curve: CtaCurve, spread: float | None) -> CopyErrors:
    """Errors of the copy alone at one depth; ``spread`` is its rows', as a share."""
    trials: Trials = []
    for i, table in zip(_inner(curve.ctas), _by_ctas(curve), strict=True):
        link, per_cta = fit_link(_without(curve, i))
        trials.append((table, min(link, curve.ctas[i] * per_cta) / curve.values[i] - 1.0))
    return CopyErrors(curve.stages, _left_out([e for e, _ in trials], spread), _duel(trials, spread))


def fit_link(curve: CtaCurve) -> tuple[float, float]:
    """(link, rate per CTA) in GB/s of rate = min(link, ctas * per_cta): least squares of relative errors.

    Every split of the points into a slope and a plateau has its own closed form, and the best of them is taken: a
    descent would stop at a kink.
    """
    ctas, values = np.array(curve.ctas, dtype=float), np.array(curve.values)
    slope, flat = ctas / values, 1.0 / values
    found = []
    for split in range(1, len(ctas)):
        per_cta = float(slope[:split].sum() / (slope[:split] ** 2).sum())
        link = float(flat[split:].sum() / (flat[split:] ** 2).sum())
        off = np.minimum(link, ctas * per_cta) / values - 1.0
        found.append((float((off**2).sum()), link, per_cta))
    _, link, per_cta = min(found)
    return link, per_cta


def _inner(axis: Sequence[float]) -> range:
    return range(1, len(axis) - 1) if len(axis) >= FEWEST else range(0)


def _drop(items: tuple[T, ...], i: int) -> tuple[T, ...]:
    return items[:i] + items[i + 1 :]


def _without(curve: CtaCurve, i: int) -> CtaCurve:
    return CtaCurve(curve.stages, _drop(curve.ctas, i), _drop(curve.values, i))


def _left_out(errors: Sequence[float], spread: float | None) -> LeftOut:
    if not errors:
        return LeftOut(0, None, None, None)
    sizes = [abs(float(e)) for e in errors]
    return LeftOut(len(sizes), median(sizes), max(sizes), spread)


def _duel(trials: Trials, spread: float | None) -> Duel:
    if not trials:
        return Duel(None, None, "none")
    table, law = (median(abs(float(e)) for e in errors) for errors in zip(*trials, strict=True))
    if abs(table - law) <= (spread or 0.0):
        return Duel(table, law, "tie")
    return Duel(table, law, "table" if table < law else "law")


def _kernel_spread(cost: KernelCost, rows: Sequence[Row]) -> float | None:
    """Spread as a share of the table's time, which is less than the row's where a graph's own cost was taken off."""
    at = [cost.at(float(r.case["batch"]), float(r.case.get(cost.second, 0)), 0.0) for r in rows]
    return median(r.spread * r.us * 1e3 / ns for r, ns in zip(rows, at, strict=True)) if rows else None


def _slowdown_spread(kind: str, rows: Sequence[Row]) -> float | None:
    """Spread of one kind's slow-downs, as a share of them."""
    return median(found) if (found := [r.spread for r in rows if r.op == kind]) else None


def _in_order_spread(fitted: Fitted, rows: Sequence[Row]) -> float | None:
    """Spread of attention's slow-downs in a step's order, as a share of them."""
    known, found = {b.batch: b for b in fitted.in_order}, []
    for r in (r for r in rows if r.op == IN_ORDER):
        beside, ctas = known[int(r.case["batch"])], float(r.case["ctas"])
        copy_ns = fitted.start_ns + r.values["copy_bytes"] / at_depth(beside.gb_s, depth_of(r), ctas)
        # Slow-down is D / (D - E), D the copy's time, E what the layer is longer by: E carries all of the row's spread.
        found.append(at_depth(beside.slowdown, depth_of(r), ctas) * r.spread * r.us * 1e3 / copy_ns)
    return median(found) if found else None


def _copy_spread(curve: CtaCurve, rows: Sequence[Row]) -> float | None:
    return median(found) if (found := [r.spread for r in rows if depth_of(r) == curve.stages]) else None
