"""The sampled token is the likeliest."""

from __future__ import annotations

import pytest
import torch

from sparda.kernels.sample import CHUNK, greedy, greedy_chunks, greedy_reference


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    tokens = torch.full((logits.shape[0],), -1, dtype=torch.int64, device=logits.device)
    best = torch.full((logits.shape[0], greedy_chunks(logits.shape[1]), 2), float("nan"), device=logits.device)
    greedy(logits, tokens, best)
    return tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 73448])
def test_the_largest_logit_wins_wherever_it_is(device: str, vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(5, vocab, device=device).to(dtype)
    for row, place in enumerate((0, vocab - 1, vocab // 2, min(vocab - 1, CHUNK), vocab // 3)):
        logits[row, place] = 9.0 + row
    assert torch.equal(_greedy(logits), greedy_reference(logits))


def test_the_lowest_index_wins_among_equals(device: str) -> None:
    logits = torch.zeros(2, 2 * CHUNK, device=device)
    logits[1, [CHUNK - 1, CHUNK]] = 1.0
    assert _greedy(logits).tolist() == [0, CHUNK - 1]


def test_infinities_are_values_like_others(device: str) -> None:
    logits = torch.full((3, 10), float("-inf"), device=device)
    logits[1, 4] = -1e30
    logits[2, 9] = float("inf")
    assert _greedy(logits).tolist() == [0, 4, 9]


def test_a_row_of_nans_still_gives_a_token_of_the_vocabulary(device: str) -> None:
    logits = torch.full((1, CHUNK + 3), float("nan"), device=device)
    assert 0 <= int(_greedy(logits)[0]) < CHUNK + 3


def test_buffers_that_do_not_fit_are_named(device: str) -> None:
    logits = torch.zeros(2, 10, device=device)
    tokens, best = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(2, 1, 2, device=device)
    with pytest.raises(ValueError, match="logits must be contiguous"):
        greedy(logits.t(), tokens, best)
    with pytest.raises(ValueError, match=r"tokens must be int64 \[2\]"):
        greedy(logits, tokens.int(), best)
    with pytest.raises(ValueError, match="best must be contiguous fp32"):
        greedy(logits, tokens, best[:1])
