"""Kernel tests run on the GPU when there is one, and otherwise in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

if importlib.util.find_spec("torch") is not None:
    import torch


@pytest.fixture
def device() -> str:
    """Where kernels run: "cuda" when there is a GPU, else "cpu" (interpreted)."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def host_pool(device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Copies a tensor into host memory that the kernels can reach: pinned when there is a GPU."""

    def place(values: torch.Tensor) -> torch.Tensor:
        return values.cpu().pin_memory() if device == "cuda" else values.clone()

    return place
