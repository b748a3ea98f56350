"""Costs of every kind of operation alone, from kernel rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparda.calibrate.costs import KernelCost
from sparda.calibrate.store import Row, grouped
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.policies import make_plan
from sparda.engine.shapes import ModelShape, SparseSpec

PLANNED = ("sparda", "sparse")
"""Policies that every profile can price."""

HOLDS = {
    "headscore": "sparse",
    "dense_attention": "dense",
    "biased_attention": "nosa",
    "bias": "nosa",
    "shortlist": "nosa",
    "partial_query": "infinigen",
    "partial_score": "infinigen",
    "partial_keys": "infinigen",
    "report": "infinigen",
    "shallow_score": "shallow",
}
"""Policies whose plans hold a kind that the plan of sparda has not."""

GRAPH_OPS = ("graph", "serial")
"""Rows of kind ``kernel`` that are no kind of operation."""


def fit_kernels(rows: Sequence[Row], shape: ModelShape, spec: SparseSpec) -> dict[str, KernelCost]:
    """One table per kind, from rows of kind ``kernel``.

    Raises SpardaError where a kind was not measured at every point of its grid.
    """
    tables = {}
    known = {r.op for r in rows} | {"prefetch"}
    plans = [make_plan(shape, spec, Workload(), Config(policy=p)) for p in PLANNED]
    absent = [op.kind for plan in plans for op in plan if op.kind not in known]
    if absent:
        raise SpardaError(
            f"no kernel rows of {absent[0]}; run `sparda measure --parts kernels` again, it goes on where it stopped."
        )
    for kind, points in grouped((r for r in rows if r.op not in GRAPH_OPS), lambda r: r.op).items():
        second = next((k for k in ("context_tokens", "top_k") if k in points[0].case), "")
        batches = sorted({r.number("batch") for r in points})
        seconds = sorted({r.number(second) if second else 0.0 for r in points})
        at = {(r.number("batch"), r.number(second) if second else 0.0): r for r in points}
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
            ns=tuple(tuple(at[b, s].us * 1e3 for s in seconds) for b in batches),
            hbm_bytes=tuple(tuple(_mean_bytes(kind, b, second, s, shape, spec) for s in seconds) for b in batches),
        )
    return tables


def _mean_bytes(kind: str, batch: float, second: str, value: float, shape: ModelShape, spec: SparseSpec) -> float:
    """Least HBM bytes of one operation of ``kind``, averaged over the plan that was measured."""
    context = int(value) if second == "context_tokens" else 32768
    top_k = int(value) if second == "top_k" else 96
    # A model of few layers scores in one of them all the same, as when it was measured.
    config = Config(policy=HOLDS.get(kind, "sparda"), top_k=top_k)
    config = replace(config, score_layer=min(config.score_layer, shape.layers - 2))
    ops = make_plan(shape, spec, Workload(int(batch), context, 0.0), config).of_kind(kind)
    return sum(op.work.hbm_bytes for op in ops) / len(ops)


def fit_graph(rows: Sequence[Row]) -> tuple[float, float]:
    """Nanoseconds that a whole graph costs beyond its kernels, and that a graph of one tiny kernel takes in all."""
    us = {r.op: r.us for r in rows if r.op in GRAPH_OPS}
    if not {"graph", "serial"} <= set(us):
        raise SpardaError("kernel rows lack the graph's own costs; run `sparda measure --parts kernels` again.")
    return max(0.0, us["graph"] - us["serial"]) * 1e3, us["graph"] * 1e3
