"""Fetching by the host's hand: it gathers what it was told is missing, uploads it, and the GPU spreads it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sparda.engine.lanes import Binding
from sparda.engine.plan import Op
from sparda.engine.run import Run, layer_of
from sparda.engine.tiers import new_pool
from sparda.kernels.prefetch import prefetch

KINDS = ("gather", "upload", "scatter")

SCATTER_CTAS = 32
"""CTAs that spread uploaded blocks over the slots, inside GPU memory: few, since the main stream runs beside them."""


def bind(run: Run) -> Mapping[str, Binding]:
    """Bindings, with two staging buffers on either side, used in turn; the plan sees to it that one is free.

    A staging buffer holds all that a layer can lack: the top-k blocks of every (sequence, KV head).
    """
    t, c, device = run.tiers, run.plan.config, run.device
    lists, counts = run.reports.src, run.reports.counts
    rows = t.heads * c.top_k
    gathered = [new_pool(rows, t.values, device, t.dtype) for _ in range(2)]
    uploaded = [run.values(rows, t.values) for _ in range(2)]
    # Torch gives rows to its threads a few at a time, but only where a row has less than 32768 elements: wide ones.
    words = [x.view(torch.int32) for x in (t.pool, *gathered)]
    in_order = [torch.arange(src.numel(), dtype=torch.int32, device=device) for src in run.miss_src]

    def gather(op: Op) -> None:
        # By as many threads as torch has: ``torch.set_num_threads`` sets how many.
        layer = layer_of(op)
        if count := int(counts[layer]):
            torch.index_select(words[0], 0, lists[layer][:count], out=words[1 + layer % 2][:count])

    def upload(op: Op) -> None:
        layer = layer_of(op)
        if count := int(counts[layer]):
            uploaded[layer % 2][:count].copy_(gathered[layer % 2][:count], non_blocking=True)

    def scatter(op: Op) -> None:
        layer = layer_of(op)
        prefetch(
            uploaded[layer % 2],
            t.layers[layer].rows,
            in_order[layer],
            run.miss_dst[layer],
            t.miss_count[layer : layer + 1],
            ctas=SCATTER_CTAS,
            warps=4,
            stages=4,
        )

    return {"gather": gather, "upload": upload, "scatter": scatter}
