"""Weights of the exact shape, random where no checkpoint is given. muP scales are folded in, so a step has none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparda.engine.shapes import ModelShape

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, bf16. ``fused`` rows: Q, K, V, Forecast, current-layer selection query; all [rows, d_model]."""

    norm: Tensor
    fused: Tensor
    output: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor

    def projection(self, shape: ModelShape, queries: tuple[str, ...]) -> Tensor:
        """The rows a policy uses: Q, K, V and the named selection queries ("forecast", "current")."""
        qkv, kv = shape.q_width + 2 * shape.kv_width, shape.kv_width
        if queries == ("current",):
            return torch.cat([self.fused[:qkv], self.fused[qkv + kv :]])
        return self.fused[: qkv + kv * len(queries)]


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model, bf16: ``embed`` and ``head`` [vocab, d_model], ``final_norm`` [d_model]."""

    shape: ModelShape
    embed: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


def random_weights(shape: ModelShape, device: torch.device | str, seed: int = 0) -> Weights:
    """Normal weights with variance 1 / fan-in, so that activations keep their scale through any depth."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        w = torch.empty(rows, columns, dtype=DTYPE, device=device)
        return w.normal_(0.0, scale * columns**-0.5, generator=generator)

    def ones(value: float = 1.0) -> Tensor:
        return torch.full((shape.d_model,), value, dtype=DTYPE, device=device)

    layers = tuple(
        LayerWeights(
            norm=ones(),
            fused=normal(shape.qkvf_width + shape.kv_width, shape.d_model),
            output=normal(shape.d_model, shape.q_width, shape.residual_scale),
            ffn_norm=ones(),
            gate_up=normal(2 * shape.ffn, shape.d_model),
            down=normal(shape.d_model, shape.ffn, shape.residual_scale),
        )
        for _ in range(shape.layers)
    )
    embed = torch.empty(shape.vocab, shape.d_model, dtype=DTYPE, device=device)
    embed.normal_(0.0, 0.1 * shape.scale_emb, generator=generator)
    return Weights(shape, embed, layers, ones(shape.logit_scale), normal(shape.vocab, shape.d_model))


def rope_table(shape: ModelShape, positions: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [positions, head_dim / 2], of position * theta^(-2i / head_dim)."""
    half = shape.head_dim // 2
    inverse = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angle = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * inverse
    return angle.cos().float(), angle.sin().float()
