"""A Forecast in training: rows that read one layer's input and are scored on a later layer's compressed keys."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparda.engine.forecast_file import tensor_name
from sparda.engine.prefill import rotated
from sparda.engine.shapes import ModelShape
from sparda.engine.training.config import Student
from sparda.engine.training.walk import LayerView
from sparda.engine.weights import Weights


@dataclass(slots=True)
class ForecastRows:
    """``forecast[l]`` reads layer l for layer l + lookahead; ``current[l]`` reads layer l for itself, l < lookahead.

    Each fp32 [kv_heads * heads * head_dim, d_model], KV head 0's Forecast heads first: of one head per KV head these
    are the rows of the public checkpoints. fp32 because bf16 would swallow updates below one part in 256.
    """

    student: Student
    shape: ModelShape
    forecast: dict[int, Tensor]
    current: dict[int, Tensor]

    @classmethod
    def begun(cls, weights: Weights, student: Student, seed: int = 0) -> ForecastRows:
        """Rows as the student begins, on the device of the weights."""
        s, ahead = weights.shape, student.lookahead
        generator = torch.Generator().manual_seed(seed)
        forecast = {i: _begin(weights, student, i + ahead, generator) for i in range(s.layers - ahead)}
        current = {i: _begin(weights, student, i, generator) for i in range(min(ahead, s.layers))}
        return cls(student, s, forecast, current)

    @property
    def name(self) -> str:
        return self.student.name

    @property
    def named(self) -> dict[str, Tensor]:
        """Every layer's rows by their public names."""
        forecast = {tensor_name("forecast", i): t for i, t in self.forecast.items()}
        return forecast | {tensor_name("current", i): t for i, t in self.current.items()}

    def source(self, target: int) -> int:
        """The layer whose input chooses the blocks of layer ``target``."""
        return target - self.student.lookahead if target >= self.student.lookahead else target

    def queries(self, target: int, inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated Forecast queries of N tokens for layer ``target``: [H * heads, N, head_dim].

        ``inputs`` [N, d_model] of the source layer; ``cos``, ``sin`` fp32 [N, head_dim / 2].
        """
        source = self.source(target)
        rows = self.current[source] if target < self.student.lookahead else self.forecast[source]
        heads = (inputs @ rows.to(inputs.dtype).T).unflatten(-1, (-1, self.shape.head_dim)).transpose(0, 1)
        return rotated(heads, cos, sin).contiguous()


def inputs_behind(rows: Sequence[ForecastRows]) -> deque[Tensor]:
    """Room for the inputs of a layer and of as many before it as the farthest Forecast looks ahead."""
    return deque(maxlen=1 + max((r.student.lookahead for r in rows), default=0))


def source(rows: ForecastRows, view: LayerView, behind: deque[Tensor]) -> Tensor:
    """The inputs [S, d_model] that choose for a layer; those of the layer itself are the newest of ``behind``."""
    return behind[rows.source(view.layer) - view.layer - 1]


def _begin(weights: Weights, student: Student, target: int, generator: torch.Generator) -> Tensor:
    s, device = weights.shape, weights.embed.device
    size = (s.kv_heads, student.heads, s.head_dim, s.d_model)
    if student.begin == "uniform":
        rows = (torch.rand(size, generator=generator) * 2 - 1) * s.d_model**-0.5
    else:
        rows = _query_means(weights, student.heads, target).cpu()
        if student.heads > s.group:
            # Two heads that begin alike would stay alike.
            rows = rows + 0.1 * rows.std() * torch.randn(size, generator=generator)
    parameter: Tensor = rows.reshape(-1, s.d_model).to(device).requires_grad_()
    return parameter


def _query_means(weights: Weights, heads: int, layer: int) -> Tensor:
    """Means of a layer's query projections over ``heads`` parts of each group, [H, heads, head_dim, d_model]."""
    s = weights.shape
    q = weights.layers[layer].fused[: s.q_width].float().view(s.kv_heads, s.group, s.head_dim, s.d_model)
    parts = []
    for i in range(heads):
        first = i * s.group // heads
        parts.append(q[:, first : max(first + 1, (i + 1) * s.group // heads)].mean(1))
    return torch.stack(parts, 1)
