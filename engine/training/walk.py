"""The frozen model, layer by layer over a whole sequence: what a student reads, and what a teacher is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from sparda.engine.errors import SpardaError
from sparda.engine.prefill import BACKENDS, fed_forward, normed, projected, rotated
from sparda.engine.shapes import ModelShape
from sparda.engine.weights import LayerWeights, Weights, rope_table

CHUNK = 8192
"""Tokens that go through a linear together."""


@dataclass(frozen=True, slots=True)
class LayerView:
    """A layer as a sequence of S tokens meets it, in the type of the weights.

    ``inputs`` [S, d_model]: the normed input of its projections. ``queries`` [Hq, S, head_dim] and ``keys``
    [H, S, head_dim], rotated, contiguous.
    """

    layer: int
    inputs: Tensor
    queries: Tensor
    keys: Tensor


@torch.no_grad()
def walk(
    weights: Weights, tokens: Tensor, *, chunk: int = CHUNK, table: tuple[Tensor, Tensor] | None = None
) -> Iterator[LayerView]:
    """Every layer of the model in turn, attending densely; ``tokens`` int64 [S], at least two.

    Memory grows with S, never with its square: each linear sees ``chunk`` tokens at a time. A view's tensors are its
    own, so that a reader may keep them. ``table``: that of ``rope_table``, where it is there already. Raises
    SpardaError for a sequence that the model does not take.
    """
    s, length = weights.shape, int(tokens.numel())
    if not 2 <= length <= s.max_context:
        raise SpardaError(f"a sequence of {length} tokens; {s.name} trains on 2 to {s.max_context}.")
    device = weights.embed.device
    cos, sin = table or rope_table(s, length, device)
    x = weights.embed[tokens.to(device)]
    parts = [slice(i, min(i + chunk, length)) for i in range(0, length, chunk)]
    for layer, w in enumerate(weights.layers):
        view, values = _enter(s, layer, w, x, cos, sin, parts)
        yield view
        if layer + 1 == s.layers:
            return  # nobody reads what the last layer makes
        attended = _attend(s, view, values)
        del view, values
        for here in parts:
            x[here] = fed_forward(s, w, x[here] + attended[here] @ w.output.T)
        del attended


def _enter(
    s: ModelShape, layer: int, w: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, parts: list[slice]
) -> tuple[LayerView, Tensor]:
    """The layer's view of the stream x [S, d_model], and its values [H, S, head_dim]."""
    length = len(x)
    inputs = torch.empty_like(x)
    queries = x.new_empty(s.heads, length, s.head_dim)
    keys, values = x.new_empty(2, s.kv_heads, length, s.head_dim).unbind()
    for here in parts:
        inputs[here] = normed(s, x[here], w.norm)
        q, k, v = projected(s, w, inputs[here])
        queries[:, here] = rotated(q, cos[here], sin[here])
        keys[:, here] = rotated(k, cos[here], sin[here])
        values[:, here] = v
    return LayerView(layer, inputs, queries, keys), values


def _attend(s: ModelShape, view: LayerView, values: Tensor) -> Tensor:
    """[S, q_width]: every token over all up to itself."""
    length = values.shape[1]
    shared = (s.kv_heads, s.group, length, s.head_dim)
    with sdpa_kernel(BACKENDS):
        out = torch.nn.functional.scaled_dot_product_attention(
            view.queries.view(shared),
            view.keys[:, None].expand(shared),
            values[:, None].expand(shared),
            is_causal=True,
        )
    return out.permute(2, 0, 1, 3).reshape(length, s.q_width)
