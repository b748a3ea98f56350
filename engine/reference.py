"""A decode step in plain PyTorch, with nothing shared with the engine but the weights: what its tokens are held to.

No slots, no maps, no streams: the whole KV history as tensors, selection from scratch at every step. Values are
rounded to bf16 where the engine stores bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparda.engine.config import Config
from sparda.engine.partial import along
from sparda.engine.policies import projections
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.tiers import Tiers
from sparda.engine.weights import DTYPES, Weights, rope_table


@dataclass
class ReferenceDecoder:
    """``history[l]`` is (K, V) of layer l, fp32 holding bf16 values, [B, H, tokens, head_dim].

    Two blocks may score so nearly alike that rounding decides between them. So a step can be given the choice of the
    engine: it attends to that, and ``overlooked`` keeps by how much of the scores' spread it was worse than the best.
    """

    weights: Weights
    spec: SparseSpec
    config: Config
    history: list[tuple[Tensor, Tensor]]
    overlooked: float = 0.0
    basis: Tensor | None = None
    """InfiniGen's directions of the offloaded layers, fp32 [layers - 1, H, head_dim, R]."""

    @property
    def shape(self) -> ModelShape:
        return self.weights.shape

    def _stored(self, x: Tensor) -> Tensor:
        """As the engine stores it: rounded to the type of the weights."""
        return x.to(DTYPES[self.shape.value_bytes]).float()

    def step(self, tokens: Tensor, chosen: list[Tensor] | None = None) -> Tensor:
        """Feed one token per sequence (int64 [B]); returns logits fp32 [B, vocab].

        ``chosen``: per layer the blocks to attend to, boolean [B, H, blocks]; without it the best are taken.
        """
        s, w = self.shape, self.weights
        position = self.history[0][0].shape[2]
        cos, sin = rope_table(s, position + 1, tokens.device)
        x = w.embed[tokens].float()
        delta: Tensor | None = None
        forecasts: dict[int, Tensor] = {}
        for layer, lw in enumerate(w.layers):
            x, h = self._norm(x, delta, lw.norm)
            queries = projections(self.config, layer, s.layers)
            fused = self._stored(h @ w.projection(layer, queries, self.config.lookahead).float().T)
            heads = fused.view(len(tokens), -1, s.head_dim)
            q, k, v, *extra = heads.split([s.heads, s.kv_heads, s.kv_heads] + [s.kv_heads] * len(queries), 1)
            named = {n: self._rope(e, cos, sin) for n, e in zip(queries, extra, strict=True)}
            q, k = self._rope(q, cos, sin), self._rope(k, cos, sin)
            for name in ("forecast", "proxy"):
                if name in named:
                    forecasts[layer + self.config.lookahead] = named[name]
            if self.basis is not None and layer in forecasts:
                scores, per_block = self._partial_scores(layer, forecasts[layer]), self.spec.block
            else:
                scores = self._scores(self._compressed(layer), q, forecasts.get(layer, named.get("current")))
                per_block = self.spec.keys_per_block
            old_k, old_v = self.history[layer]
            self.history[layer] = (torch.cat([old_k, k[:, :, None]], 2), torch.cat([old_v, v[:, :, None]], 2))
            given = chosen[layer] if chosen else None
            out = self._attend(layer, q, self._choose(scores, position, given, per_block))
            delta = self._stored(out @ lw.output.float().T)
            x, h = self._norm(x, delta, lw.ffn_norm)
            gate, up = self._stored(h @ lw.gate_up.float().T).chunk(2, -1)
            delta = self._stored(self._stored(torch.nn.functional.silu(gate) * up) @ lw.down.float().T)
        x, h = self._norm(x, delta, w.final_norm)
        return h @ w.head.float().T

    def _norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        x = x if delta is None else self._stored(x + delta)
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.shape.norm_eps)
        return x, self._stored(scaled * weight.float())

    def _rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        c, s = cos[-1], sin[-1]
        return self._stored(torch.cat([a * c - b * s, b * c + a * s], -1))

    def _compressed(self, layer: int) -> Tensor:
        """Means over the windows complete before this token, [B, H, C, head_dim]."""
        k = self.history[layer][0]
        return self._stored(k.unfold(2, self.spec.kernel, self.spec.stride).mean(-1))

    def _scores(self, keys: Tensor, q: Tensor, selection: Tensor | None) -> Tensor:
        """[B, H, C]: selection query times key, or the group's softmax probabilities summed."""
        if selection is not None:
            return torch.einsum("bhd,bhcd->bhc", selection, keys)
        s = self.shape
        grouped = q.view(len(q), s.kv_heads, s.group, s.head_dim)
        logits: Tensor = torch.einsum("bhgd,bhcd->bhgc", grouped, keys) * s.head_dim**-0.5
        return logits.softmax(-1).sum(2)

    def _partial_scores(self, layer: int, guess: Tensor) -> Tensor:
        """[B, H, T]: the guessed query times every earlier token's key, both along the directions kept."""
        assert self.basis is not None
        basis = self.basis[layer - 1]
        keys = self._stored(along(self.history[layer][0], basis))
        return torch.einsum("bhr,bhtr->bht", self._stored(along(guess, basis)), keys)

    def _choose(self, scores: Tensor, position: int, given: Tensor | None, per: int) -> Tensor:
        """Boolean [B, H, blocks]: forced blocks and the best others, max-pooled over all that touches a block.

        ``per``: scores that begin in one block. The last before a block counts for it too.
        """
        spec, blocks = self.spec, position // self.spec.block + 1
        count = scores.shape[-1]
        pooled = torch.full((*scores.shape[:2], blocks), -torch.inf, device=scores.device)
        for m in range(blocks):
            low, high = max(0, per * m - 1), min(count, per * m + per)
            if low < high:
                pooled[..., m] = scores[..., low:high].amax(-1)
        pooled[..., : spec.init_blocks] = torch.inf
        pooled[..., max(0, blocks - 1 - spec.local_blocks) :] = torch.inf
        count = min(self.config.top_k, blocks)
        best = pooled.topk(count).indices
        if given is None:
            return torch.zeros_like(pooled, dtype=torch.bool).scatter_(-1, best, True)
        assert bool((given.sum(-1) == count).all()), "not as many blocks chosen as top-k asks for"
        worst_in = pooled.masked_fill(~given, torch.inf).amin(-1)
        best_out = pooled.masked_fill(given, -torch.inf).amax(-1)
        lost = (best_out - worst_in).clamp(min=0.0) / scores.std(-1)
        self.overlooked = max(self.overlooked, float(lost.max()))
        return given

    def _attend(self, layer: int, q: Tensor, chosen: Tensor) -> Tensor:
        s = self.shape
        k, v = self.history[layer]
        seen = chosen.repeat_interleave(self.spec.block, -1)[..., : k.shape[2]]
        grouped = q.view(len(q), s.kv_heads, s.group, s.head_dim)
        logits = torch.einsum("bhgd,bhtd->bhgt", grouped, k) * s.head_dim**-0.5
        logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
        return self._stored(torch.einsum("bhgt,bhtd->bhgd", logits.softmax(-1), v)).flatten(1)


def chosen_blocks(tiers: Tiers, chosen_slots: Tensor, chosen_count: Tensor) -> list[Tensor]:
    """What the engine chose in its last step, as the reference takes it: per layer boolean [B, H, blocks]."""
    position = int(tiers.positions[0]) - 1
    found = []
    for tier, slots, count in zip(tiers.layers, chosen_slots.long(), chosen_count, strict=True):
        blocks = tier.block_of_slot.long().gather(-1, slots)
        valid = torch.arange(slots.shape[-1], device=slots.device) < count[..., None]
        size = (*slots.shape[:2], tiers.blocks + 1)
        mask = torch.zeros(size, dtype=torch.bool, device=slots.device)
        mask.scatter_(-1, torch.where(valid, blocks, tiers.blocks), True)
        found.append(mask[..., : position // tiers.spec.block + 1])
    return found


def history_of(tiers: Tiers) -> list[tuple[Tensor, Tensor]]:
    """The seeded history of every layer, read back from the host pool or the resident caches."""
    found = []
    for tier in tiers.layers:
        if tier.pool_base < 0:
            blocks = tier.cache
        else:
            rows = tiers.pool[tier.pool_base : tier.pool_base + tiers.heads * tiers.blocks]
            blocks = rows.view(*tier.cache.shape[:2], tiers.blocks, *tier.cache.shape[3:]).to(tiers.device)
        k, v = blocks.float().unbind(3)
        tokens = tiers.workload.context_tokens
        found.append((k.flatten(2, 3)[:, :, :tokens], v.flatten(2, 3)[:, :, :tokens]))
    return found
