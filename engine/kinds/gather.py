"""Fetching by the host's hand: it gathers what it was told is missing, uploads it, and the GPU spreads it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparda.engine.lanes import Binding
from sparda.engine.plan import Op
from sparda.engine.run import Run, layer_of
from sparda.engine.tiers import new_pool
from sparda.kernels.prefetch import prefetch

KINDS = ("gather", "upload", "scatter")

SCATTER_CTAS = 32
"""CTAs that spread uploaded blocks over the slots, inside GPU memory: few, since the main stream runs beside them."""


def wide(rows: Tensor) -> Tensor:
    """The same rows in elements of four bytes.

    Torch gives rows to its threads a few at a time, but only where a row has less than 32768 elements: wide ones.
    """
    return rows.view(torch.int32)


def collect(pool: Tensor, src: Tensor, staged: Tensor) -> None:
    """Rows ``src`` of ``pool``, one after the other in ``staged``; all in host memory, both ``wide``.

    By as many threads as torch has: ``torch.set_num_threads`` sets how many.
    """
    torch.index_select(pool, 0, src, out=staged[: src.numel()])


def carry(staged: Tensor, uploaded: Tensor, count: int) -> None:
    """The first ``count`` rows over to the GPU in one copy, on the current stream."""
    uploaded[:count].copy_(staged[:count], non_blocking=True)


def spread(uploaded: Tensor, slots: Tensor, order: Tensor, dst: Tensor, count: Tensor) -> None:
    """Row i of ``uploaded`` to row ``dst[i]`` of ``slots`` for all i below ``count``; ``order`` is 0, 1, 2…"""
    prefetch(uploaded, slots, order, dst, count, ctas=SCATTER_CTAS, warps=4, stages=4)


def bind(run: Run) -> Mapping[str, Binding]:
    """Bindings, with two staging buffers on either side, used in turn; the plan sees to it that one is free.

    A staging buffer holds all that a layer can lack: the top-k blocks of every (sequence, KV head).
    """
    t, c, device = run.tiers, run.plan.config, run.device
    lists, counts = run.reports.src, run.reports.counts
    rows = t.heads * c.top_k
    gathered = [new_pool(rows, t.values, device, t.dtype) for _ in range(2)]
    uploaded = [run.values(rows, t.values) for _ in range(2)]
    words = [wide(x) for x in (t.pool, *gathered)]
    in_order = [torch.arange(src.numel(), dtype=torch.int32, device=device) for src in run.miss_src]

    def gather(op: Op) -> None:
        layer = layer_of(op)
        if count := int(counts[layer]):
            collect(words[0], lists[layer][:count], words[1 + layer % 2])

    def upload(op: Op) -> None:
        layer = layer_of(op)
        if count := int(counts[layer]):
            carry(gathered[layer % 2], uploaded[layer % 2], count)

    def scatter(op: Op) -> None:
        layer = layer_of(op)
        count = t.miss_count[layer : layer + 1]
        spread(uploaded[layer % 2], t.layers[layer].rows, in_order[layer], run.miss_dst[layer], count)

    return {"gather": gather, "upload": upload, "scatter": scatter}
