"""What both ways of scoring blocks share: the keys that a token sees, and the best of them in every block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

VALUES = (torch.bfloat16, torch.float32)
"""Types of queries and compressed keys; both alike."""


@triton.jit
def visible_rows(t: tl.tensor, key_rows: tl.tensor, KERNEL: tl.constexpr, STRIDE: tl.constexpr) -> tl.tensor:
    """Compressed keys complete within the t tokens before position t, of the key_rows that there is room for."""
    # t < KERNEL is tested first: integer division truncates towards zero, not down, on the device.
    return tl.minimum(tl.where(t >= KERNEL, (t - KERNEL) // STRIDE + 1, 0), key_rows)


@triton.jit
def load_windows(
    base: tl.tensor, first: tl.tensor, visible: tl.tensor, row: tl.tensor, RATIO: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Keys of the blocks first .. first+TILE-1: those that begin inside them, and each block's left neighbour.

    Both in the type of the keys, [TILE * RATIO, DIM] and [TILE, DIM], zeros where a key is not visible; row is the
    stride of a key.
    """
    d = tl.arange(0, DIM)
    j = first * RATIO + tl.arange(0, TILE * RATIO)
    own = tl.load(base + j.to(tl.int64)[:, None] * row + d[None, :], mask=(j < visible)[:, None], other=0.0)
    # The window that straddles the block's left edge belongs to the neighbour's rows of this same tile, so reading it
    # a second time costs cache hits and no memory traffic.
    left = (first + tl.arange(0, TILE)) * RATIO - 1
    left_ok = (left >= 0) & (left < visible)
    edge = tl.load(base + left.to(tl.int64)[:, None] * row + d[None, :], mask=left_ok[:, None], other=0.0)
    return own, edge


@triton.jit
def pool_own(
    scores: tl.tensor, first: tl.tensor, visible: tl.tensor, RATIO: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Largest score, fp32 [TILE], of the visible keys that begin in each block; -inf where there is none."""
    j = first * RATIO + tl.arange(0, TILE * RATIO)
    return tl.max(tl.reshape(tl.where(j < visible, scores, float("-inf")), [TILE, RATIO]), axis=1)


@triton.jit
def pool_edge(
    best: tl.tensor, scores: tl.tensor, first: tl.tensor, visible: tl.tensor, existing: tl.tensor, RATIO: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """best, or the score of the left neighbour where it is visible and larger; -inf for blocks from existing on.

    Not one function with pool_own: a block's own keys are pooled before the neighbours are scored, or else the compiler
    issues fewer loads at a time.
    """
    m = first + tl.arange(0, TILE)
    left = m * RATIO - 1
    scores = tl.where((left >= 0) & (left < visible), scores, float("-inf"))
    return tl.where(m < existing, tl.maximum(best, scores), float("-inf"))


def check_windows(block: int, kernel: int, stride: int) -> None:
    """Raise ValueError unless block, kernel and stride (tokens) describe windows the score kernels can pool."""
    if stride < 1 or block % stride or (block // stride) & (block // stride - 1):
        raise ValueError(f"block/stride: given {block}/{stride}, allowed: a power of two")
    if kernel < stride:
        raise ValueError(f"kernel: given {kernel}, allowed: at least the stride {stride}")


def check_values(query: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ValueError unless query and keys are both bf16 or both fp32, and out is fp32."""
    if query.dtype not in VALUES or keys.dtype != query.dtype or out.dtype != torch.float32:
        raise ValueError(
            f"dtypes: given queries {query.dtype}, keys {keys.dtype}, out {out.dtype}, allowed: queries and keys both "
            "bf16 or both fp32, out fp32"
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
