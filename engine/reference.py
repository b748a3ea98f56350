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
from sparda.engine.policies.nosa import by_query
from sparda.engine.reference_scores import (
    best_blocks,
    forced,
    lost,
    pooled,
    query_scores,
    scorer_scores,
    token_bias,
    windows,
)
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.tiers import Tiers
from sparda.engine.weights import DTYPES, Weights, rope_table
from sparda.kernels.shallow_score import reserve_of


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
    steps: int = 0
    shared: Tensor | None = None
    """``shallow``: block scores for all later layers, [B, blocks], as last taken."""

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
            keys = self._stored(windows(self.history[layer][0], self.spec))
            for name in ("forecast", "proxy"):
                if name in named:
                    forecasts[layer + self.config.lookahead] = named[name]
            selection = forecasts.get(layer, named.get("current"))
            if self.basis is not None and selection is not None:
                # A guess is scored against single tokens, in the directions kept.
                kept = self.basis[layer - 1]
                keys = self._stored(along(self.history[layer][0], kept))
                selection = self._stored(along(selection, kept))
            old_k, old_v = self.history[layer]
            self.history[layer] = (torch.cat([old_k, k[:, :, None]], 2), torch.cat([old_v, v[:, :, None]], 2))
            seen = self._blocks(layer, position, h, q, keys, selection, chosen[layer] if chosen else None)
            out = self._attend(layer, q, seen)
            delta = self._stored(out @ lw.output.float().T)
            x, h = self._norm(x, delta, lw.ffn_norm)
            gate, up = self._stored(h @ lw.gate_up.float().T).chunk(2, -1)
            delta = self._stored(self._stored(torch.nn.functional.silu(gate) * up) @ lw.down.float().T)
        self.steps += 1
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

    def _blocks(
        self, layer: int, position: int, h: Tensor, q: Tensor, keys: Tensor, selection: Tensor | None,
        given: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Boolean [B, H, blocks]: what a layer attends to; all blocks where it chooses none."""
        spec, s, config = self.spec, self.shape, self.config
        blocks = position // spec.block + 1
        if config.policy == "dense" or (config.policy == "shallow" and layer <= config.score_layer):
            if layer == config.score_layer and config.policy == "shallow":
                self._share(h, q, keys, blocks)
            return torch.ones(len(q), s.kv_heads, blocks, dtype=torch.bool, device=q.device)
        if config.policy == "shallow":
            return self._choose(forced(self._shared(blocks), spec), given)
        guessed = self.basis is not None and selection is not None
        per_block = spec.block if guessed else spec.keys_per_block
        scores = pooled(query_scores(keys, q, selection, s), blocks, per_block)
        if config.policy == "nosa":
            return self._choose_both(scores, layer, position, given)
        return self._choose(forced(scores, spec), given)

    def _choose(self, scores: Tensor, given: Tensor | None) -> Tensor:
        """The best top_k blocks; or ``given``, once it is noted how far from the best it is."""
        count = min(self.config.top_k, scores.shape[-1])
        if given is None:
            return best_blocks(scores, count)
        assert bool((given.sum(-1) == count).all()), "not as many blocks chosen as top-k asks for"
        self.overlooked = max(self.overlooked, lost(scores, given))
        return given

    def _choose_both(self, scores: Tensor, layer: int, position: int, given: Tensor | None) -> Tensor:
        """NOSA: the best ``by_query`` blocks of the query's scores, the others by the biases of earlier tokens."""
        spec, blocks = self.spec, scores.shape[-1]
        bias = self._bias(layer)
        assert bias is not None
        by_bias = pooled(windows(bias[..., :position], spec), blocks, spec.keys_per_block)
        query = forced(scores, spec)
        count = min(by_query(self.config, spec), blocks)
        if given is None:
            named = best_blocks(query, count)
        else:
            # Of what was given the query must have named the best by its own scores.
            named = best_blocks(query.masked_fill(~given, -torch.inf), count)
            self.overlooked = max(self.overlooked, lost(query, named) if bool((named != given).any()) else 0.0)
        return self._choose(forced(by_bias, spec).masked_fill(named, torch.inf), given)

    def _share(self, h: Tensor, q: Tensor, keys: Tensor, blocks: int) -> None:
        """Score the blocks for all later layers, in the steps that are due."""
        every, scorer = self.config.refresh_steps, self.weights.scorer
        assert scorer is not None
        if self.steps == 0 or (every and self.steps % every == 0):
            self.shared = scorer_scores(scorer, h, q, keys, blocks, self.shape, self.spec)

    def _shared(self, blocks: int) -> Tensor:
        """[B, H, blocks]: the shared scores; nothing is known of blocks that began after they were taken."""
        assert self.shared is not None
        batch, known = self.shared.shape
        unknown = self.shared.new_full((batch, blocks - known), -torch.inf)
        kept = reserve_of(batch, blocks, self.config.reserve).to(unknown.device)
        scores = torch.cat([self.shared, unknown], -1).masked_fill(kept, torch.inf)
        return scores[:, None].expand(-1, self.shape.kv_heads, -1)

    def _bias(self, layer: int) -> Tensor | None:
        """[B, H, T]: what NOSA adds to the logits of every token."""
        eviction = self.weights.layers[layer].eviction
        if self.config.policy != "nosa":
            return None
        assert eviction is not None
        return token_bias(self.history[layer][1], eviction)

    def _attend(self, layer: int, q: Tensor, chosen: Tensor) -> Tensor:
        s = self.shape
        k, v = self.history[layer]
        seen = chosen.repeat_interleave(self.spec.block, -1)[..., : k.shape[2]]
        grouped = q.view(len(q), s.kv_heads, s.group, s.head_dim)
        logits = torch.einsum("bhgd,bhtd->bhgt", grouped, k) * s.head_dim**-0.5
        bias = self._bias(layer)
        logits = logits if bias is None else logits + bias[:, :, None]
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
