"""NOSA's eviction head: a bias per token from its value alone, its means, and the choice that they and a query make.

The bias of a token is scale * softplus(head . value), the values of all KV heads side by side; it ranks blocks without
a query and is added to the attention's logits. Compressed biases are means over the windows of compressed keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparda.kernels.pooling import check_windows, pool_reference, visible_keys, visible_rows
from sparda.kernels.select_kernels import _largest, _score_keys

VALUES = (torch.bfloat16, torch.float32)
"""Types of cached values."""


@triton.jit
def _bias_kernel(
    cache: tl.tensor,
    slot_of_block: tl.tensor,
    positions: tl.tensor,
    scale: tl.tensor,
    head: tl.tensor,
    bias: tl.tensor,
    means: tl.tensor,
    kv_heads: tl.tensor,
    blocks: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    mean_rows: tl.tensor,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
    KERNEL_PAD: tl.constexpr,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    b = pair // kv_heads
    h = pair % kv_heads
    t = tl.load(positions + b)
    d = tl.arange(0, DIM)
    product = tl.zeros([DIM], tl.float32)
    for other in tl.range(0, kv_heads):
        owner = b * kv_heads + other
        slot = tl.load(slot_of_block + owner * blocks + t // BLOCK).to(tl.int64)
        # Without a slot there is no value to read; zeros keep a neighbour's out of the sum.
        place = cache + (owner * slots + slot) * (2 * BLOCK * DIM) + BLOCK * DIM + (t % BLOCK) * DIM + d
        value = tl.load(place, mask=d < tl.where(slot >= 0, DIM, 0), other=0.0).to(tl.float32)
        product += value * tl.load(head + (h * kv_heads + other) * DIM + d)
    x = tl.sum(product, axis=0)
    # log(1 + e^x) without an overflow.
    newest = tl.load(scale + h) * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))
    row = bias + pair * tokens
    if t < tokens:
        tl.store(row + t, newest)
    begin = t + 1 - KERNEL
    j = begin // STRIDE
    if (begin >= 0) & (begin % STRIDE == 0) & (j < mean_rows):
        # The newest is still in a register, so no barrier is needed.
        i = tl.arange(0, KERNEL_PAD)
        older = tl.load(row + begin + i, mask=i < KERNEL - 1, other=0.0)
        tl.store(means + pair * mean_rows + j, (tl.sum(older, axis=0) + newest) / KERNEL)


# Row lengths unspecialised for the layout that the radix passes want, as in select_kernels.
@triton.jit(do_not_specialize=["blocks", "mean_rows"])
def _shortlist_kernel(
    scores: tl.tensor,
    means: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    kv_heads: tl.tensor,
    blocks: tl.tensor,
    mean_rows: tl.tensor,
    COUNT: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
):
    pair = tl.program_id(0)
    row = pair.to(tl.int64)
    t = tl.load(positions + pair // kv_heads)
    existing = tl.minimum(t // BLOCK + 1, blocks)
    visible = visible_rows(t, mean_rows, KERNEL, STRIDE)
    m = tl.arange(0, BLOCKS_PAD)
    exists = m < existing
    values = tl.load(scores + row * blocks + m, mask=exists, other=float("-inf"))
    forced = (m < INIT) | (m >= existing - 1 - LOCAL)
    count = tl.minimum(existing, COUNT)
    named = _largest(_score_keys(values, forced, exists), count, count * 0 + 30, BLOCKS_PAD)
    best = tl.full([BLOCKS_PAD], float("-inf"), tl.float32)
    for i in tl.static_range(-1, RATIO):
        j = m * RATIO + i
        inside = exists & (j >= 0) & (j < visible)
        best = tl.maximum(best, tl.load(means + row * mean_rows + j, mask=inside, other=float("-inf")))
    best = tl.where(exists & (named != 0), float("inf"), best)
    # ``out`` may be ``scores``: every thread has read its part before any writes.
    tl.debug_barrier()
    tl.store(out + row * blocks + m, best, mask=m < blocks)


def _check(tensors: dict[str, tuple[torch.Tensor, tuple[int, ...], torch.dtype]]) -> None:
    """Raise ValueError unless every tensor is contiguous and of its shape and type."""
    for name, (tensor, shape, dtype) in tensors.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name}: given {tuple(tensor.shape)} {tensor.dtype}, allowed: contiguous {shape} {dtype}")


def eviction_bias(
    cache: torch.Tensor,
    slot_of_block: torch.Tensor,
    positions: torch.Tensor,
    scale: torch.Tensor,
    head: torch.Tensor,
    bias: torch.Tensor,
    means: torch.Tensor,
    *,
    kernel: int,
    stride: int,
) -> None:
    """Store the newest token's bias and, where it completes a window of ``kernel`` tokens, the window's mean.

    The value is read from the cache, where it is as the attention will read it, and whatever the projection left.

    Args:
        cache: [B, H, S, 2, block, D] bf16 or fp32, contiguous, keys then values; holds the newest token already.
        slot_of_block: [B, H, M] int32; the newest token's block must be resident.
        positions: [B] int32, the newest token's position t.
        scale: [H] fp32.
        head: [H, H * D] fp32.
        bias: [B, H, T] fp32; entry t is written if t < T.
        means: [B, H, C] fp32; row (t + 1 - kernel) / stride is written where that is whole, from 0 to C - 1.
        kernel: tokens of a mean.
        stride: tokens between means.

    Raises:
        ValueError: a shape or dtype is not as above, or a tensor is not contiguous.

    """
    if cache.ndim != 6 or cache.shape[3] != 2 or cache.dtype not in VALUES:
        raise ValueError(f"cache: given {tuple(cache.shape)} {cache.dtype}, allowed: bf16, fp32 [B, H, S, 2, block, D]")
    batch, kv_heads, slots, _, block, dim = cache.shape
    pairs, fp32, int32 = (batch, kv_heads), torch.float32, torch.int32
    _check(
        {
            "cache": (cache, tuple(cache.shape), cache.dtype),
            "slot_of_block": (slot_of_block, (*pairs, slot_of_block.shape[-1]), int32),
            "positions": (positions, (batch,), int32),
            "scale": (scale, (kv_heads,), fp32),
            "head": (head, (kv_heads, kv_heads * dim), fp32),
            "bias": (bias, (*pairs, bias.shape[-1]), fp32),
            "means": (means, (*pairs, means.shape[-1]), fp32),
        }
    )
    if dim & (dim - 1):
        raise ValueError(f"D: given {dim}, allowed: a power of two")
    if not 1 <= stride <= kernel:
        raise ValueError(f"stride: given {stride}, allowed: 1..kernel = {kernel}")
    _bias_kernel[(batch * kv_heads,)](
        cache, slot_of_block, positions, scale, head, bias, means, kv_heads, slot_of_block.shape[2], slots,
        bias.shape[2], means.shape[2], BLOCK=block, KERNEL=kernel, KERNEL_PAD=triton.next_power_of_2(kernel),
        STRIDE=stride, DIM=dim, num_warps=1,
    )  # fmt: skip


def shortlist(
    scores: torch.Tensor,
    means: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    count: int,
    init_blocks: int,
    local_blocks: int,
    block: int,
    kernel: int,
    stride: int,
) -> None:
    """Join a query's block scores with the biases: +inf for the best ``count`` blocks, else the block's largest mean.

    The blocks named by the query are the forced ones (below ``init_blocks`` and the last ``local_blocks`` + 1), then
    the best scores (ties: the lowest block; NaN counts as -inf), min(count, existing) in all. Means are pooled over
    blocks as compressed keys are in forecast_scores; -inf where there is none and for blocks that do not exist yet.

    Args:
        scores: [B, H, M] fp32.
        means: [B, H, C] fp32 compressed biases.
        positions: [B] int32, the newest token's.
        out: [B, H, M] fp32, written whole; may be ``scores``.
        count: blocks that the query names, forced ones included.
        init_blocks: forced blocks at the start.
        local_blocks: forced blocks before the newest.
        block: tokens of a block.
        kernel: tokens of a compressed key.
        stride: tokens between compressed keys.

    Raises:
        ValueError: a shape, dtype or size is not as above.

    """
    check_windows(block, kernel, stride)
    batch, kv_heads, blocks = scores.shape
    pairs, fp32 = (batch, kv_heads), torch.float32
    _check(
        {
            "scores": (scores, (*pairs, blocks), fp32),
            "means": (means, (*pairs, means.shape[-1]), fp32),
            "positions": (positions, (batch,), torch.int32),
            "out": (out, (*pairs, blocks), fp32),
        }
    )
    if not 1 <= count <= 32767 or blocks > 32768:
        raise ValueError(f"count, blocks: given {count}, {blocks}, allowed: 1..32767, 1..32768")
    _shortlist_kernel[(batch * kv_heads,)](
        scores, means, positions, out, kv_heads, blocks, means.shape[2], COUNT=count, INIT=init_blocks,
        LOCAL=local_blocks, BLOCK=block, KERNEL=kernel, STRIDE=stride, RATIO=block // stride,
        BLOCKS_PAD=max(16, triton.next_power_of_2(blocks)), num_warps=8,
    )  # fmt: skip


def bias_reference(values: torch.Tensor, scale: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Biases of any tokens by plain PyTorch: fp32 [B, H, T] of values [B, H, T, D], scale and head as above."""
    wide = values.float().movedim(2, 1).flatten(2)
    return torch.nn.functional.softplus(wide @ head.T).mul(scale).movedim(2, 1).contiguous()


def shortlist_reference(
    scores: torch.Tensor, means: torch.Tensor, positions: torch.Tensor, *, count: int, init_blocks: int,
    local_blocks: int, block: int, kernel: int, stride: int,
) -> torch.Tensor:  # fmt: skip
    """The combined scores of shortlist by plain PyTorch: fp32 [B, H, M], for the same arguments."""
    out = torch.empty_like(scores)
    for b, t in enumerate(positions.tolist()):
        existing = min(t // block + 1, scores.shape[2])
        seen = min(visible_keys(t, kernel=kernel, stride=stride), means.shape[2])
        forced = [m for m in range(existing) if m < init_blocks or m >= existing - 1 - local_blocks]
        for h in range(scores.shape[1]):
            values = scores[b, h].masked_fill(scores[b, h].isnan(), float("-inf")).tolist()
            others = sorted((m for m in range(existing) if m not in forced), key=lambda m: (-values[m], m))
            pool_reference(means[b, h, :seen], out[b, h], t, block=block, stride=stride)
            out[b, h, (forced + others)[: min(count, existing)]] = float("inf")
    return out
