"""Block scores of the forecast query: dot products with compressed keys, max-pooled over blocks.

Source: SparDA, arXiv 2606.04511 (the forecast head ranks blocks by unnormalised dot products; no softmax is needed
because one head's ranking does not depend on the normalisation).
"""

from __future__ import annotations

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

_TILE_BLOCKS = 16


@triton.jit
def _forecast_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    kv_heads: tl.tensor,
    blocks: tl.tensor,
    key_rows: tl.tensor,
    query_stride_b: tl.tensor,
    query_stride_h: tl.tensor,
    key_stride_b: tl.tensor,
    key_stride_h: tl.tensor,
    key_stride_c: tl.tensor,
    out_stride_b: tl.tensor,
    out_stride_h: tl.tensor,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
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
    m = first + tl.arange(0, TILE)
    target = out + b * out_stride_b + h * out_stride_h + m
    if first >= existing:
        tl.store(target, tl.full([TILE], float("-inf"), tl.float32), mask=m < blocks)
    else:
        visible = visible_rows(t, key_rows, KERNEL, STRIDE)
        q = tl.load(query + b * query_stride_b + h * query_stride_h + tl.arange(0, DIM)).to(tl.float32)
        base = keys + b * key_stride_b + h * key_stride_h
        own, edge = load_windows(base, first, visible, key_stride_c, RATIO, DIM, TILE)
        best = pool_own(tl.sum(own.to(tl.float32) * q[None, :], axis=1), first, visible, RATIO, TILE)
        edge_dots = tl.sum(edge.to(tl.float32) * q[None, :], axis=1)
        best = pool_edge(best, edge_dots, first, visible, existing, RATIO, TILE)
        tl.store(target, best, mask=m < blocks)


def forecast_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    block: int,
    kernel: int,
    stride: int,
) -> None:
    """Write the score of every block for the token being decoded (SparDA, arXiv 2606.04511).

    With k = block // stride, out[m] is the largest dot product of the query with compressed keys k*m-1 .. k*m+k-1
    among those complete within the t tokens before the current one; -inf where there is none, and for blocks that do
    not exist yet (m > t // block).

    Args:
        query: [B, H, D] bf16 or fp32, any strides, last dimension contiguous.
        keys: [B, H, Cmax, D], of the type of query, last dimension contiguous; row j: mean of tokens stride*j ..
            +kernel-1.
        positions: [B] int32, the current token's position t (0-based).
        out: [B, H, M] fp32, written whole; last dimension contiguous.
        block: tokens of a block.
        kernel: tokens of a compressed key.
        stride: tokens between compressed keys.

    Raises:
        ValueError: a shape, dtype or stride is not as above.

    """
    check_windows(block, kernel, stride)
    batch, kv_heads, blocks = out.shape
    dim = query.shape[-1]
    if query.shape != (batch, kv_heads, dim) or keys.ndim != 4 or keys.shape[:2] != (batch, kv_heads):
        raise ValueError(f"query {tuple(query.shape)}, keys {tuple(keys.shape)}: allowed [{batch}, {kv_heads}, ...]")
    if keys.shape[3] != dim or dim & (dim - 1):
        raise ValueError(f"head_dim: given query {dim}, keys {keys.shape[3]}, allowed: one power of two")
    check_values(query, keys, out)
    if positions.shape != (batch,) or positions.dtype != torch.int32:
        raise ValueError(f"positions: given {tuple(positions.shape)} {positions.dtype}, allowed: [{batch}] int32")
    if query.stride(2) != 1 or keys.stride(3) != 1 or out.stride(2) != 1:
        raise ValueError("query, keys, out: given a strided last dimension, allowed: a contiguous one")
    _forecast_kernel[(triton.cdiv(blocks, _TILE_BLOCKS), batch * kv_heads)](
        query,
        keys,
        positions,
        out,
        kv_heads,
        blocks,
        keys.shape[2],
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        out.stride(0),
        out.stride(1),
        BLOCK=block,
        KERNEL=kernel,
        STRIDE=stride,
        RATIO=block // stride,
        DIM=dim,
        TILE=_TILE_BLOCKS,
        num_warps=4,
        **dependent(keys),
    )


def forecast_reference(
    query: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, *, blocks: int, block: int, kernel: int,
    stride: int,
) -> torch.Tensor:  # fmt: skip
    """The scores of forecast_scores by plain PyTorch: fp32 [B, H, blocks], for the same arguments."""
    batch, kv_heads, _ = query.shape
    out = torch.empty(batch, kv_heads, blocks, dtype=torch.float32, device=query.device)
    for b, t in enumerate(positions.tolist()):
        count = min(visible_keys(t, kernel=kernel, stride=stride), keys.shape[2])
        for h in range(kv_heads):
            scores = (keys[b, h, :count].float() * query[b, h].float()).sum(-1)
            pool_reference(scores, out[b, h], t, block=block, stride=stride)
    return out
