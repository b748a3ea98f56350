"""Thread blocks of attention fill the GPU once, and what they leave free is known."""

from __future__ import annotations

import pytest

from sparda.engine.occupancy import attention_splits, free_beside_attention


@pytest.mark.parametrize(
    ("heads", "top_k", "splits"), [(128, 96, 1), (8, 96, 16), (64, 96, 2), (1, 4096, 32), (1, 3, 1), (4096, 96, 1)]
)
def test_splits_fill_the_gpu_once_without_tiny_shares(heads: int, top_k: int, splits: int) -> None:
    assert attention_splits(heads, top_k, 132) == splits


def test_every_split_gets_blocks() -> None:
    for heads in range(1, 200, 7):
        for top_k in range(1, 130):
            splits = attention_splits(heads, top_k, 132)
            share = -(-top_k // splits)
            assert 1 <= splits <= 32
            assert (splits - 1) * share < top_k
            assert splits == 1 or share >= 4


def test_splits_refuse_an_empty_problem() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0, 4 and 132"):
        attention_splits(0, 4, 132)


@pytest.mark.parametrize(
    ("heads", "top_k", "sms", "free"), [(128, 96, 132, 4), (8, 96, 132, 4), (2, 96, 132, 84), (96, 96, 132, 36)]
)
def test_attention_leaves_the_multiprocessors_that_its_thread_blocks_do_not_take(
    heads: int, top_k: int, sms: int, free: int
) -> None:
    assert free_beside_attention(heads, top_k, sms) == free


def test_attention_in_several_turns_leaves_none() -> None:
    assert free_beside_attention(200, 96, 132) == 0
