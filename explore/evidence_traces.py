"""Figures of steps that followed a real model's choices: misses as foretold, and the step's time as predicted."""

from __future__ import annotations

from sparda.calibrate.cases import config_of
from sparda.calibrate.store import Row
from sparda.engine.config import Workload
from sparda.explore.figures import Figure, Rows
from sparda.explore.predict import predict
from sparda.explore.text import count


def traced(known: Rows) -> dict[str, Figure]:
    """Of rows of kind ``trace``: what was counted beside what was foretold, and predicted beside measured times.

    A prediction is given the misses that the trace foretells for the slots, and nothing else of the row.
    """
    rows = known.profile.store.latest("trace")
    apart = [(abs(r.values["misses_per_layer"] / r.values["foretold_per_layer"] - 1), r) for r in rows if _foretold(r)]
    errors = [(abs(_predicted_us(known, r) / r.us - 1), r) for r in rows if _foretold(r)]
    text = f"{count(len(rows), 'step')} of sparda at 131072 tokens that follow choices of a real model"
    return {
        "trace.misses.max_gap": _largest(known, apart, "share of the misses foretold", text, 0.02),
        "trace.step_error.max": _largest(known, errors, "share of the measured step", text, 0.12),
    }


def _foretold(row: Row) -> bool:
    return row.values.get("foretold_per_layer", 0.0) > 0


def _predicted_us(known: Rows, row: Row) -> float:
    config = config_of(row)
    batch, context = int(row.number("batch")), int(row.number("context_tokens"))
    streams = batch * known.shape.kv_heads
    rate = row.values["foretold_per_layer"] / (streams * config.top_k)
    return predict(known.profile, known.shape, known.spec, Workload(batch, context, rate), config).step_us


def _largest(known: Rows, found: list[tuple[float, Row]], unit: str, text: str, target: float) -> Figure:
    value, row = max(found, key=lambda f: f[0], default=(None, None))
    where = f"; most: batch {row.case['batch']}, {row.case['resident_blocks']} resident blocks" if row else ""
    return known.figure(value, unit, target, False, [r for _, r in found], text + where)
