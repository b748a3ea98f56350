"""How good a Forecast is on sequences that it was not trained on: loss, and recall of its teacher's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparda.engine.shapes import SparseSpec
from sparda.engine.training.forecast import ForecastRows, inputs_behind, source
from sparda.engine.training.targets import Teacher
from sparda.engine.training.walk import walk
from sparda.engine.weights import Weights, rope_table


@dataclass(frozen=True, slots=True)
class Judgement:
    """``loss`` in nats and ``recall`` as a share, means over layers, KV heads, queries that had a choice, sequences."""

    loss: float
    recall: float


@torch.no_grad()
def judge(
    weights: Weights, spec: SparseSpec, top_k: int, rows: Sequence[ForecastRows], sequences: Sequence[Tensor]
) -> dict[str, Judgement]:
    """Every Forecast by name, on token sequences int64 [S] with more than ``top_k`` blocks."""
    losses, recalls = torch.zeros(2, len(rows), device=weights.embed.device).unbind()
    for tokens in sequences:
        behind = inputs_behind(rows)
        cos, sin = rope_table(weights.shape, tokens.numel(), weights.embed.device)
        # From here on there are blocks to leave out.
        first = min(top_k * spec.block, tokens.numel() - 1)
        for view in walk(weights, tokens):
            behind.append(view.inputs)
            teacher = Teacher.of(view, spec, top_k)
            for start in range(first, tokens.numel(), teacher.chunk):
                end = min(start + teacher.chunk, tokens.numel())
                targets, part = teacher.targets(start, end), (end - start) / (tokens.numel() - first)
                for i, own in enumerate(rows):
                    f = own.queries(view.layer, source(own, view, behind)[start:end], cos[start:end], sin[start:end])
                    losses[i] += teacher.loss(f, targets).mean() * part
                    recalls[i] += teacher.recall(f, targets).nanmean() * part
    count = weights.shape.layers * len(sequences)
    found = zip(rows, (losses / count).tolist(), (recalls / count).tolist(), strict=True)
    return {own.name: Judgement(loss, recall) for own, loss, recall in found}
