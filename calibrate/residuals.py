"""How far the fitted tables are from what was measured and not used for them: what a prediction's interval is made of.

Kernels: each inner point of a table predicted from the points around it. Copies: whole layers of the main stream beside
a copy, measured as such and put together from the tables of their kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log

from sparda.calibrate.costs import LAYER, FittedCosts
from sparda.calibrate.leave_one_out import left_out_ratios
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload
from sparda.engine.plan import MAIN, Op, Plan
from sparda.engine.policies import make_plan, resident_layers
from sparda.engine.shapes import ModelShape, SparseSpec

LAYER_CONTEXT = 65536
"""Tokens of context of those layers."""

CLASSES = {"few": 4, "some": 16, "many": 1 << 10}
"""Copies by their CTAs, up to so many: those that find room beside attention, those that do not, and crowds."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """Logarithms of predicted over measured.

    ``kernels`` by kind; ``layers``: a whole layer's main stream by itself, as measured with the copies, in whatever
    session that was; ``slowed`` and ``moved``, of whole layers beside a copy, by class of CTAs: how much longer the
    layer takes, and the copy's rate.
    """

    kernels: Mapping[str, tuple[float, ...]]
    layers: tuple[float, ...]
    slowed: Mapping[str, tuple[float, ...]]
    moved: Mapping[str, tuple[float, ...]]


def class_of(ctas: int) -> str:
    """The class of a copy of ``ctas`` thread blocks."""
    return next(name for name, most in CLASSES.items() if ctas <= most)


def residuals(costs: FittedCosts, corun: Sequence[Row], shape: ModelShape, spec: SparseSpec) -> Residuals:
    """Residuals of the tables in ``costs``, which the rows of op "layer" had no part in."""
    slowed: dict[str, list[float]] = {name: [] for name in CLASSES}
    moved: dict[str, list[float]] = {name: [] for name in CLASSES}
    layers: dict[float, float] = {}
    for row in (r for r in corun if r.op == LAYER):
        ctas, stages = int(row.number("ctas")), int(row.number("stages"))
        config = Config(prefetch_ctas=ctas, prefetch_stages=stages)
        plan = make_plan(shape, spec, Workload(int(row.number("batch")), LAYER_CONTEXT, 0.0), config)
        alone, beside, share = _layer(plan, costs, ctas)
        rate = costs.transfer_gb_s(plan, ctas) * share
        measured = row.values["copy_bytes"] / (row.values["copy_us"] * 1e3 - costs.transfer_start_ns(plan))
        layers[row.number("batch")] = log(alone / 1e3 / row.values["alone_us"])
        slowed[class_of(ctas)].append(log(beside / alone / row.values["slowdown"]))
        moved[class_of(ctas)].append(log(rate / measured))
    return Residuals(
        kernels={kind: tuple(map(log, left_out_ratios(cost))) for kind, cost in costs.fitted.kernels.items()},
        layers=tuple(layers.values()),
        slowed={name: tuple(found) for name, found in slowed.items()},
        moved={name: tuple(found) for name, found in moved.items()},
    )


def _layer(plan: Plan, costs: FittedCosts, ctas: int) -> tuple[float, float, float]:
    """(nanoseconds alone, beside the copy, the copy's share of its rate) of one offloaded layer's main stream."""
    layer = resident_layers(plan.config, plan.shape.layers)
    ops: Iterable[Op] = [op for op in plan if op.stream == MAIN and op.layer == layer]
    alone = [costs.alone_ns(op, plan) for op in ops]
    beside = [ns * costs.slowdown(op, plan, ctas) for op, ns in zip(ops, alone, strict=True)]
    moved = sum(ns * costs.transfer_share(op, plan, ctas) for op, ns in zip(ops, beside, strict=True))
    return sum(alone), sum(beside), moved / sum(beside)
