"""Attention over chosen blocks, through the block table, with and without biases, and over all blocks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sparda.engine.lanes import Binding
from sparda.engine.occupancy import attention_splits
from sparda.engine.plan import Op
from sparda.engine.run import Run, layer_of
from sparda.kernels.attention import biased_attention, block_attention, dense_attention

KINDS = ("attention", "biased_attention", "dense_attention")


def bind(run: Run) -> Mapping[str, Binding]:
    """Bindings with scratch for every kind of attention."""
    s, t, batch = run.plan.shape, run.tiers, run.plan.workload.batch
    chosen_splits = attention_splits(t.heads, run.plan.config.top_k, run.sms)
    dense_splits = attention_splits(t.heads, t.blocks, run.sms)
    most = max(chosen_splits, dense_splits)
    partial, stats = (
        run.floats(batch, s.kv_heads, most, s.group, s.head_dim),
        run.floats(batch, s.kv_heads, most, s.group, 2),
    )

    def scratch(splits: int) -> tuple[Tensor, Tensor]:
        size = batch * s.kv_heads * splits * s.group
        return (
            partial.view(-1)[: size * s.head_dim].view(batch, s.kv_heads, splits, s.group, s.head_dim),
            stats.view(-1)[: size * 2].view(batch, s.kv_heads, splits, s.group, 2),
        )

    def attention(op: Op) -> None:
        layer = layer_of(op)
        block_attention(
            run.queries[layer][:, : s.heads],
            t.layers[layer].cache,
            run.chosen_slots[layer],
            run.chosen_count[layer],
            t.positions,
            run.attended,
            *scratch(chosen_splits),
            splits=chosen_splits,
        )

    def biased(op: Op) -> None:
        layer = layer_of(op)
        biased_attention(
            run.queries[layer][:, : s.heads],
            t.layers[layer].cache,
            run.chosen_slots[layer],
            run.chosen_count[layer],
            t.positions,
            t.layers[layer].block_of_slot,
            t.bias[layer],
            run.attended,
            *scratch(chosen_splits),
            splits=chosen_splits,
        )

    def dense(op: Op) -> None:
        layer = layer_of(op)
        dense_attention(
            run.queries[layer][:, : s.heads],
            t.layers[layer].cache,
            t.positions,
            run.attended,
            *scratch(dense_splits),
            splits=dense_splits,
        )

    return {"attention": attention, "biased_attention": biased, "dense_attention": dense}
