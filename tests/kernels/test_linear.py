"""Linears over few rows: split sums, gated pairs, any shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.kernels.linear import Tiling, linear, linear_parts, splits_of, swiglu, tiling_of
from sparda.kernels.tilings import MAX_SPLITS

SHAPES = [(1, 1, 16), (4, 96, 576), (3, 100, 130), (17, 64, 1536), (130, 192, 64), (2, 4864, 96)]
"""(batch, output columns, input columns)"""


def _operands(
    device: str, batch: int, rows: int, columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, a weight, and their product in fp32."""
    torch.manual_seed(batch + rows)
    x = torch.randn(batch, columns, device=device).to(dtype)
    weight = (torch.randn(rows, columns, device=device) * columns**-0.5).to(dtype)
    return x, weight, x.float() @ weight.float().T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "rows", "columns"), SHAPES)
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_the_parts_add_up_to_the_product(
    device: str, batch: int, rows: int, columns: int, splits: int, dtype: torch.dtype
) -> None:
    x, weight, product = _operands(device, batch, rows, columns, dtype)
    parts = torch.full((splits, batch, rows), float("nan"), device=device)
    linear_parts(x, weight, parts)
    torch.testing.assert_close(parts.sum(0), product, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "rows", "columns"), SHAPES)
def test_the_product_is_rounded_once(device: str, batch: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, product = _operands(device, batch, rows, columns, dtype)
    out = torch.full((batch, rows), float("nan"), device=device, dtype=dtype)
    linear(x, weight, out)
    close = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.float(), product, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "rows", "columns"), [s for s in SHAPES if s[1] % 2 == 0])
def test_the_gate_is_activated_and_multiplied(
    device: str, batch: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    x, weight, product = _operands(device, batch, rows, columns, dtype)
    gate, up = product.to(dtype).float().chunk(2, -1)
    out = torch.full((batch, rows // 2), float("nan"), device=device, dtype=dtype)
    swiglu(x, weight, out)
    close = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.float(), torch.nn.functional.silu(gate) * up, rtol=close, atol=close)


def test_a_row_view_of_a_wider_tensor_is_read_in_place(device: str) -> None:
    wide, weight, _ = _operands(device, 3, 64, 128, torch.float32)
    out = torch.empty(3, 64, device=device)
    linear(wide[:, :96], weight[:, :96].contiguous(), out)
    torch.testing.assert_close(out, wide[:, :96] @ weight[:, :96].T, rtol=1e-4, atol=1e-4)


def test_any_tiling_gives_the_same_product(device: str) -> None:
    x, weight, product = _operands(device, 5, 200, 384, torch.bfloat16)
    for tiling in (Tiling(64, 64, 3, 2, 4), Tiling(128, 32, 3, 3, 4), Tiling(64, 128, 3, 2, 8)):
        parts = torch.full((3, 5, 200), float("nan"), device=device)
        linear_parts(x, weight, parts, tiling=tiling)
        torch.testing.assert_close(parts.sum(0), product, rtol=1e-4, atol=1e-4)


@settings(deadline=None)
@given(st.integers(1, 200_000), st.integers(16, 32768), st.integers(1, 200))
def test_a_sum_is_split_only_to_give_every_multiprocessor_work(rows: int, columns: int, sms: int) -> None:
    splits = splits_of(rows, columns, sms)
    assert splits in (1, 2, 4, 8, 2 * MAX_SPLITS)
    if splits > 1:
        assert -(-rows // 64) < 0.95 * sms
        assert columns // splits >= 128


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 100_000), st.integers(16, 20_000), st.booleans(), st.sampled_from([2, 4]))
def test_a_tiling_fits_shared_memory(batch: int, rows: int, columns: int, gated: bool, size: int) -> None:
    x = torch.empty(batch, columns, dtype=torch.bfloat16 if size == 2 else torch.float32, device="meta")
    tiling = tiling_of(rows, x, splits=1, gated=gated)
    padded = min(128, max(16, 1 << (batch - 1).bit_length()))
    weights = tiling.rows * (2 if gated else 1)
    assert (weights + padded) * tiling.depth * size * tiling.stages <= 227 * 1024


def test_operands_that_do_not_fit_are_named(device: str) -> None:
    x, weight, product = _operands(device, 2, 8, 16, torch.float32)
    with pytest.raises(ValueError, match=r"weight must be contiguous torch.float32 \[N, 16\]"):
        linear(x, weight[:, :8], product)
    with pytest.raises(ValueError, match=r"the output must be contiguous torch.float32 \(2, 8\)"):
        linear(x, weight, product[:, :4])
    with pytest.raises(ValueError, match="x must be bf16 or fp32"):
        linear(x.half(), weight.half(), product.half())
    with pytest.raises(ValueError, match="even number of rows, got 7"):
        swiglu(x, weight[:7], torch.empty(2, 3, device=device))
