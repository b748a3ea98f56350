"""Block scores of the on-demand baseline (InfLLM-V2): per-head softmax over compressed keys, summed over the group.

Source: SparDA, arXiv 2606.04511, which compares its forecast with this selection. The softmax needs the maximum and
sum over all keys before any score is final, so the keys are read twice: once for the statistics, once for the scores.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sparda.kernels.launch import dependent
from sparda.kernels.pooling import (
    check_values,
    check_windows,
    load_windows,
    pool_edge,
    pool_own,
    pool_reference,
    visible_keys,
    visible_rows,
)

_CHUNK = 512
_CHUNK_TILE = 64
_TILE_BLOCKS = 16


@triton.jit
def _logits(queries: tl.tensor, rows: tl.tensor, scale: tl.tensor, DOT: tl.constexpr) -> tl.tensor:
    """Scaled products of queries [GROUP_PAD, D] and key rows [N, D], fp32 [GROUP_PAD, N]; fp32 stays exact fp32."""
    return tl.dot(queries.to(DOT), tl.trans(rows).to(DOT), input_precision="ieee") * scale


@triton.jit
def _stats_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    stats: tl.tensor,
    kv_heads: tl.tensor,
    chunks: tl.tensor,
    key_rows: tl.tensor,
    query_stride_b: tl.tensor,
    query_stride_h: tl.tensor,
    key_stride_b: tl.tensor,
    key_stride_h: tl.tensor,
    key_stride_c: tl.tensor,
    scale: tl.tensor,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    pair = tl.program_id(1)
    b = (pair // kv_heads).to(tl.int64)
    h = (pair % kv_heads).to(tl.int64)
    t = tl.load(positions + b)
    visible = visible_rows(t, key_rows, KERNEL, STRIDE)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM)
    queries = tl.load(
        q + b * query_stride_b + (h * GROUP + g)[:, None] * query_stride_h + d[None, :],
        mask=(g < GROUP)[:, None],
        other=0.0,
    )
    base = keys + b * key_stride_b + h * key_stride_h
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    start = chunk * CHUNK
    for first in tl.range(start, tl.minimum(start + CHUNK, visible), TILE):
        j = first + tl.arange(0, TILE)
        rows = tl.load(
            base + j.to(tl.int64)[:, None] * key_stride_c + d[None, :], mask=(j < visible)[:, None], other=0.0
        )
        logits = _logits(queries, rows, scale, DOT)
        logits = tl.where((j < visible)[None, :], logits, float("-inf"))
        # The first row of a tile is always visible, so the new maximum is finite and the rescale never is inf - inf.
        higher = tl.maximum(peak, tl.max(logits, axis=1))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(logits - higher[:, None]), axis=1)
        peak = higher
    place = stats + ((pair.to(tl.int64) * chunks + chunk) * GROUP + g) * 2
    tl.store(place, peak, mask=g < GROUP)
    tl.store(place + 1, total, mask=g < GROUP)


@triton.jit
def _summed(
    queries: tl.tensor, rows: tl.tensor, peak: tl.tensor, inverse: tl.tensor, scale: tl.tensor, DOT: tl.constexpr
) -> tl.tensor:
    """Softmax probabilities of key rows [N, D], summed over the query heads [GROUP_PAD, D]: fp32 [N]."""
    logits = _logits(queries, rows, scale, DOT)
    return tl.sum(tl.exp(logits - peak[:, None]) * inverse[:, None], axis=0)


@triton.jit
def _pool_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    stats: tl.tensor,
    out: tl.tensor,
    kv_heads: tl.tensor,
    blocks: tl.tensor,
    chunks: tl.tensor,
    key_rows: tl.tensor,
    query_stride_b: tl.tensor,
    query_stride_h: tl.tensor,
    key_stride_b: tl.tensor,
    key_stride_h: tl.tensor,
    key_stride_c: tl.tensor,
    out_stride_b: tl.tensor,
    out_stride_h: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    RATIO: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * TILE
    pair = tl.program_id(1)
    b = (pair // kv_heads).to(tl.int64)
    h = (pair % kv_heads).to(tl.int64)
    t = tl.load(positions + b)
    existing = t // BLOCK + 1
    visible = visible_rows(t, key_rows, KERNEL, STRIDE)
    m = first + tl.arange(0, TILE)
    target = out + b * out_stride_b + h * out_stride_h + m
    if first * RATIO - 1 >= visible or visible == 0 or first >= existing:
        tl.store(target, tl.full([TILE], float("-inf"), tl.float32), mask=m < blocks)
    else:
        g = tl.arange(0, GROUP_PAD)
        d = tl.arange(0, DIM)
        c = tl.arange(0, CHUNKS_PAD)
        place = stats + (pair.to(tl.int64) * chunks + c)[:, None] * (GROUP * 2) + g[None, :] * 2
        ok = (c < chunks)[:, None] & (g < GROUP)[None, :]
        peaks = tl.load(place, mask=ok, other=float("-inf"))
        totals = tl.load(place + 1, mask=ok, other=0.0)
        # Padded heads get a zero weight, and a finite peak so that no inf - inf arises.
        peak = tl.where(g < GROUP, tl.max(peaks, axis=0), 0.0)
        total = tl.sum(totals * tl.exp(peaks - peak[None, :]), axis=0)
        inverse = tl.where(g < GROUP, 1.0 / tl.where(g < GROUP, total, 1.0), 0.0)
        queries = tl.load(
            q + b * query_stride_b + (h * GROUP + g)[:, None] * query_stride_h + d[None, :],
            mask=(g < GROUP)[:, None],
            other=0.0,
        )
        base = keys + b * key_stride_b + h * key_stride_h
        own, edge = load_windows(base, first, visible, key_stride_c, RATIO, DIM, TILE)
        best = pool_own(_summed(queries, own, peak, inverse, scale, DOT), first, visible, RATIO, TILE)
        edge_scores = _summed(queries, edge, peak, inverse, scale, DOT)
        best = pool_edge(best, edge_scores, first, visible, existing, RATIO, TILE)
        tl.store(target, best, mask=m < blocks)


def headscore_chunks(cmax: int) -> int:
    """Chunks of keys that the statistics of head_scores have for a compressed-key capacity of cmax rows."""
    return max(1, -(-cmax // _CHUNK))


def _check(q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, stats: torch.Tensor) -> int:
    """Validate the tensors of head_scores and return the group size G."""
    batch, kv_heads, _ = out.shape
    if q.ndim != 3 or q.shape[0] != batch or q.shape[1] % kv_heads:
        raise ValueError(f"q: given {tuple(q.shape)}, allowed: [{batch}, a multiple of {kv_heads}, D]")
    dim = q.shape[2]
    if keys.ndim != 4 or keys.shape[:2] != (batch, kv_heads) or keys.shape[3] != dim or dim & (dim - 1) or dim < 16:
        raise ValueError(f"keys: given {tuple(keys.shape)}, allowed: [{batch}, {kv_heads}, Cmax, {dim} = 2^n]")
    group = q.shape[1] // kv_heads
    wanted = (batch, kv_heads, headscore_chunks(keys.shape[2]), group, 2)
    if stats.shape != wanted or stats.dtype != torch.float32 or not stats.is_contiguous():
        raise ValueError(f"stats: given {tuple(stats.shape)} {stats.dtype}, allowed: contiguous fp32 {wanted}")
    check_values(q, keys, out)
    if positions.shape != (batch,) or positions.dtype != torch.int32:
        raise ValueError(f"positions: given {tuple(positions.shape)} {positions.dtype}, allowed: [{batch}] int32")
    if q.stride(2) != 1 or keys.stride(3) != 1 or out.stride(2) != 1:
        raise ValueError("q, keys, out: given a strided last dimension, allowed: a contiguous one")
    return group


def head_scores(
    q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, stats: torch.Tensor, *, block: int,
    kernel: int, stride: int,
) -> None:  # fmt: skip
    """Write every block's score by the InfLLM-V2 rule (baseline of SparDA, arXiv 2606.04511).

    Each query head's softmax over the visible compressed keys (scale 1/sqrt(D)), summed over the heads of a group,
    then pooled over blocks as in forecast_scores.

    Args:
        q: [B, Hq, D] bf16 or fp32, last dimension contiguous; heads h*G .. h*G+G-1 share KV head h.
        keys: [B, H, Cmax, D] compressed keys, of the type of q, last dimension contiguous.
        positions: [B] int32, the current token's position.
        out: [B, H, M] fp32, written whole.
        stats: [B, H, headscore_chunks(Cmax), G, 2] fp32 scratch, contiguous.
        block: tokens of a block.
        kernel: tokens of a compressed key.
        stride: tokens between compressed keys.

    Raises:
        ValueError: a shape, dtype or stride is not as above.

    """
    check_windows(block, kernel, stride)
    group = _check(q, keys, positions, out, stats)
    batch, kv_heads, blocks = out.shape
    dim, chunks = q.shape[2], stats.shape[2]
    scale = 1.0 / math.sqrt(dim)
    strides = (q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2))
    compiled = isinstance(_stats_kernel, triton.runtime.JITFunction)
    sizes = {
        "KERNEL": kernel,
        "STRIDE": stride,
        "GROUP": group,
        "GROUP_PAD": max(16, triton.next_power_of_2(group)),
        "DIM": dim,
        # Triton's interpreter multiplies the bits of bf16 as integers; fp32 gives it the products of the tensor cores.
        "DOT": tl.bfloat16 if compiled and keys.dtype == torch.bfloat16 else tl.float32,
        "num_warps": 4,
        **dependent(keys),
    }
    _stats_kernel[(chunks, batch * kv_heads)](
        q, keys, positions, stats, kv_heads, chunks, keys.shape[2], *strides, scale, CHUNK=_CHUNK, TILE=_CHUNK_TILE,
        **sizes,
    )  # fmt: skip
    _pool_kernel[(triton.cdiv(blocks, _TILE_BLOCKS), batch * kv_heads)](
        q, keys, positions, stats, out, kv_heads, blocks, chunks, keys.shape[2], *strides, out.stride(0), out.stride(1),
        scale, BLOCK=block, RATIO=block // stride, TILE=_TILE_BLOCKS, CHUNKS_PAD=triton.next_power_of_2(chunks),
        **sizes,
    )  # fmt: skip


def headscore_reference(
    q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, *, blocks: int, block: int, kernel: int, stride: int
) -> torch.Tensor:
    """The scores of head_scores by plain PyTorch: fp32 [B, H, blocks], for the same arguments."""
    batch, kv_heads = keys.shape[:2]
    grouped = q.float().reshape(batch, kv_heads, -1, q.shape[2])
    out = torch.empty(batch, kv_heads, blocks, dtype=torch.float32, device=q.device)
    for b, t in enumerate(positions.tolist()):
        count = min(visible_keys(t, kernel=kernel, stride=stride), keys.shape[2])
        for h in range(kv_heads):
            logits = grouped[b, h] @ keys[b, h, :count].float().T / math.sqrt(q.shape[2])
            pool_reference(torch.softmax(logits, dim=-1).sum(0), out[b, h], t, block=block, stride=stride)
    return out
