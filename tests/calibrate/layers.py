"""Rows of whole layers beside a copy, as a machine measures them that is as its costs say."""

from __future__ import annotations

from collections.abc import Iterator

from sparda.calibrate.costs import FittedCosts
from sparda.calibrate.residuals import LAYER_CONTEXT
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload
from sparda.engine.plan import MAIN
from sparda.engine.policies import make_plan, resident_layers
from tests.calibrate.conftest import MODEL, SPEC, row

COPIED = 45e6


def layer_rows(
    costs: FittedCosts,
    longer: float = 1.0,
    slower: float = 1.0,
    copied: float = 1.0,
    ctas: tuple[int, ...] = (1, 8, 32),
) -> Iterator[Row]:
    """Times as the costs say, but for factors: on the layer alone, on its slow-down, and on the copy's rate."""
    for batch in (1, 64):
        for n in ctas:
            config = Config(prefetch_ctas=n)
            plan = make_plan(MODEL, SPEC, Workload(batch, LAYER_CONTEXT, 0.0), config)
            layer = resident_layers(config, MODEL.layers)
            ops = [op for op in plan if op.stream == MAIN and op.layer == layer]
            alone = {op.index: costs.alone_ns(op, plan) for op in ops}
            beside = {op.index: alone[op.index] * costs.slowdown(op, plan, n) for op in ops}
            whole = sum(beside.values())
            share = sum(beside[op.index] * costs.transfer_share(op, plan, n) for op in ops) / whole
            gb_s = copied * share * costs.transfer_gb_s(plan, n)
            values = {
                "alone_us": longer * sum(alone.values()) / 1e3,
                "slowdown": slower * whole / sum(alone.values()),
                "copy_bytes": COPIED,
                "copy_us": (costs.transfer_start_ns(plan) + COPIED / gb_s) / 1e3,
            }
            yield row("corun", "layer", {"batch": batch, "ctas": n, "warps": 1, "stages": 8}, 100.0, values)
