"""On-demand (softmax) block scores agree with plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from sparda.kernels.headscore import head_scores, headscore_chunks, headscore_reference


def _compare(device: str, spots: list[int], group: int, key_rows: int, dim: int, windows: tuple[int, int, int]) -> None:
    torch.manual_seed(group + dim)
    block, kernel, stride = windows
    blocks = key_rows * stride // block + 1
    q = torch.randn(len(spots), 2 * group, dim, device=device).to(torch.bfloat16)
    keys = torch.randn(len(spots), 2, key_rows, dim, device=device).to(torch.bfloat16)
    positions = torch.tensor(spots, dtype=torch.int32, device=device)
    out = torch.full((len(spots), 2, blocks), float("nan"), device=device)
    stats = torch.full((len(spots), 2, headscore_chunks(key_rows), group, 2), float("nan"), device=device)
    head_scores(q, keys, positions, out, stats, block=block, kernel=kernel, stride=stride)
    expected = headscore_reference(q, keys, positions, blocks=blocks, block=block, kernel=kernel, stride=stride)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 64), (4, 128), (16, 128)])
def test_ragged_positions_agree_with_the_reference(device: str, group: int, dim: int) -> None:
    _compare(device, [0, 31, 32, 62, 63, 64, 65, 400, 703], group, 43, dim, (64, 32, 16))


def test_softmax_spans_several_chunks_of_keys(device: str) -> None:
    _compare(device, [8, 2047, 2060, 5000], 3, 1250, 64, (16, 8, 4))


def test_scratch_of_another_size_is_refused(device: str) -> None:
    q = torch.zeros(1, 2, 64, dtype=torch.bfloat16, device=device)
    keys = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
    positions = torch.zeros(1, dtype=torch.int32, device=device)
    out, stats = torch.zeros(1, 1, 4, device=device), torch.zeros(1, 1, 9, 2, 2, device=device)
    with pytest.raises(ValueError, match="stats: given"):
        head_scores(q, keys, positions, out, stats, block=64, kernel=32, stride=16)
