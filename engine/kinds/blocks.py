"""Fetching by the GPU's copy engines: the host starts a copy for every missing block, one by one or all in one call."""

from __future__ import annotations

from collections.abc import Mapping

from sparda.engine.copy_engine import BlockCopies
from sparda.engine.cuda_runtime import cuda_runtime
from sparda.engine.lanes import Binding
from sparda.engine.plan import Op
from sparda.engine.run import Run, layer_of

KINDS = ("enlist", "blocks", "batch")


def bind(run: Run) -> Mapping[str, Binding]:
    """Bindings that share one list of copies: a plan starts a layer's copies before it lists the next layer's.

    Raises SpardaError where the CUDA runtime cannot do what the plan asks of it.
    """
    t, told = run.tiers, run.reports
    runtime = cuda_runtime() if run.device.type == "cuda" else None
    if runtime is not None and run.plan.of_kind("batch"):
        runtime.require_batch()
    copies = BlockCopies(t.pool, t.heads * run.plan.config.top_k, runtime)

    def enlist(op: Op) -> None:
        layer = layer_of(op)
        copies.enlist(told.src[layer], told.dst[layer], int(told.counts[layer]), t.layers[layer].rows)

    return {"enlist": enlist, "blocks": lambda op: copies.one_by_one(), "batch": lambda op: copies.at_once()}
