"""Scoring blocks by partial keys, and keeping these up to date (InfiniGen)."""

from __future__ import annotations

from collections.abc import Mapping

from sparda.engine.lanes import Binding
from sparda.engine.plan import Op
from sparda.engine.run import Run, layer_of
from sparda.kernels.partial import append_partial, project_query
from sparda.kernels.score import forecast_scores

KINDS = ("partial_query", "partial_score", "partial_keys")


def bind(run: Run) -> Mapping[str, Binding]:
    """Bindings, with the projected query that passes from the first to the second."""
    s, t, spec, batch = run.plan.shape, run.tiers, run.plan.spec, run.plan.workload.batch
    partial = t.partial
    assert partial is not None, f"policy {run.plan.config.policy} keeps no partial keys"
    query = run.values(batch, s.kv_heads, s.partial_dims)

    def project(op: Op) -> None:
        layer = layer_of(op)
        project_query(run.selection_query(layer), partial.basis[layer - t.whole], query)

    def score(op: Op) -> None:
        # A token is a window of one: a block's score is the largest of its tokens' and the token's before it.
        layer = layer_of(op)
        forecast_scores(
            query,
            partial.rows[layer - t.whole],
            t.positions,
            run.scores[layer, 0],
            block=spec.block,
            kernel=1,
            stride=1,
        )

    def append(op: Op) -> None:
        append_partial(t.slot_cache, t.slot_of_block[t.whole :], t.positions, partial.basis, partial.rows)

    return {"partial_query": project, "partial_score": score, "partial_keys": append}
