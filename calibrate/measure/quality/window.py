"""The last tokens of a text as a decoder would see them: each query attends to the blocks it chose, no other.

What comes before the window has been read densely (``engine.prefill``), as a prompt is. The window's tokens go through
the model together, layer by layer: their keys, values and hidden states are those of the sparse run, so that an early
layer's poor choice reaches all later ones, and nothing a query sees lies after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparda.calibrate.measure.quality.blocks import Grid
from sparda.calibrate.measure.quality.view import Chooser, View, pieces
from sparda.engine.errors import SpardaError
from sparda.engine.partial import SAMPLE, partial_basis
from sparda.engine.prefill import fed_forward, normed, prefill, projected, rotated
from sparda.engine.shapes import SparseSpec
from sparda.engine.weights import Weights, rope_table

KEPT = 5
"""Layers whose inputs a selector may still see: its own and the four before."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys (rotated) and values of a text's first tokens, dense, [L, H, T, D].

    ``basis``: InfiniGen's directions, from the first tokens' queries, fp32 [L, H, D, R].
    """

    keys: Tensor
    values: Tensor
    basis: Tensor

    @property
    def tokens(self) -> int:
        return int(self.keys.shape[2])

    def upto(self, tokens: int) -> Prefix:
        """The first ``tokens`` of it, as views."""
        return Prefix(self.keys[:, :, :tokens], self.values[:, :, :tokens], self.basis)


@dataclass(frozen=True, slots=True)
class Predicted:
    """Of the window's tokens but the first: loss in nats, fp32 [Q - 1], and whether each was the likeliest."""

    nats: Tensor
    likeliest: Tensor


def read_prefix(weights: Weights, ids: Tensor, *, chunk: int = 1024) -> Prefix:
    """Read a text's first tokens densely: ``ids`` int64 [T]. Memory grows with T, not with its square.

    Raises SpardaError as ``prefill`` does, and for a model that computes no numbers.
    """
    s = weights.shape
    with torch.inference_mode():
        read = prefill(weights, ids, chunk=chunk, sample=SAMPLE)
        assert read.queries is not None
        # What is no number in an early layer is none in the last.
        if not bool(read.keys[-1].isfinite().all()):
            raise SpardaError(
                f"{s.name} computes values that are no numbers; give a whole checkpoint, or a wider type of values."
            )
        queries = read.queries.unflatten(1, (s.kv_heads, s.group))
        count = queries.shape[3]
        basis = [partial_basis(q, k[:, :count], s.partial_dims) for q, k in zip(queries, read.keys, strict=True)]
        return Prefix(read.keys, read.values, torch.stack(basis))


def run_window(
    weights: Weights, spec: SparseSpec, prefix: Prefix, ids: Tensor, choose: Chooser, *, loss: bool = True
) -> Predicted:
    """Run the tokens after ``prefix``, int64 [Q], through the model, each layer attending to what ``choose`` says.

    Without ``loss`` the head is left out and ``Predicted`` is empty. Raises SpardaError for a text above the model's
    context.
    """
    s, start, count = weights.shape, prefix.tokens, int(ids.numel())
    if start + count > s.max_context:
        raise SpardaError(f"a text of {start + count} tokens; {s.name} takes 1 to {s.max_context}.")
    device = weights.embed.device
    with torch.inference_mode():
        grid = Grid(spec, start, count, device)
        cos, sin = (table[start:] for table in rope_table(s, start + count, device))
        ids = ids.to(device)
        x = weights.embed[ids]
        inputs: dict[int, Tensor] = {}
        for layer, w in enumerate(weights.layers):
            inputs[layer] = h = normed(s, x, w.norm)
            inputs.pop(layer - KEPT, None)
            q, k, v = projected(s, w, h)
            keys = torch.cat([prefix.keys[layer], rotated(k, cos, sin)], 1)
            values = torch.cat([prefix.values[layer], v], 1)
            view = View(s, grid, layer, inputs, rotated(q, cos, sin), keys, cos, sin)
            x = fed_forward(s, w, x + _attended(view, values, choose(view)) @ w.output.T)
        if not loss:
            return Predicted(x.new_empty(0, dtype=torch.float32), ids.new_empty(0, dtype=torch.bool))
        return _predicted(weights, x[:-1], ids[1:])


def _attended(view: View, values: Tensor, chosen: Tensor | None) -> Tensor:
    """Attention in fp32 over the tokens of the chosen blocks up to each query's own: [Q, Hq * D]."""
    s, grid, block = view.shape, view.grid, view.grid.spec.block
    grouped, values, found = view.grouped, values.float(), []
    for rows in view.rows(grid.tokens):
        end = grid.start + rows.stop
        logits = view.logits(grouped[:, :, rows], view.keys[:, :end].float())
        unseen = torch.arange(end, device=logits.device) > grid.positions[rows, None]
        if chosen is not None:
            unseen = unseen | ~chosen[:, rows].repeat_interleave(block, -1)[..., :end]
            unseen = unseen[:, None]
        found.append(logits.masked_fill_(unseen, -torch.inf).softmax(-1) @ values[:, None, :end])
    out = torch.cat(found, 2).to(view.q.dtype)
    return out.permute(2, 0, 1, 3).reshape(grid.count, s.q_width)


def _predicted(weights: Weights, x: Tensor, targets: Tensor) -> Predicted:
    nats, likeliest, head = [], [], weights.head.float()
    for rows in pieces(len(x), weights.shape.vocab, x.device):
        logits = normed(weights.shape, x[rows], weights.final_norm).float() @ head.T
        nats.append(torch.nn.functional.cross_entropy(logits, targets[rows], reduction="none"))
        likeliest.append(logits.argmax(-1) == targets[rows])
    return Predicted(torch.cat(nats), torch.cat(likeliest))
