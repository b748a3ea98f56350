"""A model's weights as the engine reads them. muP scales are folded in, so a step has none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparda.engine.errors import SpardaError
from sparda.engine.shapes import SCORER_WIDTH, ModelShape

DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""Type of weights, activations and cached values by ``ModelShape.value_bytes``."""

SELECTION = ("forecast", "current")
"""Selection queries that training makes: for the layer ``lookahead`` ahead, and for the layer itself."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. All linears [rows, columns], applied as x @ w.T; ``gate_up`` has the gate's rows first.

    ``fused`` rows: Q, K, V, then one head per KV head for each name in ``selection``, in that order.
    ``eviction``: NOSA's eviction head, fp32 ([H], [H, kv_width]): bias = first * softplus(second @ value).
    """

    norm: Tensor
    fused: Tensor
    output: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor
    selection: tuple[str, ...] = SELECTION
    eviction: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class ScorerWeights:
    """The block scorer of ``shallow``: output . GELU(hidden @ LayerNorm([hidden state; query * key]) + hidden_bias).

    ``hidden`` [SCORER_WIDTH, d_model + kv_width], with LayerNorm's scale folded in; ``hidden_bias`` fp32
    [SCORER_WIDTH], with its shift; ``output`` fp32 [SCORER_WIDTH]. No output bias: it would change no choice.
    """

    hidden: Tensor
    hidden_bias: Tensor
    output: Tensor

    def scores(self, features: Tensor) -> Tensor:
        """[...] of features [..., d_model + kv_width]: hidden state, then query times key; in fp32."""
        z = torch.nn.functional.layer_norm(features, features.shape[-1:])
        found: Tensor = torch.nn.functional.gelu(z @ self.hidden.float().T + self.hidden_bias) @ self.output
        return found


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model: ``embed`` and ``head`` [vocab, d_model], ``final_norm`` [d_model].

    ``scorer``: for the policy ``shallow`` alone.
    """

    shape: ModelShape
    embed: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
    scorer: ScorerWeights | None = None

    def projection(self, layer: int, queries: tuple[str, ...], lookahead: int = 1) -> Tensor:
        """Rows [Q, K, V, one head per KV head for each name in ``queries``] of a layer's fused projection.

        A view where the names lead ``selection``. ``proxy`` is made here: see ``proxy_rows``. Raises SpardaError
        where the checkpoint has no rows of that name.
        """
        w, s = self.layers[layer], self.shape
        qkv, kv = s.q_width + 2 * s.kv_width, s.kv_width
        if w.selection[: len(queries)] == queries:
            return w.fused[: qkv + kv * len(queries)]
        parts = [w.fused[:qkv]]
        for name in queries:
            if name == "proxy":
                parts.append(proxy_rows(self, layer + lookahead))
            elif name in w.selection:
                start = qkv + kv * w.selection.index(name)
                parts.append(w.fused[start : start + kv])
            else:
                raise SpardaError(
                    f"layer {layer} of {s.name} has no {name} projection; load a Forecast checkpoint, or start from "
                    "the proxy (the next layer's own queries)."
                )
        return torch.cat(parts)


def proxy_rows(weights: Weights, layer: int) -> Tensor:
    """The mean of a layer's query projections over each group, [kv_width, d_model].

    Applied to an earlier layer's input it guesses what that layer's queries will be (InfiniGen, arXiv 2406.19707):
    rotation and dot product are linear, so the mean of the group's heads is taken once, here.
    """
    s = weights.shape
    q = weights.layers[layer].fused[: s.q_width].float()
    mean = q.view(s.kv_heads, s.group, s.head_dim, s.d_model).mean(1)
    return mean.reshape(s.kv_width, s.d_model).to(weights.embed.dtype)


def with_proxy_forecast(weights: Weights, lookahead: int) -> Weights:
    """The model with an untrained Forecast: each layer's is the proxy of the layer ``lookahead`` ahead of it.

    The current-layer query is the proxy of the layer itself. For models that have no Forecast checkpoint.
    """
    s, qkv = weights.shape, weights.shape.q_width + 2 * weights.shape.kv_width
    layers = []
    for index, w in enumerate(weights.layers):
        ahead = proxy_rows(weights, min(index + lookahead, s.layers - 1))
        layers.append(
            replace(w, fused=torch.cat([w.fused[:qkv], ahead, proxy_rows(weights, index)]), selection=SELECTION)
        )
    return replace(weights, layers=tuple(layers))


def random_weights(shape: ModelShape, device: torch.device | str, seed: int = 0) -> Weights:
    """Normal weights with variance 1 / fan-in, so that activations keep their scale through any depth."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = DTYPES[shape.value_bytes]

    def normal(rows: int, columns: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        w = torch.empty(rows, columns, dtype=dtype, device=device)
        return w.normal_(0.0, scale * columns**-0.5, generator=generator)

    def ones(value: float = 1.0) -> Tensor:
        return torch.full((shape.d_model,), value, dtype=dtype, device=device)

    layers = tuple(
        LayerWeights(
            norm=ones(),
            fused=normal(shape.qkvf_width + shape.kv_width, shape.d_model),
            output=normal(shape.d_model, shape.q_width, shape.residual_scale),
            ffn_norm=ones(),
            gate_up=normal(2 * shape.ffn, shape.d_model),
            down=normal(shape.d_model, shape.ffn, shape.residual_scale),
            eviction=(
                normal(1, shape.kv_heads, dtype=torch.float32)[0],
                normal(shape.kv_heads, shape.kv_width, dtype=torch.float32),
            ),
        )
        for _ in range(shape.layers)
    )
    embed = torch.empty(shape.vocab, shape.d_model, dtype=dtype, device=device)
    embed.normal_(0.0, 0.1 * shape.scale_emb, generator=generator)
    head = normal(shape.vocab, shape.d_model)
    scorer = ScorerWeights(
        hidden=normal(SCORER_WIDTH, shape.d_model + shape.kv_width),
        hidden_bias=normal(1, SCORER_WIDTH, dtype=torch.float32)[0],
        output=normal(1, SCORER_WIDTH, dtype=torch.float32)[0],
    )
    return Weights(shape, embed, layers, ones(shape.logit_scale), head, scorer)


def rope_table(shape: ModelShape, positions: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [positions, head_dim / 2], of position * theta^(-2i / head_dim) / factor_i."""
    half = shape.head_dim // 2
    inverse = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    if shape.rope_factors:
        inverse = inverse / torch.tensor(shape.rope_factors, dtype=torch.float64, device=device)
    angle = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * inverse
    return (angle.cos() * shape.rope_amplitude).float(), (angle.sin() * shape.rope_amplitude).float()
