"""The small row-wise parts of a layer: embedding rows, residual addition with RMS norm, the gated activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_GATE_TILE = 1024
_MAX_WIDTH = 8192


@triton.jit
def _add_norm_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    delta_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < SIZE
    scale = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + row * delta_stride + d, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(tl.bfloat16)
        tl.store(x + row * x_stride + d, rounded, mask=inside)
        value = rounded.to(tl.float32)
    mean = tl.sum(value * value, axis=0) / SIZE
    normed = value * tl.rsqrt(mean + eps) * scale
    tl.store(out + row * out_stride + d, normed.to(tl.bfloat16), mask=inside)


@triton.jit
def _embed_kernel(table: tl.tensor, tokens: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    token = tl.load(tokens + row).to(tl.int64)
    tl.store(out + row * SIZE + d, tl.load(table + token * SIZE + d, mask=d < SIZE), mask=d < SIZE)


@triton.jit
def _silu_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    in_stride: tl.tensor,
    out_stride: tl.tensor,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(gate_up + row * in_stride + f, mask=f < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * in_stride + size + f, mask=f < size, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + f, value.to(tl.bfloat16), mask=f < size)


def _check_rows(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor is bf16 of the given shape with a contiguous last dimension."""
    if tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16 or tensor.stride(-1) != 1:
        raise ValueError(f"{name}: given {tuple(tensor.shape)} {tensor.dtype}, allowed: {shape} bf16, contiguous rows")


def embed_tokens(table: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> None:
    """Copy each token's row of the embedding table to out.

    Args:
        table: [vocab, d] bf16, contiguous, d at most 8192.
        tokens: [B] int64, each below vocab.
        out: [B, d] bf16, contiguous.

    Raises:
        ValueError: a shape or dtype is not as above.

    """
    _check_rows("table", table, (table.shape[0], table.shape[1]))
    _check_rows("out", out, (tokens.shape[0], table.shape[1]))
    if tokens.dtype != torch.int64 or not table.is_contiguous() or not out.is_contiguous():
        raise ValueError(f"tokens, table, out: given {tokens.dtype}, allowed: int64 tokens, contiguous tensors")
    if not 1 <= table.shape[1] <= _MAX_WIDTH:
        raise ValueError(f"d: given {table.shape[1]}, allowed: 1 to {_MAX_WIDTH}")
    width = triton.next_power_of_2(table.shape[1])
    _embed_kernel[(tokens.shape[0],)](table, tokens, out, SIZE=table.shape[1], WIDTH=width, num_warps=4)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, *, eps: float
) -> None:
    """Add delta to the residual stream x in place and write its RMS norm times weight to out.

    The sum is formed in fp32 and rounded to bf16 in x; the norm is computed in fp32 from the rounded x.

    Args:
        x: [B, d] bf16, d at most 8192; updated unless delta is None.
        delta: [B, d] bf16 or None for no addition.
        weight: [d] bf16.
        out: [B, d] bf16, not overlapping x.
        eps: added to the mean square.

    Raises:
        ValueError: a shape or dtype is not as above.

    """
    if x.ndim != 2 or not 1 <= x.shape[1] <= _MAX_WIDTH:
        raise ValueError(f"x: given {tuple(x.shape)}, allowed: [B, 1..{_MAX_WIDTH}]")
    batch, size = x.shape
    _check_rows("x", x, (batch, size))
    _check_rows("weight", weight, (size,))
    _check_rows("out", out, (batch, size))
    if delta is not None:
        _check_rows("delta", delta, (batch, size))
    added = x if delta is None else delta
    width = triton.next_power_of_2(size)
    _add_norm_kernel[(batch,)](
        x,
        added,
        weight,
        out,
        x.stride(0),
        added.stride(0),
        out.stride(0),
        eps,
        SIZE=size,
        WIDTH=width,
        HAS_DELTA=delta is not None,
        num_warps=min(16, max(1, width // 256)),
    )


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Write silu(gate) * up, computed in fp32, to out.

    Args:
        gate_up: [B, 2F] bf16, the gate in the first F columns.
        out: [B, F] bf16.

    Raises:
        ValueError: a shape or dtype is not as above.

    """
    batch, size = out.shape
    _check_rows("gate_up", gate_up, (batch, 2 * size))
    _check_rows("out", out, (batch, size))
    _silu_mul_kernel[(batch, triton.cdiv(size, _GATE_TILE))](
        gate_up, out, size, gate_up.stride(0), out.stride(0), TILE=_GATE_TILE, num_warps=4
    )


def add_norm_reference(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual stream and its norm, both bf16 [B, d], by plain PyTorch; the arguments are left alone."""
    summed = x if delta is None else (x.float() + delta.float()).to(torch.bfloat16)
    value = summed.float()
    normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()
    return summed, normed.to(torch.bfloat16)


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, bf16 [B, F], by plain PyTorch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
