"""The loss of a Forecast against its teacher, and its gradient, without the matrix of queries by compressed keys.

Source: SparDA, arXiv 2606.04511, training. Each KV head has n Forecast heads; s is the mean of their softmax
probabilities over compressed keys, p the teacher's. Both are kept on the compressed keys of the blocks that the teacher
chose, R; what is left is one bucket more. The loss of a query is

    KL = sum over R of p (ln p - ln s)  +  p_rest (ln p_rest - ln s_rest),     all clamped at 1e-8.

With u = -p / s on R and -p_rest / s_rest elsewhere, its gradient in the logits z of head h is s_h (u - c_h) / n, where
c_h is the sum of s_h u over all keys. So the gradient in the query needs three sums of keys: that of p s_h / s over R,
that of s_h over the rest, and the plain attention output, the sum of s_h over all.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sparda.kernels.products import dot_type, product

LOG2E = 1.4426950408889634
EPS = 1e-8
"""Least probability that the loss reckons with."""

_ROWS = 32
_TILE = 64


@triton.jit
def _attend_kernel(
    f: tl.tensor,
    keys: tl.tensor,
    normaliser: tl.tensor,
    mean: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    key_rows: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Each query's normaliser (log2) and the mean of the keys under its softmax."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = start + row
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, DIM)
    at = (head * count + row)[:, None] * DIM + d[None, :]
    query = tl.load(f + at, mask=(row < count)[:, None], other=0.0)
    base = keys + (head // HEADS) * key_rows * DIM
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    last = tl.minimum((start + (tl.program_id(0) + 1) * ROWS - 1) // STRIDE + 1, key_rows)
    for first in tl.range(0, last, TILE):
        j = first + tl.arange(0, TILE)
        k = tl.load(base + j[:, None] * DIM + d[None, :], mask=(j < key_rows)[:, None], other=0.0)
        x = product(query, tl.trans(k), DOT) * scale
        x = tl.where((j[None, :] * STRIDE <= t[:, None]) & (j < key_rows)[None, :], x, float("-inf"))
        higher = tl.maximum(best, tl.max(x, axis=1))
        weight = tl.exp2(x - higher[:, None])
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        out = out * shrink[:, None] + product(weight, k, DOT)
        best = higher
    tl.store(normaliser + head * count + row, best + tl.log2(total), mask=row < count)
    tl.store(mean + at, out / total[:, None], mask=(row < count)[:, None])


@triton.jit
def _loss_kernel(
    f: tl.tensor,
    keys: tl.tensor,
    teacher: tl.tensor,
    teacher_sum: tl.tensor,
    retained: tl.tensor,
    normaliser: tl.tensor,
    mean: tl.tensor,
    loss: tl.tensor,
    gradient: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    key_rows: tl.tensor,
    blocks: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    PER: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    DOT: tl.constexpr,
):
    """A query's loss, and the loss's gradient in it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = start + row
    real = row < count
    head = tl.program_id(1).to(tl.int64)
    kv, member = head // HEADS, head % HEADS
    d = tl.arange(0, DIM)
    at = row[:, None] * DIM + d[None, :]
    base = keys + kv * key_rows * DIM
    whole = tl.load(teacher_sum + kv * count + row, mask=real, other=1.0)
    by_teacher = tl.zeros([ROWS, DIM], tl.float32)
    by_rest = tl.zeros([ROWS, DIM], tl.float32)
    p_rest = tl.zeros([ROWS], tl.float32)
    s_rest = tl.zeros([ROWS], tl.float32)
    cross = tl.zeros([ROWS], tl.float32)
    p_own = tl.zeros([ROWS], tl.float32)
    own_rest = tl.zeros([ROWS], tl.float32)
    last = tl.minimum((start + (tl.program_id(0) + 1) * ROWS - 1) // STRIDE + 1, key_rows)
    for first in tl.range(0, last, TILE):
        j = first + tl.arange(0, TILE)
        seen = real[:, None] & (j[None, :] * STRIDE <= t[:, None]) & (j < key_rows)[None, :]
        k = tl.load(base + j[:, None] * DIM + d[None, :], mask=(j < key_rows)[:, None], other=0.0)
        s = tl.zeros([ROWS, TILE], tl.float32)
        own = tl.zeros([ROWS, TILE], tl.float32)
        for other in tl.range(0, HEADS):
            each = kv * HEADS + other
            query = tl.load(f + each * count * DIM + at, mask=real[:, None], other=0.0)
            less = tl.load(normaliser + each * count + row, mask=real, other=0.0)
            weight = tl.exp2(product(query, tl.trans(k), DOT) * scale - less[:, None])
            weight = tl.where(seen, weight, 0.0)
            s += weight / HEADS
            own = tl.where(other == member, weight, own)
        # A block's own compressed keys alone: the one before it belongs to the block before.
        kept = tl.load(retained + (kv * count + row)[:, None] * blocks + (j // PER)[None, :], mask=seen, other=0) > 0
        p = tl.load(teacher + (kv * count + row)[:, None] * key_rows + j[None, :], mask=seen, other=0.0)
        p = p / whole[:, None]
        # Summed, not taken from 1: of a bucket that is nearly empty the difference would be rounding alone.
        p_rest += tl.sum(tl.where(kept, 0.0, p), axis=1)
        s_rest += tl.sum(tl.where(kept, 0.0, s), axis=1)
        p = tl.where(kept, tl.maximum(p, LEAST), 0.0)
        s = tl.where(kept, s, 0.0)
        other_keys = tl.where(kept, 0.0, own)
        bounded = tl.maximum(s, LEAST)
        cross += tl.sum(tl.where(kept, p * (tl.log(tl.maximum(p, LEAST)) - tl.log(bounded)), 0.0), axis=1)
        share = tl.where(s > LEAST, p * own / bounded, 0.0)
        by_teacher += product(share, k, DOT)
        by_rest += product(other_keys, k, DOT)
        p_own += tl.sum(share, axis=1)
        own_rest += tl.sum(other_keys, axis=1)
    p_rest = tl.maximum(p_rest, LEAST)
    ratio = tl.where(s_rest > LEAST, p_rest / s_rest, 0.0)
    s_rest = tl.maximum(s_rest, LEAST)
    if member == 0:
        value = cross + p_rest * (tl.log(p_rest) - tl.log(s_rest))
        tl.store(loss + kv * count + row, value, mask=real)
    c = -p_own - ratio * own_rest
    plain = tl.load(mean + head * count * DIM + at, mask=real[:, None], other=0.0)
    total = -by_teacher - ratio[:, None] * by_rest - c[:, None] * plain
    # ``scale`` has the log2 of e in it, which turned powers of e into powers of two.
    tl.store(gradient + head * count * DIM + at, total * (scale * 0.6931471805599453 / HEADS), mask=real[:, None])


class _ForecastLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, f: torch.Tensor, keys: torch.Tensor, teacher: torch.Tensor, retained: torch.Tensor, start: int,
        stride: int, per: int,
    ) -> torch.Tensor:  # fmt: skip
        heads, count, dim = f.shape
        kv_heads, key_rows, _ = keys.shape
        scale = LOG2E * dim**-0.5
        normaliser = torch.empty(heads, count, dtype=torch.float32, device=f.device)
        mean = torch.empty(heads, count, dim, dtype=torch.float32, device=f.device)
        loss = torch.empty(kv_heads, count, dtype=torch.float32, device=f.device)
        gradient = torch.empty_like(mean)
        grid = (triton.cdiv(count, _ROWS), heads)
        sizes = {
            "HEADS": heads // kv_heads,
            "DIM": dim,
            "STRIDE": stride,
            "ROWS": _ROWS,
            "TILE": _TILE,
            "DOT": dot_type(f),
        }
        _attend_kernel[grid](f, keys, normaliser, mean, start, count, key_rows, scale, **sizes, num_warps=4)
        _loss_kernel[grid](
            f, keys, teacher, teacher.sum(-1) + EPS, retained, normaliser, mean, loss, gradient, start, count, key_rows,
            retained.shape[2], scale, **sizes, PER=per, LEAST=EPS, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(gradient)
        ctx.dtype = f.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        heads, kv_heads = len(gradient), len(outer[0])
        weights = outer[0].repeat_interleave(heads // kv_heads, 0)
        return (gradient * weights[..., None]).to(ctx.dtype), None, None, None, None, None, None


def forecast_loss(
    f: torch.Tensor, keys: torch.Tensor, teacher: torch.Tensor, retained: torch.Tensor, start: int, *, stride: int,
    per_block: int,
) -> torch.Tensor:  # fmt: skip
    """The KL divergence of every query and KV head, fp32 [H, N], which can be differentiated in ``f``.

    A query at position t sees compressed key i where stride * i <= t. A probability below 1e-8 counts as 1e-8 and has
    no gradient; the renormalisation of vectors so clamped, which changes less than 1e-5 of a loss, is left out.

    Args:
        f: [H * n, N, D] rotated Forecast queries of tokens start, start+1, ...; bf16 or fp32, contiguous; heads
            h*n .. h*n+n-1 belong to KV head h.
        keys: [H, C, D] compressed keys, of f's type, contiguous.
        teacher: fp32 [H, N, C] of ``teacher_scores``, not normalised.
        retained: int8 [H, N, M], not 0 for the blocks that the loss is about.
        start: position of the first query.
        stride: tokens between compressed keys.
        per_block: compressed keys that begin in a block.

    Raises:
        ValueError: a shape or dtype is not as above.

    """
    _check(f, keys, teacher, retained, per_block)
    loss: torch.Tensor = _ForecastLoss.apply(f, keys, teacher, retained, start, stride, per_block)
    return loss


def _check(f: torch.Tensor, keys: torch.Tensor, teacher: torch.Tensor, retained: torch.Tensor, per_block: int) -> None:
    if f.ndim != 3 or keys.ndim != 3 or f.shape[2] != keys.shape[2] or f.shape[0] % keys.shape[0]:
        raise ValueError(f"f {tuple(f.shape)}, keys {tuple(keys.shape)}: allowed [H*n, N, D] and [H, C, D]")
    wanted = (keys.shape[0], f.shape[1], keys.shape[1])
    if teacher.shape != wanted or teacher.dtype != torch.float32:
        raise ValueError(f"teacher: given {tuple(teacher.shape)} {teacher.dtype}, allowed: {wanted} float32")
    if retained.shape[:2] != wanted[:2] or retained.shape[2] * per_block < wanted[2] or retained.dtype != torch.int8:
        raise ValueError(
            f"retained: given {tuple(retained.shape)} {retained.dtype}, allowed: int8 {list(wanted[:2])} by at least "
            f"{-(-wanted[2] // per_block)} blocks"
        )
    if f.dtype != keys.dtype or f.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"f {f.dtype}, keys {keys.dtype}: allowed are both bfloat16 or both float32")
    for name, tensor in (("f", f), ("keys", keys), ("teacher", teacher), ("retained", retained)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: given strides {tensor.stride()}, allowed: contiguous")


def forecast_loss_reference(
    f: torch.Tensor, keys: torch.Tensor, teacher: torch.Tensor, retained: torch.Tensor, start: int, *, stride: int,
    per_block: int,
) -> torch.Tensor:  # fmt: skip
    """The loss of forecast_loss by plain PyTorch; autograd gives its gradient."""
    kv_heads, key_rows, dim = keys.shape
    count = f.shape[1]
    logits = torch.einsum("hnqd,hcd->hnqc", f.float().view(kv_heads, -1, count, dim), keys.float()) * dim**-0.5
    t = torch.arange(start, start + count, device=f.device)
    future = torch.arange(key_rows, device=f.device) * stride > t[:, None]
    s = logits.masked_fill(future, -torch.inf).softmax(-1).mean(1)
    p = teacher / (teacher.sum(-1, keepdim=True) + EPS)
    kept = retained.repeat_interleave(per_block, -1)[..., :key_rows].bool() & ~future
    p_rest = p.masked_fill(kept | future, 0.0).sum(-1).clamp(min=EPS)
    s_rest = s.masked_fill(kept, 0.0).sum(-1).clamp(min=EPS)
    p = torch.where(kept, p.clamp(min=EPS), 0.0)
    s = torch.where(kept, s, 0.0)
    inner = torch.where(kept, p * (p.clamp(min=EPS).log() - s.clamp(min=EPS).log()), 0.0).sum(-1)
    loss: torch.Tensor = inner + p_rest * (p_rest.log() - s_rest.log())
    return loss
