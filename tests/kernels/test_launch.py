"""How many multiprocessors work is cut for: those there are, or as many as somebody says."""

from __future__ import annotations

from contextvars import copy_context

import pytest
import torch

from sparda.kernels.launch import multiprocessors, multiprocessors_there, with_multiprocessors
from sparda.kernels.linear import tiling_of


@pytest.fixture
def x(device: str) -> torch.Tensor:
    return torch.zeros(4, 4096, dtype=torch.bfloat16, device=device)


def test_the_innermost_count_holds_and_the_one_outside_comes_back(x: torch.Tensor) -> None:
    there = multiprocessors(x)
    with with_multiprocessors(100):
        with with_multiprocessors(68):
            assert (multiprocessors(x), multiprocessors_there(x)) == (68, there)
        assert multiprocessors(x) == 100
        with pytest.raises(KeyError), with_multiprocessors(3):
            raise KeyError
        assert multiprocessors(x) == 100
    assert multiprocessors(x) == there


def test_another_context_is_none_the_wiser(x: torch.Tensor) -> None:
    outside = copy_context()
    with with_multiprocessors(68):
        assert outside.run(multiprocessors, x) == multiprocessors_there(x)


@pytest.mark.parametrize("count", [0, -1])
def test_a_gpu_without_multiprocessors_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"count must be at least 1, got {count}"), with_multiprocessors(count):
        pass


def test_linears_are_tiled_for_the_count(x: torch.Tensor) -> None:
    rows = 96 * 64
    with with_multiprocessors(96):
        narrow = tiling_of(rows, x, splits=1)
    with with_multiprocessors(80):
        wide = tiling_of(rows, x, splits=1)
    assert (narrow.rows, wide.rows) == (64, 128)
