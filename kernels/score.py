"""Block scores of the forecast query: dot products with compressed keys, max-pooled over blocks.

Source: SparDA, arXiv 2606.04511 (the forecast head ranks blocks by unnormalised dot products; no softmax is needed
because one head's ranking does not depend on the normalisation).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
):
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
        # t < KERNEL is tested first: integer division truncates towards zero, not down, on the device.
        visible = tl.minimum(tl.where(t >= KERNEL, (t - KERNEL) // STRIDE + 1, 0), key_rows)
        d = tl.arange(0, DIM)
        q = tl.load(query + b * query_stride_b + h * query_stride_h + d).to(tl.float32)
        base = keys + b * key_stride_b + h * key_stride_h
        j = first * RATIO + tl.arange(0, TILE * RATIO)
        own = tl.load(
            base + j.to(tl.int64)[:, None] * key_stride_c + d[None, :], mask=(j < visible)[:, None], other=0.0
        )
        # The window that straddles the block's left edge belongs to the neighbour's rows of this same tile, so
        # reading it a second time costs cache hits and no memory traffic.
        left = m * RATIO - 1
        left_ok = (left >= 0) & (left < visible)
        edge = tl.load(base + left.to(tl.int64)[:, None] * key_stride_c + d[None, :], mask=left_ok[:, None], other=0.0)
        dots = tl.where(j < visible, tl.sum(own.to(tl.float32) * q[None, :], axis=1), float("-inf"))
        best = tl.max(tl.reshape(dots, [TILE, RATIO]), axis=1)
        edge_dots = tl.where(left_ok, tl.sum(edge.to(tl.float32) * q[None, :], axis=1), float("-inf"))
        best = tl.where(m < existing, tl.maximum(best, edge_dots), float("-inf"))
        tl.store(target, best, mask=m < blocks)


def check_windows(block: int, kernel: int, stride: int) -> None:
    """Raise ValueError unless block, kernel and stride (tokens) describe windows the score kernels can pool."""
    if stride < 1 or block % stride or (block // stride) & (block // stride - 1):
        raise ValueError(f"block/stride: given {block}/{stride}, allowed: a power of two")
    if kernel < stride:
        raise ValueError(f"kernel: given {kernel}, allowed: at least the stride {stride}")


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
        query: [B, H, D] bf16, any strides, last dimension contiguous.
        keys: [B, H, Cmax, D] bf16, last dimension contiguous; row j: mean of tokens stride*j .. +kernel-1.
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
    if query.dtype != torch.bfloat16 or keys.dtype != torch.bfloat16 or out.dtype != torch.float32:
        raise ValueError(f"dtypes: given {query.dtype}, {keys.dtype}, {out.dtype}, allowed: bf16, bf16, fp32")
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
    )


def visible_keys(t: int, *, kernel: int, stride: int) -> int:
    """Number of compressed keys complete within the t tokens (0 or more) that precede position t."""
    return max(0, (t - kernel) // stride + 1)


def pool_reference(scores: torch.Tensor, out: torch.Tensor, t: int, *, block: int, stride: int) -> None:
    """Max-pool the scores of the visible keys, fp32 [C], into block scores, out fp32 [M], for position t."""
    ratio = block // stride
    out.fill_(float("-inf"))
    for m in range(min(t // block + 1, out.shape[0])):
        window = scores[max(0, ratio * m - 1) : ratio * m + ratio]
        if window.numel():
            out[m] = window.max()


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
