"""Dense prefill of one prompt in plain PyTorch, chunk by chunk: every token attends to all before it.

The simple prefill: its attention grows with the square of the prompt. Choosing blocks begins with the first decoded
token; a prompt is read whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from sparda.engine.errors import SpardaError
from sparda.engine.shapes import ModelShape
from sparda.engine.weights import DTYPES, LayerWeights, Weights, rope_table

CHUNK = 1024
"""Tokens that go through the model together: enough for the linears to be bound by arithmetic."""

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Those that read a KV head shared by its group in place; the first that can is taken, for every chunk the same."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prompt of S tokens leaves behind, in the type of the weights, on their device.

    ``keys`` (rotated) and ``values`` [L, H, S, head_dim]; ``logits`` [vocab] of the last token. ``queries`` (rotated)
    [L, Hq, N, head_dim] of the first N tokens, where any were asked for.
    """

    keys: Tensor
    values: Tensor
    logits: Tensor
    queries: Tensor | None = None

    @property
    def tokens(self) -> int:
        return int(self.keys.shape[2])


def prefill(weights: Weights, tokens: Tensor, *, chunk: int = CHUNK, sample: int = 0) -> Prefilled:
    """Run a prompt through the model: ``tokens`` int64 [S], at least one, on any device.

    Values are rounded where the decode step stores them. ``chunk`` changes memory and speed, and the result only by
    the rounding of sums in another order. The queries of the first ``sample`` tokens are kept, of all where there are
    fewer. Raises SpardaError for an empty prompt and one above the model's context.
    """
    s = weights.shape
    length = int(tokens.numel())
    if not 1 <= length <= s.max_context:
        raise SpardaError(f"a prompt of {length} tokens; {s.name} takes 1 to {s.max_context}.")
    device = weights.embed.device
    keys = torch.empty(s.layers, s.kv_heads, length, s.head_dim, dtype=DTYPES[s.value_bytes], device=device)
    values = torch.empty_like(keys)
    sampled = min(sample, length)
    queries = keys.new_empty(s.layers, s.heads, sampled, s.head_dim) if sampled else None
    cos, sin = rope_table(s, length, device)
    tokens = tokens.to(device)
    for start in range(0, length, chunk):
        here = slice(start, min(start + chunk, length))
        x = weights.embed[tokens[here]]
        for layer, w in enumerate(weights.layers):
            q = _enter(s, w, normed(s, x, w.norm), cos[here], sin[here], keys[layer, :, here], values[layer, :, here])
            if queries is not None and start < sampled:
                queries[layer, :, here] = q[:, : sampled - start]
            attended = _attend(s, q, keys[layer, :, : here.stop], values[layer, :, : here.stop])
            x = fed_forward(s, w, x + attended @ w.output.T)
    return Prefilled(keys, values, normed(s, x[-1], weights.final_norm) @ weights.head.T, queries)


def prefill_bytes(shape: ModelShape, tokens: int, chunk: int = CHUNK, sample: int = 0) -> int:
    """GPU bytes that ``prefill`` takes at the least: keys, values, queries that are kept, activations of a chunk."""
    kept = shape.layers * (2 * shape.kv_width * tokens + shape.q_width * min(sample, tokens))
    rows = min(chunk, tokens) * (4 * shape.d_model + 3 * shape.q_width + 5 * shape.ffn)
    return (kept + rows) * shape.value_bytes


def normed(s: ModelShape, x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm of rows [..., d_model], in fp32, rounded once."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + s.norm_eps)
    return (scaled * weight.float()).to(x.dtype)


def projected(s: ModelShape, w: LayerWeights, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [Hq, c, head_dim], keys and values [H, c, head_dim] of normed inputs [c, d_model]; nothing rotated."""
    heads = (h @ w.fused[: s.q_width + 2 * s.kv_width].T).view(len(h), -1, s.head_dim).transpose(0, 1)
    q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads])
    return q, k, v


def fed_forward(s: ModelShape, w: LayerWeights, x: Tensor) -> Tensor:
    """The stream [c, d_model] after a layer's feed-forward."""
    gate, up = (normed(s, x, w.ffn_norm) @ w.gate_up.T).chunk(2, -1)
    return x + (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype) @ w.down.T


def _enter(s: ModelShape, w: LayerWeights, h: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Write a chunk's keys and values [H, c, head_dim] in place; returns its rotated queries [Hq, c, head_dim]."""
    q, k, v = projected(s, w, h)
    keys.copy_(rotated(k, cos, sin))
    values.copy_(v)
    return rotated(q, cos, sin)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs i with i + head_dim / 2, in fp32, rounded once; x [heads, c, head_dim]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _attend(s: ModelShape, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last c tokens' queries [Hq, c, head_dim] over all n keys so far: [c, Hq * head_dim].

    The mask is aligned to the last key and never stored where a fused kernel runs; elsewhere it is c x n.
    """
    count, length = q.shape[1], keys.shape[1]
    grouped = (s.kv_heads, s.group, length, s.head_dim)
    with sdpa_kernel(BACKENDS):
        out = torch.nn.functional.scaled_dot_product_attention(
            q.view(s.kv_heads, s.group, count, s.head_dim),
            keys[:, None].expand(grouped),
            values[:, None].expand(grouped),
            attn_mask=causal_lower_right(count, length),
        )
    return out.permute(2, 0, 1, 3).reshape(count, s.q_width)
