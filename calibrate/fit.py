"""From measurement rows to a profile: costs from kernel, link and co-run rows; whole steps only judge the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from scipy.optimize import nnls

from sparda.calibrate.costs import (
    IN_ORDER,
    SHALLOWEST,
    TINY,
    Beside,
    CtaCurve,
    Fitted,
    FittedCosts,
    KernelCost,
    at_depth,
)
from sparda.calibrate.holdout import error_band, held_out
from sparda.calibrate.leave_one_out import leave_one_out
from sparda.calibrate.profile import Profile, profile_json
from sparda.calibrate.store import Row, Store
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.loader import write_text
from sparda.engine.plan import Plan
from sparda.engine.policies import make_plan
from sparda.engine.shapes import ModelShape, SparseSpec, model_named
from sparda.sim.costs import Machine

CHUNK_BYTES = 16384
"""Chunk that decoding copies in; link rows with other chunks inform, but do not enter the fit."""

PLANNED = ("sparda", "sparse")
"""Policies whose plans hold every kind of operation between them."""

LONG_NS = 10_000
"""Length from which on an operation's bytes, and not its launch, say what HBM gave it."""

HOST_BOUND = 1.5
"""Times a tiny graph's time, below which a graph of one operation says more of the host than of the operation."""

GRAPH_OPS = ("graph", "serial", "hop")
"""Rows of kind ``kernel`` that are no kind of operation."""

LANE_ROWS = ("launches", "lanes", IN_ORDER)
"""Rows of kind ``corun`` that are no operation beside a copy."""

MOST_SLOWED = 50.0
"""Slow-down beyond which a co-run row cannot tell how much longer it was."""

Key = TypeVar("Key")


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Rows by ``key``, in the order they come."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _number(row: Row, name: str) -> float:
    value = row.case.get(name, 0)
    return float(value) if not isinstance(value, str) else 0.0


def _depth(row: Row) -> int:
    return max(SHALLOWEST, int(_number(row, "stages")))


def fit_kernels(rows: Sequence[Row], shape: ModelShape, spec: SparseSpec) -> dict[str, KernelCost]:
    """One table per kind, from rows of kind ``kernel``.

    Raises SpardaError where a kind was not measured at every point of its grid.
    """
    tables = {}
    graph = fit_graph(rows)
    known = {r.op for r in rows} | {"prefetch"}
    plans = [make_plan(shape, spec, Workload(), Config(policy=p)) for p in PLANNED]
    absent = [op.kind for plan in plans for op in plan if op.kind not in known]
    if absent:
        raise SpardaError(
            f"no kernel rows of {absent[0]}; run `sparda measure --parts kernels` again, it goes on where it stopped."
        )
    for kind, points in grouped((r for r in rows if r.op not in GRAPH_OPS), lambda r: r.op).items():
        second = next((k for k in ("context_tokens", "top_k") if k in points[0].case), "")
        batches = sorted({_number(r, "batch") for r in points})
        seconds = sorted({_number(r, second) if second else 0.0 for r in points})
        at = {(_number(r, "batch"), _number(r, second) if second else 0.0): r for r in points}
        missing = [(b, s) for b in batches for s in seconds if (b, s) not in at]
        if missing:
            raise SpardaError(
                f"kernel rows of {kind} lack (batch, {second or 'nothing else'}) = {missing[0]}; "
                "run `sparda measure --parts kernels` again, it goes on where it stopped."
            )
        tables[kind] = KernelCost(
            second=second,
            batches=tuple(batches),
            seconds=tuple(seconds),
            ns=tuple(tuple(_own_ns(at[b, s], graph, plans) for s in seconds) for b in batches),
            hbm_bytes=tuple(tuple(_mean_bytes(kind, b, second, s, shape, spec) for s in seconds) for b in batches),
        )
    return tables


def _own_ns(row: Row, graph: tuple[float, float], plans: Sequence[Plan]) -> float:
    """Nanoseconds of one operation of a kernel row.

    Of embedding, final norm and the like a step has one, so they were timed one to a graph. Where that took hardly
    longer than a graph of a tiny kernel, it was the host's launches that were timed, and what a graph costs beyond
    its kernels is taken off: the step's own graph pays that once. ``graph``: that cost and a tiny graph's time, ns.
    """
    beyond, tiny = graph
    alone = max(len(plan.of_kind(row.op)) for plan in plans) == 1
    ns = row.us * 1e3
    return max(ns, tiny) - beyond if alone and ns < HOST_BOUND * tiny else ns


def _mean_bytes(kind: str, batch: float, second: str, value: float, shape: ModelShape, spec: SparseSpec) -> float:
    """Least HBM bytes of one operation of ``kind``, averaged over the plan that was measured."""
    context = int(value) if second == "context_tokens" else 32768
    config = Config(policy="sparse" if kind == "headscore" else "sparda", top_k=int(value) if second == "top_k" else 96)
    ops = make_plan(shape, spec, Workload(int(batch), context, 0.0), config).of_kind(kind)
    return sum(op.work.hbm_bytes for op in ops) / len(ops)


def fit_transfer(rows: Sequence[Row]) -> tuple[tuple[CtaCurve, ...], float]:
    """GB/s by depth and CTAs, and the time before the first byte, from link rows.

    Time of a copy = start + bytes / rate. ``start`` is common to all: non-negative least squares over the default
    depth's lists of 0 to 3072 blocks; rates then follow from the longest list at every depth.
    """
    copies = [r for r in rows if r.op == "prefetch" and r.case["chunk_bytes"] == CHUNK_BYTES]
    if not copies:
        raise SpardaError("no link rows with 16 KiB chunks; run `sparda measure --parts link`.")
    wide = [r for r in copies if _number(r, "blocks") and 4 <= _number(r, "ctas") <= 16 and _number(r, "stages") == 8]
    short = [r for r in copies if not _number(r, "blocks")]
    if not wide or not short:
        raise SpardaError("link rows lack lists of several lengths at 8 stages; run `sparda measure --parts link`.")
    design = np.array([[1.0, _number(r, "blocks")] for r in wide + short])
    times = np.array([r.us * 1e3 for r in wide + short])
    # Relative errors: a short copy's start must not drown in a long copy's noise.
    (start, _), _ = nnls(design / times[:, None], np.ones(len(times)))
    curves = []
    for depth, points in sorted(grouped(longest_copies(copies), _depth).items()):
        rates = {int(_number(r, "ctas")): _bytes(r) / (r.us * 1e3 - start) for r in points}
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
    return _number(row, "warps") == (8 if _number(row, "stages") == 1 else 1)


def _bytes(row: Row) -> float:
    return row.values["gb_s"] * row.us * 1e3


def fit_beside(rows: Sequence[Row], start_ns: float) -> dict[str, tuple[Beside, ...]]:
    """Slow-down of each kind and GB/s of the copy beside it, by batch, depth and CTAs, from co-run rows.

    Attention's slow-down is that of the rows in a step's order. Raises SpardaError where nothing was measured.
    """

    def gb_s(row: Row) -> float:
        return row.values["copy_bytes"] / (row.values["copy_us"] * 1e3 - start_ns)

    found = {}
    for kind, of_kind in grouped((r for r in rows if r.op not in LANE_ROWS), lambda r: r.op).items():
        by_batch = sorted(grouped(of_kind, lambda r: int(_number(r, "batch"))).items())
        found[kind] = tuple(
            Beside(batch, _curves(points, lambda r: max(1.0, r.values["slowdown"])), _curves(points, gb_s))
            for batch, points in by_batch
        )
    if "attention" not in found:
        raise SpardaError("no co-run rows: what a copy does to compute is unknown; run `sparda measure --parts corun`.")
    in_order = grouped((r for r in rows if r.op == IN_ORDER), lambda r: int(_number(r, "batch")))
    found["attention"] = tuple(_in_order(b, in_order.get(b.batch, []), start_ns) for b in found["attention"])
    return found


def _in_order(beside: Beside, rows: Sequence[Row], start_ns: float) -> Beside:
    """``beside`` with the slow-downs of the rows in a step's order, where there are any.

    A layer longer by E beside a copy of length D: the attention did in D what takes it D - E alone. D follows from
    the copy's bytes and its rate beside attention.
    """

    def slowdown(row: Row) -> float:
        rate = at_depth(beside.gb_s, _depth(row), _number(row, "ctas"))
        copy_ns = start_ns + row.values["copy_bytes"] / rate
        lost_ns = (row.us - row.values["alone_us"]) * 1e3
        return max(1.0, copy_ns / max(copy_ns - lost_ns, copy_ns / MOST_SLOWED))

    return Beside(beside.batch, _curves(rows, slowdown), beside.gb_s) if rows else beside


def fit_lanes(rows: Sequence[Row]) -> tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]:
    """What selection's streams cost the main stream, by batch: nanoseconds per attention, and per other operation.

    From the rows ``lanes`` (attention with the streams beside it and without) and ``launches`` (tiny kernels so).
    """
    lost = {
        (r.op, int(_number(r, "batch"))): max(0.0, r.us - r.values["alone_us"]) * 1e3
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
    for depth, rows in sorted(grouped(points, _depth).items()):
        at = {int(_number(r, "ctas")): value(r) for r in rows}
        curves.append(CtaCurve(depth, tuple(sorted(at)), tuple(at[c] for c in sorted(at))))
    return tuple(curves)


def fit_graph(rows: Sequence[Row]) -> tuple[float, float]:
    """Nanoseconds that a whole graph costs beyond its kernels, and that a graph of one tiny kernel takes in all."""
    us = {r.op: r.us for r in rows if r.op in GRAPH_OPS}
    if not {"graph", "serial"} <= set(us):
        raise SpardaError("kernel rows lack the graph's own costs; run `sparda measure --parts kernels` again.")
    return max(0.0, us["graph"] - us["serial"]) * 1e3, us["graph"] * 1e3


def fit_machine(name: str, store: Store, kernels: Mapping[str, KernelCost]) -> Machine:
    """The machine's ceilings as measured: best HBM rate of any kernel, best link rates."""
    links = store.latest("link")
    sessions = list(store.provenance.values())
    rates = [
        moved / ns
        for cost in kernels.values()
        for moved, ns in zip(np.ravel(cost.hbm_bytes), np.ravel(cost.ns), strict=True)
        if ns > LONG_NS
    ]
    up = [r.values["gb_s"] for r in links if r.op == "copy_engine" and r.case["direction"] == "d2h"]
    if not up:
        raise SpardaError("no link rows of the copy engine; run `sparda measure --parts link`.")
    return Machine(
        name=name,
        gpu=str(sessions[0]["gpu"]),
        sms=int(str(sessions[0]["sms"])),
        hbm_gb_s=round(float(max(rates)), 1),
        link_h2d_gb_s=round(max(r.values["gb_s"] for r in links if r.op == "prefetch" and r.values), 2),
        link_d2h_gb_s=round(max(up), 2),
        hbm_capacity_bytes=int(str(sessions[0]["gpu_memory_bytes"])),
        host_pinned_bytes=max(int(str(s["host_memory_bytes"])) for s in sessions),
    )


def fit(name: str, store: Store, shape: ModelShape, spec: SparseSpec) -> FittedCosts:
    """Costs from the newest row of every kernel, link and co-run case."""
    kernel_rows = store.latest("kernel")
    kernels = fit_kernels(kernel_rows, shape, spec)
    transfer, start = fit_transfer(store.latest("link"))
    corun = store.latest("corun")
    lanes, launches = fit_lanes(corun)
    fitted = Fitted(kernels, transfer, fit_beside(corun, start), start, lanes, launches, fit_graph(kernel_rows)[0])
    return FittedCosts(fit_machine(name, store, kernels), fitted)


AXES = (
    "batch",
    "context_tokens",
    "miss_rate",
    "top_k",
    "lookahead",
    "prefetch_ctas",
    "prefetch_warps",
    "prefetch_stages",
)


def calibrate(folder: Path, name: str) -> Profile:
    """Fit a profile to the rows in ``folder``, judge it on the whole steps there, and write ``profile.json``.

    Raises SpardaError where rows are missing.
    """
    store = Store(folder)
    models = {str(p.get("model")) for p in store.provenance.values()}
    if len(models) != 1:
        raise SpardaError(f"{folder} must hold the rows of one model, found {', '.join(sorted(models)) or 'none'}.")
    shape, spec = model_named(models.pop()), SparseSpec()
    costs = fit(name, store, shape, spec)
    steps = store.latest("step")
    if not steps:
        raise SpardaError(f"{folder} has no whole steps to judge the fit by; run `sparda measure --parts steps`.")
    profile = Profile(
        name=name,
        tier="measured",
        machine=costs.machine,
        model=shape.name,
        band=error_band(held_out(steps, costs, shape, spec)),
        errors=leave_one_out(
            costs.fitted, store.latest("kernel"), store.latest("corun"), longest_copies(store.latest("link"))
        ),
        envelope={a: (min(_number(r, a) for r in steps), max(_number(r, a) for r in steps)) for a in AXES},
        sessions=tuple(sorted({r.session for r in store.rows()})),
        costs=costs,
        folder=folder,
    )
    write_text(folder / "profile.json", profile_json(profile))
    return profile
