"""The small row-wise parts of a layer: embedding rows, and residual addition with RMS norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparda.kernels.launch import dependent

_MAX_WIDTH = 8192


@triton.jit
def _add_norm_kernel(
    x: tl.tensor,
    parts: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < SIZE
    scale = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row * SIZE + d, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        added = tl.zeros([WIDTH], tl.float32)
        for part in tl.static_range(PARTS):
            added += tl.load(parts + (part * rows + row) * SIZE + d, mask=inside, other=0.0)
        rounded = (value + added.to(x.dtype.element_ty).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + row * SIZE + d, rounded, mask=inside)
        value = rounded.to(tl.float32)
    mean = tl.sum(value * value, axis=0) / SIZE
    normed = value * tl.rsqrt(mean + eps) * scale
    tl.store(out + row * SIZE + d, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _embed_kernel(
    table: tl.tensor, tokens: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(tokens + row).to(tl.int64)
    tl.store(out + row * SIZE + d, tl.load(table + token * SIZE + d, mask=d < SIZE), mask=d < SIZE)


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless the tensor is contiguous, of the given shape and type."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{name}: given {tuple(tensor.shape)} {tensor.dtype}, allowed: contiguous {shape} {dtype}")


def _check_width(width: int) -> None:
    if not 1 <= width <= _MAX_WIDTH:
        raise ValueError(f"d: given {width}, allowed: 1 to {_MAX_WIDTH}")


def embed_tokens(table: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> None:
    """Copy each token's row of the embedding table to out.

    Args:
        table: [vocab, d] bf16 or fp32, contiguous, d at most 8192.
        tokens: [B] int64, each below vocab.
        out: [B, d] of the type of table, contiguous.

    Raises:
        ValueError: a shape or dtype is not as above.

    """
    _check("table", table, (table.shape[0], table.shape[-1]), table.dtype)
    _check("tokens", tokens, (tokens.shape[0],), torch.int64)
    _check("out", out, (tokens.shape[0], table.shape[1]), table.dtype)
    _check_width(table.shape[1])
    width = triton.next_power_of_2(table.shape[1])
    _embed_kernel[(tokens.shape[0],)](
        table, tokens, out, SIZE=table.shape[1], WIDTH=width, num_warps=4, **dependent(out)
    )


def add_norm(
    x: torch.Tensor, parts: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, *, eps: float
) -> None:
    """Add the sum of parts to the residual stream x in place and write its RMS norm times weight to out.

    The parts are added up in fp32, in order, and rounded to the type of x; so is their sum with x. The norm is computed
    in fp32 from the rounded x.

    Args:
        x: [B, d] bf16 or fp32, contiguous, d at most 8192; updated unless parts is None.
        parts: [S, B, d] fp32, contiguous, as ``linear_parts`` leaves them, or None for no addition.
        weight: [d] of the type of x.
        out: [B, d] of the type of x, not overlapping x.
        eps: added to the mean square.

    Raises:
        ValueError: a shape or dtype is not as above.

    """
    batch, size = x.shape if x.ndim == 2 else (0, 0)
    _check("x", x, (batch, size), x.dtype)
    _check_width(size)
    _check("weight", weight, (size,), x.dtype)
    _check("out", out, (batch, size), x.dtype)
    if parts is not None:
        _check("parts", parts, (parts.shape[0], batch, size), torch.float32)
    width = triton.next_power_of_2(size)
    _add_norm_kernel[(batch,)](
        x, x if parts is None else parts, weight, out, batch, eps,
        SIZE=size,
        WIDTH=width,
        PARTS=0 if parts is None else parts.shape[0],
        num_warps=min(16, max(1, width // 256)),
        **dependent(x),
    )  # fmt: skip


def add_norm_reference(
    x: torch.Tensor, parts: torch.Tensor | None, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual stream and its norm, both [B, d] of the type of x, by plain PyTorch; x is left alone."""
    summed = x if parts is None else (x.float() + parts.sum(0).to(x.dtype).float()).to(x.dtype)
    value = summed.float()
    normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()
    return summed, normed.to(x.dtype)
