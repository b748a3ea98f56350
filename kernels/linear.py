"""Linear layers for a handful of rows: bounded by how fast the weights stream in, and by nothing else if done right.

Weights are the left operand of the tensor cores (a tile of weight rows times the transposed activations), so that a
small batch pads to 16 columns and not to 64 rows. Long sums are split over thread blocks, whose fp32 parts the next
kernel of the step adds up: no kernel of its own, no atomics, the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparda.kernels.launch import dependent, multiprocessors
from sparda.kernels.tilings import MAX_ROWS, ROWS, Tiling, splits_of, tiling_for

__all__ = ["Tiling", "linear", "linear_parts", "splits_of", "swiglu", "tiling_of"]


def tiling_of(rows: int, x: torch.Tensor, *, splits: int, gated: bool = False) -> Tiling:
    """The tiling for ``rows`` output columns of a product with x [B, K]; see ``tiling_for``."""
    batch, columns = x.shape
    narrow = x.dtype != torch.bfloat16 or columns < 8 * ROWS
    return tiling_for(rows, columns, batch, multiprocessors(x), splits=splits, gated=gated, narrow=narrow)


@triton.jit
def _linear_kernel(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, batch: tl.tensor, N: tl.tensor, K: tl.tensor, x_stride: tl.tensor,
    share: tl.tensor, BATCH: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """GATED: ``weight`` has 2 N rows, the gate's first; out = silu(gate) * up."""
    split = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < N
    begin = split * share
    end = tl.minimum(begin + share, K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.program_id(2) * BATCH + tl.arange(0, BATCH)
    d = tl.arange(0, DEPTH)
    ours = b < batch
    total = tl.zeros([ROWS, BATCH], tl.float32)
    up = tl.zeros([ROWS, BATCH], tl.float32)
    w_rows = weight + row.to(tl.int64)[:, None] * K
    x_rows = x + b[None, :] * x_stride
    for k in tl.range(begin, end, DEPTH, num_stages=STAGES):
        at = k + d
        if EVEN:
            w = tl.load(w_rows + at[None, :], mask=inside[:, None], other=0.0)
            v = tl.load(x_rows + at[:, None], mask=ours[None, :], other=0.0)
        else:
            w = tl.load(w_rows + at[None, :], mask=inside[:, None] & (at < end)[None, :], other=0.0)
            v = tl.load(x_rows + at[:, None], mask=ours[None, :] & (at < end)[:, None], other=0.0)
        total = tl.dot(w.to(DOT), v.to(DOT), total, input_precision="ieee")
        if GATED:
            if EVEN:
                u = tl.load(w_rows + N.to(tl.int64) * K + at[None, :], mask=inside[:, None], other=0.0)
            else:
                ok = inside[:, None] & (at < end)[None, :]
                u = tl.load(w_rows + N.to(tl.int64) * K + at[None, :], mask=ok, other=0.0)
            up = tl.dot(u.to(DOT), v.to(DOT), up, input_precision="ieee")
    if GATED:
        # Rounded where a program of separate steps would store them.
        gate = total.to(x.dtype.element_ty).to(tl.float32)
        total = gate / (1.0 + tl.exp(-gate)) * up.to(x.dtype.element_ty).to(tl.float32)
    place = out + (split * batch + b).to(tl.int64)[None, :] * N + row[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside[:, None] & ours[None, :])


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, tiling: Tiling | None = None) -> None:
    """``out`` = x @ weight.T, products summed in fp32.

    x: [B, K]; weight: [N, K], contiguous, of the type of x; out: [B, N] of the type of x, contiguous.
    Raises ValueError for shapes or types that do not fit together.
    """
    _check(x, weight, (x.shape[0], weight.shape[0]), out, x.dtype)
    tiling = tiling or tiling_of(weight.shape[0], x, splits=1)
    _launch(x, weight, out, int(weight.shape[0]), tiling, gated=False)


def linear_parts(x: torch.Tensor, weight: torch.Tensor, parts: torch.Tensor, *, tiling: Tiling | None = None) -> None:
    """``parts.sum(0)`` = x @ weight.T: the sum over K cut into parts, for the next kernel to add up in order.

    x: [B, K]; weight: [N, K], contiguous, of the type of x; parts: fp32 [S, B, N], contiguous.
    Raises ValueError for shapes or types that do not fit together.
    """
    splits = int(parts.shape[0])
    _check(x, weight, (splits, x.shape[0], weight.shape[0]), parts, torch.float32)
    tiling = tiling or tiling_of(weight.shape[0], x, splits=splits)
    _launch(x, weight, parts, int(weight.shape[0]), tiling, gated=False)


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor, *, tiling: Tiling | None = None) -> None:
    """``out`` = silu(x @ gate.T) * (x @ up.T), each product rounded to the type of x first.

    x: [B, K]; gate_up: [2F, K], contiguous, the gate's rows first, of the type of x; out: [B, F] of the type of x.
    Raises ValueError for shapes or types that do not fit together.
    """
    size = gate_up.shape[0] // 2
    _check(x, gate_up, (x.shape[0], size), out, x.dtype)
    if gate_up.shape[0] % 2:
        raise ValueError(f"gate_up must have an even number of rows, got {gate_up.shape[0]}")
    tiling = tiling or tiling_of(size, x, splits=1, gated=True)
    _launch(x, gate_up, out, size, tiling, gated=True)


def _launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, size: int, t: Tiling, *, gated: bool) -> None:
    batch, depth = x.shape
    padded = min(MAX_ROWS, max(16, triton.next_power_of_2(batch)))
    share = triton.cdiv(triton.cdiv(depth, t.splits), t.depth) * t.depth
    compiled = isinstance(_linear_kernel, triton.runtime.JITFunction)
    _linear_kernel[(triton.cdiv(size, t.rows), t.splits, triton.cdiv(batch, padded))](
        x, weight, out, batch, size, depth, x.stride(0), share,
        BATCH=padded,
        ROWS=t.rows,
        DEPTH=t.depth,
        STAGES=t.stages,
        EVEN=depth % (t.splits * t.depth) == 0,
        GATED=gated,
        # Triton's interpreter multiplies the bits of bf16 as integers; fp32 gives it the products of the tensor cores.
        DOT=tl.bfloat16 if compiled and x.dtype == torch.bfloat16 else tl.float32,
        num_warps=t.warps,
        **dependent(x),
    )  # fmt: skip


def _check(x: torch.Tensor, weight: torch.Tensor, size: tuple[int, ...], out: torch.Tensor, dtype: torch.dtype) -> None:
    if x.dim() != 2 or x.stride(1) != 1 or x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x must be bf16 or fp32 [B, K], its rows contiguous, got {x.dtype} {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous {x.dtype} [N, {x.shape[1]}] like x, got {weight.dtype} {tuple(weight.shape)}"
        )
    if tuple(out.shape) != size or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"the output must be contiguous {dtype} {size}, got {out.dtype} {tuple(out.shape)}")
