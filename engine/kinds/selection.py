"""Scoring blocks and choosing among them."""

from __future__ import annotations

from collections.abc import Mapping

from sparda.engine.lanes import Binding
from sparda.engine.plan import Op
from sparda.engine.run import Run, layer_of
from sparda.kernels.headscore import head_scores, headscore_chunks
from sparda.kernels.score import forecast_scores
from sparda.kernels.select import select_blocks

KINDS = ("score", "headscore", "select")


def bind(run: Run) -> Mapping[str, Binding]:
    """Bindings, with scratch for the statistics of the heads."""
    s, t, spec, batch = run.plan.shape, run.tiers, run.plan.spec, run.plan.workload.batch
    head_stats = run.floats(batch, s.kv_heads, headscore_chunks(int(t.keys.shape[3])), s.group, 2)

    def score(op: Op) -> None:
        layer = layer_of(op)
        forecast_scores(
            run.selection_query(layer),
            t.layers[layer].keys,
            t.positions,
            run.scores[layer, 0],
            block=spec.block,
            kernel=spec.kernel,
            stride=spec.stride,
        )

    def headscore(op: Op) -> None:
        layer = layer_of(op)
        head_scores(
            run.queries[layer][:, : s.heads],
            t.layers[layer].keys,
            t.positions,
            run.scores[layer, 0],
            head_stats,
            block=spec.block,
            kernel=spec.kernel,
            stride=spec.stride,
        )

    def select(op: Op) -> None:
        layer = layer_of(op)
        tier = t.layers[layer]
        select_blocks(
            run.trace.scores if run.trace else run.scores_for(layer),
            t.step,
            t.positions,
            tier.block_of_slot,
            tier.stamp,
            tier.slot_of_block,
            run.chosen_slots[layer],
            run.chosen_count[layer],
            run.miss_src[layer],
            run.miss_dst[layer],
            t.miss_count[layer : layer + 1],
            tier.victims,
            phase=run.trace.phase(run.scorer_of(layer)) if run.trace else 0,
            top_k=run.plan.config.top_k,
            init_blocks=spec.init_blocks,
            local_blocks=spec.local_blocks,
            block=spec.block,
            pool_rows=int(t.pool.shape[0]),
            pool_base=max(0, tier.pool_base),
        )

    return {"score": score, "headscore": headscore, "select": select}
