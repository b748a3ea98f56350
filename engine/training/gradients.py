"""The gradients of one sequence in everything that is trained, at once or replayed as one CUDA graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparda.engine.graph import captured
from sparda.engine.shapes import SparseSpec
from sparda.engine.training.forecast import ForecastRows, inputs_behind, source
from sparda.engine.training.scorer import ScorerRows
from sparda.engine.training.targets import Teacher
from sparda.engine.training.walk import LayerView, walk
from sparda.engine.weights import Weights, rope_table


@dataclass(slots=True)
class Gradients:
    """Adds a sequence's gradients, over ``batch``, to those of ``rows`` and ``scorer``.

    On a GPU the work on the first sequence's length is captured once and then replayed: of a small model it is
    thousands of kernels, each of which takes longer to issue than to run. Other lengths are issued as they come.
    """

    weights: Weights
    spec: SparseSpec
    top_k: int
    batch: int
    rows: Sequence[ForecastRows]
    scorer: ScorerRows | None
    _graph: torch.cuda.CUDAGraph | None = None
    _tokens: Tensor | None = None
    _sample: Tensor | None = None
    _losses: Tensor | None = None
    _tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.weights.embed.device

    def prepare(self, tokens: Tensor) -> None:
        """Capture the work on sequences as long as ``tokens``; leaves every gradient at 0."""
        if self.device.type != "cuda" or self._graph is not None:
            return
        self._tokens = tokens.to(self.device, copy=True)
        self._sample = self._positions(len(tokens), 0)
        self._compute(self._tokens, self._sample)
        # What compiling took is given back before the graph takes as much for itself.
        torch.cuda.empty_cache()

        def body() -> None:
            assert self._tokens is not None
            self._losses = self._compute(self._tokens, self._sample)

        self._graph = captured(body)
        parts: list[ForecastRows | ScorerRows] = [*self.rows, *([self.scorer] if self.scorer else [])]
        for parameter in (p for part in parts for p in part.named.values()):
            assert parameter.grad is not None
            parameter.grad.zero_()

    def add(self, tokens: Tensor, number: int) -> Tensor:
        """Add the gradients of a sequence int64 [S], the ``number``-th of the training.

        Returns the mean loss over layers by part: every Forecast, then the scorer.
        """
        sample = self._positions(len(tokens), number)
        if self._graph is None or self._tokens is None or len(self._tokens) != len(tokens):
            return self._compute(tokens.to(self.device), sample)
        self._tokens.copy_(tokens)
        if self._sample is not None and sample is not None:
            self._sample.copy_(sample)
        self._graph.replay()
        assert self._losses is not None
        return self._losses

    def _positions(self, length: int, number: int) -> Tensor | None:
        return self.scorer.positions(length, number).to(self.device) if self.scorer else None

    def _compute(self, tokens: Tensor, sample: Tensor | None) -> Tensor:
        layers = self.weights.shape.layers
        losses = torch.zeros(len(self.rows) + (self.scorer is not None), device=self.device)
        if len(tokens) not in self._tables:
            self._tables[len(tokens)] = rope_table(self.weights.shape, len(tokens), self.device)
        table = self._tables[len(tokens)]
        behind = inputs_behind(self.rows)
        for view in walk(self.weights, tokens, table=table):
            behind.append(view.inputs)
            if self.rows:
                losses[: len(self.rows)] += self._layer(view, behind, *table) / layers
            if self.scorer is not None and sample is not None:
                loss = self.scorer.visit(view, sample)
                if loss is not None:
                    (loss / self.batch).backward()
                    losses[-1] += loss.detach()
        return losses

    def _layer(self, view: LayerView, behind: deque[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        """Gradients of one layer's losses; each Forecast's mean over queries and KV heads."""
        losses = torch.zeros(len(self.rows), device=self.device)
        teacher = Teacher.of(view, self.spec, self.top_k)
        length = len(view.inputs)
        for start in range(0, length, teacher.chunk):
            end = min(start + teacher.chunk, length)
            targets = teacher.targets(start, end)
            for i, rows in enumerate(self.rows):
                f = rows.queries(view.layer, source(rows, view, behind)[start:end], cos[start:end], sin[start:end])
                loss = teacher.loss(f, targets).sum() / (length * self.weights.shape.kv_heads)
                (loss / self.batch).backward()
                losses[i] += loss.detach()
        return losses
