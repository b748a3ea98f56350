"""On-demand (softmax) block scores agree with plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from sparda.kernels.headscore import head_scores, headscore_chunks, headscore_reference

both_types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
# fp32 products rounded to tf32 would be a few parts in ten thousand off.
RTOL = {torch.bfloat16: 1e-3, torch.float32: 1e-4}


def _compare(
    device: str,
    spots: list[int],
    group: int,
    key_rows: int,
    dim: int,
    windows: tuple[int, int, int],
    dtype: torch.dtype,
    kv_heads: int = 2,
) -> None:
    torch.manual_seed(group + dim)
    block, kernel, stride = windows
    blocks = key_rows * stride // block + 1
    q = torch.randn(len(spots), kv_heads * group, dim, device=device).to(dtype)
    keys = torch.randn(len(spots), kv_heads, key_rows, dim, device=device).to(dtype)
    positions = torch.tensor(spots, dtype=torch.int32, device=device)
    out = torch.full((len(spots), kv_heads, blocks), float("nan"), device=device)
    stats = torch.full((len(spots), kv_heads, headscore_chunks(key_rows), group, 2), float("nan"), device=device)
    head_scores(q, keys, positions, out, stats, block=block, kernel=kernel, stride=stride)
    expected = headscore_reference(q, keys, positions, blocks=blocks, block=block, kernel=kernel, stride=stride)
    torch.testing.assert_close(out, expected, rtol=RTOL[dtype], atol=1e-6)


@both_types
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 64), (3, 128), (4, 128), (16, 128)])
def test_ragged_positions_agree_with_the_reference(device: str, group: int, dim: int, dtype: torch.dtype) -> None:
    _compare(device, [0, 31, 32, 62, 63, 64, 65, 400, 703], group, 43, dim, (64, 32, 16), dtype)


@both_types
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_an_odd_batch_of_any_number_of_heads_agrees_with_the_reference(
    device: str, kv_heads: int, dtype: torch.dtype
) -> None:
    _compare(device, [0, 133, 380], 3, 24, 64, (64, 32, 16), dtype, kv_heads)


@both_types
def test_softmax_spans_several_chunks_of_keys(device: str, dtype: torch.dtype) -> None:
    _compare(device, [8, 2047, 2060, 5000], 3, 1250, 64, (16, 8, 4), dtype)


def _zeros(device: str) -> list[torch.Tensor]:
    """q, keys, positions, out and stats of one sequence, one KV head and two query heads."""
    q = torch.zeros(1, 2, 64, dtype=torch.bfloat16, device=device)
    keys = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
    positions = torch.zeros(1, dtype=torch.int32, device=device)
    return [q, keys, positions, torch.zeros(1, 1, 4, device=device), torch.zeros(1, 1, 1, 2, 2, device=device)]


def test_scratch_of_another_size_is_refused(device: str) -> None:
    case = _zeros(device)
    case[4] = torch.zeros(1, 1, 9, 2, 2, device=device)
    with pytest.raises(ValueError, match="stats: given"):
        head_scores(*case, block=64, kernel=32, stride=16)


@pytest.mark.parametrize(
    ("index", "dtype", "dtypes"),
    [
        (0, torch.float32, "queries torch.float32, keys torch.bfloat16, out torch.float32"),
        (1, torch.float32, "queries torch.bfloat16, keys torch.float32, out torch.float32"),
        (3, torch.bfloat16, "queries torch.bfloat16, keys torch.bfloat16, out torch.bfloat16"),
    ],
)
def test_mixed_dtypes_are_refused_by_name(device: str, index: int, dtype: torch.dtype, dtypes: str) -> None:
    case = _zeros(device)
    case[index] = case[index].to(dtype)
    with pytest.raises(ValueError, match=f"dtypes: given {dtypes}, allowed: queries and keys both"):
        head_scores(*case, block=64, kernel=32, stride=16)
