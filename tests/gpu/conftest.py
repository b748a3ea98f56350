"""GPU tests: skipped, visibly, where torch sees no CUDA device or kernels are interpreted."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from sparda.engine.weights import Weights
torch = pytest.importorskip("torch", reason="needs torch: pip install 'sparda[engine]'")

from sparda.engine.shapes import MODELS, ModelShape, SparseSpec  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
            elif os.environ.get("TRITON_INTERPRET") == "1":
                item.add_marker(pytest.mark.skip(reason="needs compiled kernels: run `make gpu-test`"))


@pytest.fixture(scope="session")
def shape() -> ModelShape:
    """MiniCPM4.1-8B, six layers deep and with a small vocabulary: every kernel has its real shape."""
    return replace(MODELS["minicpm4.1-8b"], name="minicpm4.1-8b-6-layers", layers=6, vocab=8192)


@pytest.fixture(scope="session")
def weights(shape: ModelShape) -> Weights:
    from sparda.engine.weights import random_weights

    return random_weights(shape, "cuda", seed=1)


@pytest.fixture(scope="session")
def pool(shape: ModelShape) -> torch.Tensor:
    """Pinned memory for six layers, four sequences, 18K tokens: more than any test here needs."""
    from sparda.engine.tiers import new_pool

    spec = SparseSpec()
    rows = shape.layers * 4 * shape.kv_heads * 300
    return new_pool(rows, shape.block_bytes(spec) // 2, torch.device("cuda"))
