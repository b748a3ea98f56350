"""From measurement rows to a profile: costs from kernel, link and co-run rows; whole steps only judge the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from sparda.calibrate.costs import Fitted, FittedCosts, KernelCost
from sparda.calibrate.fit_copies import fit_beside, fit_lanes, fit_transfer, longest_copies
from sparda.calibrate.fit_kernels import fit_graph, fit_kernels
from sparda.calibrate.fit_paths import fit_paths
from sparda.calibrate.handicap import handicapped
from sparda.calibrate.holdout import coverage, error_band, held_out, held_out_rows
from sparda.calibrate.interval import Intervals
from sparda.calibrate.judged import Judged
from sparda.calibrate.leave_one_out import leave_one_out
from sparda.calibrate.profile import Profile, profile_json
from sparda.calibrate.residuals import residuals
from sparda.calibrate.shapes import other_shapes
from sparda.calibrate.store import Store
from sparda.calibrate.terms import terms
from sparda.engine.errors import SpardaError
from sparda.engine.loader import write_text
from sparda.engine.shapes import ModelShape, SparseSpec, model_named
from sparda.sim.costs import Machine

LONG_NS = 10_000
"""Length from which on an operation's bytes, and not its launch, say what HBM gave it."""


def fit_machine(name: str, store: Store, kernels: Mapping[str, KernelCost]) -> Machine:
    """The machine's ceilings as measured: best link rates, and the best HBM rate of any kernel.

    A kernel's time is what it adds to a step. Where it starts while its predecessor ends, its rate is a little above
    what the memory sustains: as a ceiling it errs on the side of asking too much.
    """
    links = store.latest("link")
    sessions = list(store.provenance.values())
    rates = [
        moved / ns
        for cost in kernels.values()
        for moved, ns in zip(np.ravel(cost.hbm_bytes), np.ravel(cost.ns), strict=True)
        if ns > LONG_NS
    ]
    engine = [r for r in links if r.op == "copy_engine"]
    up, down = ([r.values["gb_s"] for r in engine if r.case["direction"] == way] for way in ("d2h", "h2d"))
    alone = [r.values["gb_s"] for r in links if r.op == "hbm_read" and r.case["ctas"] == 1]
    if not up:
        raise SpardaError("no link rows of the copy engine; run `sparda measure --parts link`.")
    return Machine(
        name=name,
        gpu=str(sessions[0]["gpu"]),
        sms=int(str(sessions[0]["sms"])),
        hbm_gb_s=round(float(max(rates)), 1),
        link_h2d_gb_s=round(max(r.values["gb_s"] for r in links if r.op == "prefetch" and "gb_s" in r.values), 2),
        link_d2h_gb_s=round(max(up), 2),
        hbm_capacity_bytes=int(str(sessions[0]["gpu_memory_bytes"])),
        host_pinned_bytes=max(int(str(s["host_memory_bytes"])) for s in sessions),
        engine_h2d_gb_s=round(max(down), 2) if down else 0.0,
        sm_read_gb_s=round(alone[0], 1) if alone else 0.0,
    )


def fit(name: str, store: Store, shape: ModelShape, spec: SparseSpec) -> FittedCosts:
    """Costs from the newest row of every kernel, link and co-run case."""
    kernel_rows = store.latest("kernel")
    kernels = fit_kernels(kernel_rows, shape, spec)
    transfer, start = fit_transfer(store.latest("link"))
    corun = store.latest("corun")
    lanes, launches = fit_lanes(corun)
    beside, in_order = fit_beside(corun, start)
    graph_ns, _ = fit_graph(kernel_rows)
    paths = fit_paths(store.latest("link"))
    fitted = Fitted(kernels, transfer, beside, in_order, start, lanes, launches, graph_ns, paths)
    return FittedCosts(fit_machine(name, store, kernels), fitted)


FITTED_TO = ("kernel", "link", "corun", "step")
"""Kinds of rows that make a profile, by fitting or by judging; others may be of another model."""

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


def calibrate(folder: Path, name: str, each: Callable[[int, int], None] = lambda done, total: None) -> Profile:
    """Fit a profile to the rows in ``folder``, judge it on the whole steps there, and write ``profile.json``.

    Most of the time goes into intervals, for which each held-out step is played on every draw: ``each`` is told (steps
    done, of how many). Raises SpardaError where rows are missing.
    """
    store = Store(folder)
    fitted_to = {r.session for kind in FITTED_TO for r in store.rows(kind)}
    models = {str(p.get("model")) for name, p in store.provenance.items() if name in fitted_to}
    if len(models) != 1:
        raise SpardaError(f"{folder} must hold the rows of one model, found {', '.join(sorted(models)) or 'none'}.")
    shape, spec = model_named(models.pop()), SparseSpec()
    costs = fit(name, store, shape, spec)
    steps, carried_by_host = held_out_rows(store)
    if not steps:
        raise SpardaError(f"{folder} has no whole steps to judge the fit by; run `sparda measure --parts steps`.")
    found = held_out(steps, costs, shape, spec)
    corun = store.latest("corun")
    left = residuals(costs, corun, shape, spec)
    profile = Profile(
        name=name,
        tier="measured",
        machine=costs.machine,
        model=shape.name,
        band=error_band(found),
        errors=leave_one_out(costs.fitted, store.latest("kernel"), corun, longest_copies(store.latest("link"))),
        envelope={a: (min(r.number(a) for r in steps), max(r.number(a) for r in steps)) for a in AXES},
        sessions=tuple(sorted({r.session for r in store.rows()})),
        costs=costs,
        folder=folder,
        judged=Judged(
            by_host=error_band(held_out(carried_by_host, costs, shape, spec)),
            residuals=left,
            coverage=coverage(found, Intervals(costs, left), shape, spec, each) if left.layers else None,
            terms=terms(steps, costs, shape, spec),
            by_machine=error_band([h.held for h in handicapped(store.latest("handicap"), costs, shape, spec)]),
            by_shape=error_band(other_shapes(folder, costs, shape, spec)),
        ),
    )
    write_text(folder / "profile.json", profile_json(profile))
    return profile
