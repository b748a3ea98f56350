"""The end-of-step kernel moves the clock on and banks the misses."""

from __future__ import annotations

import pytest
import torch

from sparda.kernels.advance import advance, advance_reference


@pytest.mark.parametrize(("batch", "layers"), [(1, 1), (5, 36), (64, 3)])
def test_a_step_moves_positions_and_step_on_and_banks_the_misses(device: str, batch: int, layers: int) -> None:
    torch.manual_seed(batch)
    state = [
        torch.randint(1, 100000, (batch,), dtype=torch.int32, device=device),
        torch.tensor([7], dtype=torch.int32, device=device),
        torch.randint(0, 1000, (layers,), dtype=torch.int32, device=device),
        torch.randint(2**33, 2**34, (layers,), dtype=torch.int64, device=device),
    ]
    expected = [tensor.clone() for tensor in state]
    for _ in range(3):
        advance(*state)
        advance_reference(*expected)
        for got, want in zip(state, expected, strict=True):
            assert torch.equal(got, want)


def test_a_row_at_position_0_stays_there(device: str) -> None:
    positions, step, missed = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([3, 0, 9, 0], [0], [2]))
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(2):
        advance(positions, step, missed, total)
    assert positions.tolist() == [5, 0, 11, 0]
    assert (int(step), int(total)) == (2, 2)


def test_totals_must_be_64_bit(device: str) -> None:
    count = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="miss_total: given"):
        advance(count.clone(), count[:1].clone(), count, count.clone())
