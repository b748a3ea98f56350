"""A tiny random model and texts of random tokens, for tests of what a choice of blocks costs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sparda.calibrate.measure.quality.materials import Materials
from sparda.calibrate.measure.quality.window import Prefix, read_prefix
from sparda.engine.forecast_file import Forecast, forecast_of
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.weights import Weights, random_weights

# Threads that wait for one another take longer than what there is to do on tensors this small.
torch.set_num_threads(1)

SHAPE = ModelShape(
    "tiny", layers=4, d_model=48, heads=6, kv_heads=2, head_dim=16, ffn=64, vocab=101, value_bytes=4,
)  # fmt: skip
SPEC = SparseSpec(block=8, kernel=4, stride=2, init_blocks=1, local_blocks=1)
TOKENS, WINDOW = 150, 37
AHEAD = {"forecast": (1, 1), "untrained": (1, 1), "proxy": (1, 0), "infinigen": (1, 0), "shared": (1, 0)}
"""Lookahead, and heads of a Forecast, of selectors that have either."""


@functools.cache
def weights() -> Weights:
    """Queries and keys are made large, so that attention is far from even."""
    made = random_weights(SHAPE, "cpu", seed=3)
    for layer in made.layers:
        layer.fused[: SHAPE.q_width] *= 2.0
    return made


def ids(seed: int = 0, tokens: int = TOKENS) -> Tensor:
    return torch.randint(0, SHAPE.vocab, (tokens,), generator=torch.Generator().manual_seed(seed))


@functools.cache
def prefix(seed: int = 0, tokens: int = TOKENS - WINDOW) -> Prefix:
    return read_prefix(weights(), ids(seed)[:tokens])


def wide_forecast(heads: int, seed: int = 5) -> Forecast:
    """Random rows of several heads per KV head."""
    generator = torch.Generator().manual_seed(seed)
    rows = {
        name: {i: torch.randn(heads * SHAPE.kv_width, SHAPE.d_model, generator=generator) for i in range(SHAPE.layers)}
        for name in ("forecast", "current")
    }
    return Forecast(rows, Path("random"))


def materials(seed: int = 0) -> Materials:
    w = weights()
    often = torch.rand(SHAPE.layers, SHAPE.kv_heads, 32, generator=torch.Generator().manual_seed(9))
    return Materials(
        w,
        forecasts={(1, 1): forecast_of(w), (2, 1): forecast_of(w), (1, 2): wide_forecast(2)},
        scorer=w.scorer,
        basis=prefix(seed).basis,
        distances=dict.fromkeys(range(4, 20), often),
        sharing_layer=1,
        refresh=4,
    )


@dataclass(frozen=True)
class FakeText:
    name: str
    kind: str
    ids: Tensor


@dataclass(frozen=True)
class FakeCase:
    ids: Tensor
    answers: tuple[tuple[int, int], ...]
    task: str = "needle"
    depth: float = 0.5
    context: int = TOKENS


def texts(count: int = 2, tokens: int = TOKENS) -> list[FakeText]:
    return [FakeText(f"text{i}", "novel" if i % 2 else "code", ids(i, tokens)) for i in range(count)]


def renamed(text: FakeText, name: str) -> FakeText:
    return replace(text, name=name)
