"""Forecast block scores agree with plain PyTorch at every position of a block."""

from __future__ import annotations

import pytest
import torch

from sparda.kernels.score import forecast_reference, forecast_scores

both_types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
EDGES = [0, 1, 30, 31, 32, 33, 62, 63, 64, 65, 126, 127, 128, 129, 500, 703]


def _case(
    device: str, positions: list[int], kv_heads: int, key_rows: int, dim: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(dim + key_rows)
    fused = torch.randn(len(positions), 3 * kv_heads, dim, device=device).to(dtype)
    keys = torch.randn(len(positions), kv_heads, key_rows, dim, device=device).to(dtype)
    return fused[:, kv_heads : 2 * kv_heads], keys, torch.tensor(positions, dtype=torch.int32, device=device)


@both_types
@pytest.mark.parametrize("dim", [64, 128])
def test_every_position_near_a_block_boundary_agrees_with_the_reference(
    device: str, dim: int, dtype: torch.dtype
) -> None:
    query, keys, positions = _case(device, EDGES, 2, 43, dim, dtype)
    out = torch.full((len(EDGES), 2, 11), float("nan"), device=device)
    forecast_scores(query, keys, positions, out, block=64, kernel=32, stride=16)
    expected = forecast_reference(query, keys, positions, blocks=11, block=64, kernel=32, stride=16)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [1, 16, 17, 40])
def test_any_number_of_blocks_is_covered(device: str, blocks: int) -> None:
    spots = [0, 3, 16 * blocks // 2, 16 * blocks - 1]
    query, keys, positions = _case(device, spots, 3, 4 * blocks, 64)
    out = torch.full((len(spots), 3, blocks), float("nan"), device=device)
    forecast_scores(query, keys, positions, out, block=16, kernel=8, stride=4)
    expected = forecast_reference(query, keys, positions, blocks=blocks, block=16, kernel=8, stride=4)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@both_types
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_an_odd_batch_of_any_number_of_heads_agrees_with_the_reference(
    device: str, kv_heads: int, dtype: torch.dtype
) -> None:
    query, keys, positions = _case(device, [0, 133, 380], kv_heads, 24, 64, dtype)
    out = torch.full((3, kv_heads, 6), float("nan"), device=device)
    forecast_scores(query, keys, positions, out, block=64, kernel=32, stride=16)
    expected = forecast_reference(query, keys, positions, blocks=6, block=64, kernel=32, stride=16)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_keys_that_are_not_complete_before_the_token_are_not_read(device: str) -> None:
    query, keys, positions = _case(device, [100, 100], 1, 40, 64)
    keys[:, :, (100 - 32) // 16 + 1 :] = float("nan")
    out = torch.empty(2, 1, 4, device=device)
    forecast_scores(query, keys, positions, out, block=64, kernel=32, stride=16)
    assert out[..., :2].isfinite().all()
    assert (out[..., 2:] == float("-inf")).all()


def test_wrong_dtypes_and_windows_are_refused(device: str) -> None:
    query, keys, positions = _case(device, [5], 1, 8, 64)
    out = torch.empty(1, 1, 4, device=device)
    for given, dtypes in (
        ((query.float(), keys, out), "queries torch.float32, keys torch.bfloat16, out torch.float32"),
        ((query, keys.float(), out), "queries torch.bfloat16, keys torch.float32, out torch.float32"),
        ((query.half(), keys.half(), out), "queries torch.float16, keys torch.float16, out torch.float32"),
        ((query, keys, out.bfloat16()), "queries torch.bfloat16, keys torch.bfloat16, out torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=f"dtypes: given {dtypes}, allowed: queries and keys both"):
            forecast_scores(*given[:2], positions, given[2], block=64, kernel=32, stride=16)
    with pytest.raises(ValueError, match="block/stride: given 48/16"):
        forecast_scores(query, keys, positions, out, block=48, kernel=32, stride=16)
