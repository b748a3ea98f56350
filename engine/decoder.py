"""Runs a plan for real: binds each kind of operation to its kernel and captures the whole step in one CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparda.engine.graph import captured
from sparda.engine.lanes import Binding, CudaLanes, Lanes, SerialLanes, issue
from sparda.engine.plan import Op, Plan
from sparda.engine.policies import projections
from sparda.engine.tiers import Tiers
from sparda.engine.trace import SelectionTrace
from sparda.engine.weights import DTYPE, Weights, rope_table
from sparda.kernels.advance import advance
from sparda.kernels.append import append_token
from sparda.kernels.attention import attention_splits, block_attention
from sparda.kernels.headscore import head_scores, headscore_chunks
from sparda.kernels.norm import add_norm, embed_tokens, silu_mul
from sparda.kernels.prefetch import prefetch
from sparda.kernels.score import forecast_scores
from sparda.kernels.select import select_blocks
from sparda.kernels.writeback import write_newest


class Decoder:
    """One batch that decodes greedily under one plan.

    ``tokens`` int64 [B] holds the token each sequence feeds next; a step reads it and leaves the sampled one there.
    Selection reads the model's own scores, or ``trace`` in their place.
    """

    def __init__(self, plan: Plan, weights: Weights, tiers: Tiers, trace: SelectionTrace | None = None) -> None:
        self.plan, self.weights, self.tiers, self.trace = plan, weights, tiers, trace
        self.device = tiers.device
        self.graph: torch.cuda.CUDAGraph | None = None
        shape, batch, top_k = plan.shape, plan.workload.batch, plan.config.top_k
        self._queries = [projections(plan.config, layer, shape.layers) for layer in range(shape.layers)]
        self._fused = [w.projection(shape, q) for w, q in zip(weights.layers, self._queries, strict=True)]
        self.cos, self.sin = rope_table(shape, tiers.blocks * plan.spec.block + 1, self.device)
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count if self.device.type == "cuda" else 4
        self.splits = attention_splits(tiers.heads, top_k, sms)
        self._allocate(batch, top_k)
        self.bindings: Mapping[str, Binding] = self._bind()

    def _allocate(self, batch: int, top_k: int) -> None:
        s, t, device = self.plan.shape, self.tiers, self.device

        def values(*size: int) -> Tensor:
            return torch.zeros(size, dtype=DTYPE, device=device)

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        def floats(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float32, device=device)

        kv, layers = s.kv_heads, s.layers
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.x, self.delta, self.h = values(batch, s.d_model), values(batch, s.d_model), values(batch, s.d_model)
        self.fused = [values(batch, w.shape[0]) for w in self._fused]
        # One buffer a layer: a layer's selection queries are still being scored when the next layer writes its own.
        self.queries = [values(batch, s.heads + len(q) * kv, s.head_dim) for q in self._queries]
        self.attended = values(batch, s.heads, s.head_dim)
        self.gate_up, self.act = values(batch, 2 * s.ffn), values(batch, s.ffn)
        self.logits = values(batch, s.vocab)
        self.scores = floats(layers, 1, batch, kv, t.blocks)
        self.chosen_slots, self.chosen_count = ints(layers, batch, kv, top_k), ints(layers, batch, kv)
        self.miss_src = [ints(t.heads * tier.slots) for tier in t.layers]
        self.miss_dst = [ints(t.heads * tier.slots) for tier in t.layers]
        self.partial = floats(batch, kv, self.splits, s.group, s.head_dim)
        self.stats = floats(batch, kv, self.splits, s.group, 2)
        if self.plan.of_kind("headscore"):
            chunks = headscore_chunks(int(t.keys.shape[3]))
            self.head_stats = floats(batch, kv, chunks, s.group, 2)

    def _bind(self) -> dict[str, Binding]:
        w = self.weights
        return {
            "embed": lambda op: embed_tokens(w.embed, self.tokens, self.x),
            "norm": self._norm,
            "qkv": lambda op: _linear(self.h, self._fused[_layer(op)], self.fused[_layer(op)]),
            "append": self._append,
            "score": self._score,
            "headscore": self._headscore,
            "select": self._select,
            "prefetch": self._prefetch,
            "attention": self._attention,
            "oproj": lambda op: _linear(self.attended.flatten(1), w.layers[_layer(op)].output, self.delta),
            "ffn_norm": lambda op: self._add_norm(self.delta, w.layers[_layer(op)].ffn_norm),
            "gateup": lambda op: _linear(self.h, w.layers[_layer(op)].gate_up, self.gate_up),
            "silu": lambda op: silu_mul(self.gate_up, self.act),
            "down": lambda op: _linear(self.act, w.layers[_layer(op)].down, self.delta),
            "final_norm": lambda op: self._add_norm(self.delta, w.final_norm),
            "lm_head": lambda op: _linear(self.h, w.head, self.logits),
            "sample": self._sample,
            "writeback": self._writeback,
        }

    def _add_norm(self, delta: Tensor | None, weight: Tensor) -> None:
        add_norm(self.x, delta, weight, self.h, eps=self.plan.shape.norm_eps)

    def _norm(self, op: Op) -> None:
        layer = _layer(op)
        self._add_norm(self.delta if layer else None, self.weights.layers[layer].norm)

    def _append(self, op: Op) -> None:
        layer, s, spec = _layer(op), self.plan.shape, self.plan.spec
        tier = self.tiers.layers[layer]
        append_token(
            self.fused[layer],
            self.cos,
            self.sin,
            self.tiers.positions,
            tier.slot_of_block,
            tier.cache,
            tier.keys,
            self.queries[layer],
            heads=s.heads,
            kv_heads=s.kv_heads,
            kernel=spec.kernel,
            stride=spec.stride,
        )

    def _score(self, op: Op) -> None:
        """Score layer ``op.layer``: with the Forecast of the layer ``lookahead`` back, or with its own query."""
        layer, s, spec = _layer(op), self.plan.shape, self.plan.spec
        ahead = self.plan.config.lookahead
        source, name = (layer - ahead, "forecast") if layer >= ahead else (layer, "current")
        first = s.heads + self._queries[source].index(name) * s.kv_heads
        forecast_scores(
            self.queries[source][:, first : first + s.kv_heads],
            self.tiers.layers[layer].keys,
            self.tiers.positions,
            self.scores[layer, 0],
            block=spec.block,
            kernel=spec.kernel,
            stride=spec.stride,
        )

    def _headscore(self, op: Op) -> None:
        layer, s, spec = _layer(op), self.plan.shape, self.plan.spec
        head_scores(
            self.queries[layer][:, : s.heads],
            self.tiers.layers[layer].keys,
            self.tiers.positions,
            self.scores[layer, 0],
            self.head_stats,
            block=spec.block,
            kernel=spec.kernel,
            stride=spec.stride,
        )

    def _select(self, op: Op) -> None:
        layer, spec, t = _layer(op), self.plan.spec, self.tiers
        tier = t.layers[layer]
        select_blocks(
            self.trace.scores if self.trace else self.scores[layer],
            t.step,
            t.positions,
            tier.block_of_slot,
            tier.stamp,
            tier.slot_of_block,
            self.chosen_slots[layer],
            self.chosen_count[layer],
            self.miss_src[layer],
            self.miss_dst[layer],
            t.miss_count[layer : layer + 1],
            tier.victims,
            phase=self.trace.phase(layer) if self.trace else 0,
            top_k=self.plan.config.top_k,
            init_blocks=spec.init_blocks,
            local_blocks=spec.local_blocks,
            block=spec.block,
            pool_rows=int(t.pool.shape[0]),
            pool_base=max(0, tier.pool_base),
        )

    def _prefetch(self, op: Op) -> None:
        layer, c, t = _layer(op), self.plan.config, self.tiers
        prefetch(
            t.pool,
            t.layers[layer].rows,
            self.miss_src[layer],
            self.miss_dst[layer],
            t.miss_count[layer : layer + 1],
            ctas=c.prefetch_ctas,
            warps=c.prefetch_warps,
            stages=c.prefetch_stages,
        )

    def _attention(self, op: Op) -> None:
        layer = _layer(op)
        block_attention(
            self.queries[layer][:, : self.plan.shape.heads],
            self.tiers.layers[layer].cache,
            self.chosen_slots[layer],
            self.chosen_count[layer],
            self.tiers.positions,
            self.attended,
            self.partial,
            self.stats,
            splits=self.splits,
        )

    def _sample(self, op: Op) -> None:
        torch.argmax(self.logits, dim=-1, out=self.tokens)
        t = self.tiers
        advance(t.positions, t.step, t.miss_count, t.miss_total)

    def _writeback(self, op: Op) -> None:
        t = self.tiers
        write_newest(t.slot_cache, t.slot_of_block[t.whole :], t.positions, t.pool, block=self.plan.spec.block)

    def issue(self, lanes: Lanes | None = None) -> None:
        """Run one step without a graph, on one stream unless ``lanes`` says otherwise."""
        issue(self.plan, self.bindings, lanes or SerialLanes())

    def capture(self) -> None:
        """Capture the step in one CUDA graph. Runs one step first, which compiles every kernel."""
        self.issue()
        self.graph = captured(lambda: self.issue(CudaLanes()))

    def step(self) -> None:
        """Decode one token per sequence; returns when it is enqueued."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.issue()


def _layer(op: Op) -> int:
    assert op.layer is not None, f"{op.kind} belongs to no layer"
    return op.layer


def _linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.mm(x, weight.t(), out=out)
