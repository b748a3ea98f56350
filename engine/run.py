"""What the operations of a running step share: the plan, weights, KV tiers and the buffers between operations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sparda.engine.plan import Op, Plan
from sparda.engine.policies import projections
from sparda.engine.tiers import Tiers
from sparda.engine.trace import SelectionTrace
from sparda.engine.weights import DTYPES, Weights, rope_table
from sparda.kernels.launch import multiprocessors


@dataclass(frozen=True, slots=True)
class Reports:
    """What the host is told of the misses, layer by layer, in its own memory; pinned where there is a GPU.

    ``src``, ``dst``: int32, rows of the pool and of the layer's slots, as ``Run.miss_src`` and ``miss_dst``; no ``dst``
    where a kernel spreads the blocks. ``counts`` int32 [L]: entries that count.
    """

    src: list[Tensor]
    dst: list[Tensor]
    counts: Tensor


@dataclass
class Run:
    """One batch under one plan. Buffers that one kind of operation alone uses belong to its binder, not here.

    ``tokens`` int64 [B]: what each sequence feeds next. ``x``, ``h`` [B, d_model]: the residual stream and its
    norm. ``queries[l]`` [B, heads + selection heads, head_dim]: rotated.
    ``scores`` fp32 [L, 1, B, H, M]; ``chosen_slots`` int32 [L, B, H, top_k]; ``chosen_count`` int32 [L, B, H].
    """

    plan: Plan
    weights: Weights
    tiers: Tiers
    trace: SelectionTrace | None

    def __post_init__(self) -> None:
        plan, t = self.plan, self.tiers
        s, batch, layers = plan.shape, plan.workload.batch, plan.shape.layers
        self.device, self.dtype = t.device, DTYPES[s.value_bytes]
        self.query_names = [projections(plan.config, layer, layers) for layer in range(layers)]
        self.projections = [
            self.weights.projection(i, n, plan.config.lookahead) for i, n in enumerate(self.query_names)
        ]
        self.cos, self.sin = rope_table(s, t.blocks * plan.spec.block + 1, self.device)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.x, self.h = self.values(batch, s.d_model), self.values(batch, s.d_model)
        # One buffer a layer: a layer's selection queries are still being scored when the next layer writes its own.
        self.queries = [self.values(batch, s.heads + len(n) * s.kv_heads, s.head_dim) for n in self.query_names]
        self.attended = self.values(batch, s.heads, s.head_dim)
        self.logits = self.values(batch, s.vocab)
        self.scores = self.floats(layers, 1, batch, s.kv_heads, t.blocks)
        top_k = plan.config.top_k
        self.chosen_slots = self.ints(layers, batch, s.kv_heads, top_k)
        self.chosen_count = self.ints(layers, batch, s.kv_heads)
        self.miss_src = [self.ints(t.heads * tier.slots) for tier in t.layers]
        self.miss_dst = [self.ints(t.heads * tier.slots) for tier in t.layers]

    @property
    def sms(self) -> int:
        return multiprocessors(self.x)

    def values(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def ints(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self.device)

    def floats(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.float32, device=self.device)

    @cached_property
    def reports(self) -> Reports:
        """Made when first asked for: most plans tell the host nothing."""
        pinned = self.device.type == "cuda"

        def like(miss: Tensor) -> Tensor:
            return torch.zeros(miss.shape, dtype=torch.int32, pin_memory=pinned)

        copied = self.miss_dst if self.plan.of_kind("enlist") else []
        return Reports(list(map(like, self.miss_src)), list(map(like, copied)), like(self.tiers.miss_count))

    def selection_query(self, layer: int) -> Tensor:
        """[B, H, head_dim]: the query that chooses the blocks of ``layer``, from the layer that made it."""
        kv, ahead = self.plan.shape.kv_heads, self.plan.config.lookahead
        forecasts = [n for n in ("forecast", "proxy") if layer >= ahead and n in self.query_names[layer - ahead]]
        source, name = (layer - ahead, forecasts[0]) if forecasts else (layer, "current")
        first = self.plan.shape.heads + self.query_names[source].index(name) * kv
        return self.queries[source][:, first : first + kv]

    def scores_for(self, layer: int) -> Tensor:
        """fp32 [1, B, H, M]: the scores that choose the blocks of ``layer``, its own or those it shares."""
        return self.scores[self.scorer_of(layer)]

    def scorer_of(self, layer: int) -> int:
        """The layer whose scores choose the blocks of ``layer``: the only one that scores, or the layer itself."""
        shared = self.plan.of_kind("shallow_score")
        return layer_of(shared[0]) if shared else layer


def layer_of(op: Op) -> int:
    """The layer of an operation that has one."""
    assert op.layer is not None, f"{op.kind} belongs to no layer"
    return op.layer
