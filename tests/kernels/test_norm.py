"""Residual addition and RMS norm agree with plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from sparda.kernels.norm import add_norm, add_norm_reference, embed_tokens


def _random(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 96, 576, 1000, 4096, 8192])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_stream_is_updated_in_place_and_normed_from_its_rounded_value(
    device: str, size: int, count: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    x, weight = _random(3, size, device=device).to(dtype), _random(size, device=device).to(dtype)
    parts = torch.randn(count, 3, size, device=device) if count else None
    summed, normed = add_norm_reference(x, parts, weight, eps=1e-6)
    out = torch.full_like(x, float("nan"))
    add_norm(x, parts, weight, out, eps=1e-6)
    # Two roundings to bf16, which need not be to nearest off the GPU.
    close = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(x, summed, rtol=close, atol=close)
    torch.testing.assert_close(out, normed, rtol=close, atol=close)


def test_wrong_shapes_and_types_are_refused(device: str) -> None:
    x = _random(2, 8, device=device)
    with pytest.raises(ValueError, match="weight: given"):
        add_norm(x, None, _random(9, device=device), torch.empty_like(x), eps=1e-6)
    with pytest.raises(ValueError, match=r"parts: given \(1, 2, 8\) torch.bfloat16"):
        add_norm(x, x[None], x[0], torch.empty_like(x), eps=1e-6)
    wide = torch.zeros(1, 8193, device=device)
    with pytest.raises(ValueError, match="d: given 8193, allowed: 1 to 8192"):
        add_norm(wide, None, wide[0], torch.empty_like(wide), eps=1e-6)


@pytest.mark.parametrize("width", [1, 96, 4096])
def test_embedding_copies_the_row_of_each_token(device: str, width: int) -> None:
    table = torch.randn(50, width, device=device).to(torch.bfloat16)
    tokens = torch.tensor([49, 0, 7, 7], device=device)
    out = torch.full((4, width), float("nan"), dtype=torch.bfloat16, device=device)
    embed_tokens(table, tokens, out)
    assert torch.equal(out, table[tokens])


def test_embedding_refuses_tokens_that_are_not_int64(device: str) -> None:
    table = torch.zeros(4, 8, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="int64"):
        embed_tokens(table, torch.zeros(2, dtype=torch.int32, device=device), table[:2])
