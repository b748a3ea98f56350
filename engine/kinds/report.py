"""Telling the host which blocks are missing."""

from __future__ import annotations

from collections.abc import Mapping

from sparda.engine.lanes import Binding
from sparda.engine.plan import Op
from sparda.engine.run import Run, layer_of

KINDS = ("report",)


def bind(run: Run) -> Mapping[str, Binding]:
    """The binding. Lists are copied whole: how much of them counts is in the report itself."""
    told, counts = run.reports, run.tiers.miss_count

    def report(op: Op) -> None:
        layer = layer_of(op)
        told.src[layer].copy_(run.miss_src[layer], non_blocking=True)
        if told.dst:
            told.dst[layer].copy_(run.miss_dst[layer], non_blocking=True)
        told.counts[layer : layer + 1].copy_(counts[layer : layer + 1], non_blocking=True)

    return {"report": report}
