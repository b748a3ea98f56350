"""Residual addition, RMS norm and gated activation agree with plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from sparda.kernels.norm import add_norm, add_norm_reference, embed_tokens, silu_mul, silu_mul_reference


def _random(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(torch.bfloat16)


@pytest.mark.parametrize("size", [1, 96, 1000, 4096, 8192])
@pytest.mark.parametrize("with_delta", [False, True])
def test_the_stream_is_updated_in_place_and_normed_from_its_rounded_value(
    device: str, size: int, with_delta: bool
) -> None:
    torch.manual_seed(size)
    x, weight = _random(3, size, device=device), _random(size, device=device)
    delta = _random(3, size, device=device) if with_delta else None
    summed, normed = add_norm_reference(x, delta, weight, eps=1e-6)
    out = torch.full_like(x, float("nan"))
    add_norm(x, delta, weight, out, eps=1e-6)
    # One unit in the last place of bf16 for each rounding, which need not be to nearest off the GPU.
    torch.testing.assert_close(x, summed, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(out, normed, rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("size", [1, 100, 1024, 3000])
def test_the_gate_is_activated_and_multiplied(device: str, size: int) -> None:
    torch.manual_seed(size)
    gate_up = _random(2, 2 * size, device=device) * 4
    out = torch.full((2, size), float("nan"), device=device, dtype=torch.bfloat16)
    silu_mul(gate_up, out)
    torch.testing.assert_close(out, silu_mul_reference(gate_up), rtol=1e-2, atol=1e-6)


def test_wrong_shapes_are_refused(device: str) -> None:
    x = _random(2, 8, device=device)
    with pytest.raises(ValueError, match="weight: given"):
        add_norm(x, None, _random(9, device=device), torch.empty_like(x), eps=1e-6)
    with pytest.raises(ValueError, match="gate_up: given"):
        silu_mul(x, torch.empty_like(x))


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
