"""The teacher of a Forecast: attention over fine keys, summed over a group's heads, max-pooled to compressed keys.

Source: SparDA, arXiv 2606.04511, training. A fine key is the mean of two neighbouring rotated keys, one a token;
compressed key i, of the deployed grid, gets the most of what fine keys stride*i-1 .. stride*i+stride-1 got. The matrix
of queries by fine keys is never stored: a first pass takes each query's normaliser, a second recomputes the products
and stores what is left after pooling, ``stride`` times less, for as many queries as the caller has room for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparda.kernels.products import dot_type, product

LOG2E = 1.4426950408889634

_ROWS = 64
"""Queries of a program of the second pass; with its fine keys, as many sums as registers hold."""
_FIRST_ROWS, _TILE_KEYS = 128, 64
"""Queries of a program of the first pass, and fine keys of a step of it."""
_TILE_WINDOWS = 16
"""Compressed keys of a program of the second pass: the fewest that a matrix product takes."""


@triton.jit
def _normaliser_kernel(
    q: tl.tensor,
    fine: tl.tensor,
    out: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    fine_rows: tl.tensor,
    q_stride_h: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Log2 of the sum of 2 ** (scale * q . fine) over the fine keys that a query sees."""
    # The longest rows first: they decide when the launch ends.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    t = start + row
    d = tl.arange(0, DIM)
    query = tl.load(q + head * q_stride_h + row.to(tl.int64)[:, None] * DIM + d[None, :], mask=(row < count)[:, None])
    base = fine + (head // GROUP) * fine_rows * DIM
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # All of these are seen by every row.
    whole = tl.minimum((start + tile * ROWS + 1) // TILE * TILE, fine_rows // TILE * TILE)
    for first in tl.range(0, whole, TILE):
        j = first + tl.arange(0, TILE)
        keys = tl.load(base + j.to(tl.int64)[:, None] * DIM + d[None, :])
        x = product(query, tl.trans(keys), DOT) * scale
        higher = tl.maximum(best, tl.max(x, axis=1))
        total = total * tl.exp2(best - higher) + tl.sum(tl.exp2(x - higher[:, None]), axis=1)
        best = higher
    for first in tl.range(whole, tl.minimum(start + (tile + 1) * ROWS, fine_rows), TILE):
        j = first + tl.arange(0, TILE)
        keys = tl.load(base + j.to(tl.int64)[:, None] * DIM + d[None, :], mask=(j < fine_rows)[:, None], other=0.0)
        x = product(query, tl.trans(keys), DOT) * scale
        x = tl.where((j[None, :] <= t[:, None]) & (j < fine_rows)[None, :], x, float("-inf"))
        # Key 0 is seen by all, and comes first.
        higher = tl.maximum(best, tl.max(x, axis=1))
        total = total * tl.exp2(best - higher) + tl.sum(tl.exp2(x - higher[:, None]), axis=1)
        best = higher
    tl.store(out + head * count + row, best + tl.log2(total), mask=row < count)


@triton.jit
def _pooled_kernel(
    q: tl.tensor,
    fine: tl.tensor,
    normaliser: tl.tensor,
    out: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    fine_rows: tl.tensor,
    windows: tl.tensor,
    q_stride_h: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOWS: tl.constexpr,
    STRIDE: tl.constexpr,
    DOT: tl.constexpr,
):
    """The group's probabilities of the fine keys of ``WINDOWS`` windows, summed over heads, the largest of each."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = start + row
    window = tl.program_id(1) * WINDOWS + tl.arange(0, WINDOWS)
    head = tl.program_id(2).to(tl.int64)
    target = out + (head * count + row)[:, None] * windows + window[None, :]
    there = (row < count)[:, None] & (window < windows)[None, :]
    first = tl.program_id(1) * WINDOWS * STRIDE
    if first - 1 > start + (tl.program_id(0) + 1) * ROWS - 1:
        tl.store(target, tl.zeros([ROWS, WINDOWS], tl.float32), mask=there)
    else:
        d = tl.arange(0, DIM)
        base = fine + head * fine_rows * DIM
        j = first + tl.arange(0, WINDOWS * STRIDE)
        keys = tl.load(base + j.to(tl.int64)[:, None] * DIM + d[None, :], mask=(j < fine_rows)[:, None], other=0.0)
        # A window begins one fine key before its own: the last of the window before.
        e = window * STRIDE - 1
        known = (e >= 0) & (e < fine_rows)
        edge = tl.load(base + e.to(tl.int64)[:, None] * DIM + d[None, :], mask=known[:, None], other=0.0)
        own = tl.zeros([ROWS, WINDOWS * STRIDE], tl.float32)
        before = tl.zeros([ROWS, WINDOWS], tl.float32)
        for member in tl.range(0, GROUP):
            each = head * GROUP + member
            rows = q + each * q_stride_h + row.to(tl.int64)[:, None] * DIM + d[None, :]
            query = tl.load(rows, mask=(row < count)[:, None], other=0.0)
            less = tl.load(normaliser + each * count + row, mask=row < count, other=float("inf"))[:, None]
            own += tl.exp2(product(query, tl.trans(keys), DOT) * scale - less)
            before += tl.exp2(product(query, tl.trans(edge), DOT) * scale - less)
        own = tl.where((j[None, :] <= t[:, None]) & (j < fine_rows)[None, :], own, 0.0)
        before = tl.where((e[None, :] <= t[:, None]) & known[None, :], before, 0.0)
        most = tl.max(tl.reshape(own, [ROWS, WINDOWS, STRIDE]), axis=2)
        tl.store(target, tl.maximum(most, before), mask=there)


def fine_keys(keys: torch.Tensor) -> torch.Tensor:
    """Means of neighbouring rotated keys: [H, S, D] to [H, S-1, D], of the same type."""
    return ((keys[:, :-1].float() + keys[:, 1:].float()) / 2).to(keys.dtype)


def teacher_scores(q: torch.Tensor, fine: torch.Tensor, start: int, *, windows: int, stride: int) -> torch.Tensor:
    """What each compressed key is worth to the queries of tokens start, start+1, ...: fp32 [H, N, windows].

    With p_h(t, j) = softmax_j(q_h,t . fine_j / sqrt(D)) over the fine keys j <= t and a = the sum of p_h over the heads
    that share a KV head, out[t, i] = max of a(t, j) over j = stride*i-1 .. stride*i+stride-1 (arXiv 2606.04511).
    Fine key t holds half of the key after t, as there: those blocks are chosen anyway.

    Args:
        q: [Hq, N, D] rotated queries, bf16 or fp32, contiguous within a head; heads h*G .. h*G+G-1 share KV head h.
        fine: [H, S-1, D] of ``fine_keys``, of q's type, contiguous.
        start: position of the first query; start + N is at most S.
        windows: compressed keys, of which those beyond the fine keys get 0.
        stride: tokens between compressed keys, a power of two.

    Raises:
        ValueError: a shape, dtype or stride is not as above.

    """
    _check(q, fine, start, stride)
    heads, count, dim = q.shape
    kv_heads, fine_rows, _ = fine.shape
    group, scale = heads // kv_heads, LOG2E * dim**-0.5
    normaliser = torch.empty(heads, count, dtype=torch.float32, device=q.device)
    out = torch.empty(kv_heads, count, windows, dtype=torch.float32, device=q.device)
    # Of fp32 values shared memory holds half as many.
    stages = 3 if q.dtype == torch.bfloat16 else 2
    _normaliser_kernel[(triton.cdiv(count, _FIRST_ROWS), heads)](
        q, fine, normaliser, start, count, fine_rows, q.stride(0), scale, GROUP=group, DIM=dim, ROWS=_FIRST_ROWS,
        TILE=_TILE_KEYS, DOT=dot_type(q), num_warps=8, num_stages=stages,
    )  # fmt: skip
    _pooled_kernel[(triton.cdiv(count, _ROWS), triton.cdiv(windows, _TILE_WINDOWS), kv_heads)](
        q, fine, normaliser, out, start, count, fine_rows, windows, q.stride(0), scale, GROUP=group, DIM=dim,
        ROWS=_ROWS, WINDOWS=_TILE_WINDOWS, STRIDE=stride, DOT=dot_type(q), num_warps=8, num_stages=stages,
    )  # fmt: skip
    return out


def _check(q: torch.Tensor, fine: torch.Tensor, start: int, stride: int) -> None:
    if q.ndim != 3 or fine.ndim != 3 or q.shape[2] != fine.shape[2] or q.shape[0] % fine.shape[0]:
        raise ValueError(f"q {tuple(q.shape)}, fine {tuple(fine.shape)}: allowed [Hq, N, D] and [H, S-1, D], H | Hq")
    if q.dtype != fine.dtype or q.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"q {q.dtype}, fine {fine.dtype}: allowed are both bfloat16 or both float32")
    if q.stride()[1:] != (q.shape[2], 1) or not fine.is_contiguous():
        raise ValueError(f"strides: given q {q.stride()}, fine {fine.stride()}, allowed: contiguous within a head")
    if not 0 <= start <= start + q.shape[1] <= fine.shape[1] + 1:
        raise ValueError(f"queries {start} to {start + q.shape[1]}: allowed are 0 to {fine.shape[1] + 1}")
    if stride < 1 or stride & (stride - 1) or q.shape[2] & (q.shape[2] - 1) or q.shape[2] < 16:
        raise ValueError(f"stride {stride}, head_dim {q.shape[2]}: allowed are powers of two, head_dim from 16")


def teacher_reference(q: torch.Tensor, fine: torch.Tensor, start: int, *, windows: int, stride: int) -> torch.Tensor:
    """The scores of teacher_scores by plain PyTorch, whole matrices and all."""
    count, dim = q.shape[1:]
    kv_heads, fine_rows, _ = fine.shape
    grouped = q.float().view(kv_heads, -1, count, dim)
    logits = torch.einsum("hgnd,hjd->hgnj", grouped, fine.float()) * dim**-0.5
    t = torch.arange(start, start + count, device=q.device)
    future = torch.arange(fine_rows, device=q.device) > t[:, None]
    summed = logits.masked_fill(future, -torch.inf).softmax(-1).sum(1)
    # One before the first window; and as many after the last fine key as make whole windows.
    after = max(0, windows * stride - fine_rows)
    padded = torch.nn.functional.pad(summed, (1, after))[..., : windows * stride + 1]
    return padded.unfold(-1, stride + 1, stride).amax(-1)
