"""The shallow scorer: one layer's scores for all later ones."""

from __future__ import annotations

from collections.abc import Mapping

from sparda.engine.errors import SpardaError
from sparda.engine.lanes import Binding
from sparda.engine.plan import Op
from sparda.engine.prefill import Prefilled
from sparda.engine.run import Run, layer_of
from sparda.kernels.shallow_score import shallow_scores

KINDS = ("shallow_score",)


def bind(run: Run) -> Mapping[str, Binding]:
    """The binding and its scratch; a sequence that is admitted is scored in its first step, whatever step that is.

    Raises SpardaError where the model has no scorer.
    """
    c, t, spec, scorer = run.plan.config, run.tiers, run.plan.spec, run.weights.scorer
    if scorer is None:
        raise SpardaError(
            f"{run.plan.shape.name} was loaded without a block scorer; give weights that have one, or choose another "
            "policy than shallow."
        )
    batch, width = run.plan.workload.batch, int(scorer.hidden.shape[0])
    row_sums = scorer.hidden.float().sum(1)
    state, base, sums = run.ints(2, batch), run.floats(batch, width), run.floats(batch, 2)

    def score(op: Op) -> None:
        layer = layer_of(op)
        shallow_scores(
            run.h,
            run.queries[layer][:, : run.plan.shape.heads],
            t.layers[layer].keys,
            t.positions,
            scorer.hidden,
            scorer.hidden_bias,
            row_sums,
            scorer.output,
            t.step,
            state,
            base,
            sums,
            run.scores[layer, 0],
            every=c.refresh_steps,
            reserve=c.reserve,
            block=spec.block,
            kernel=spec.kernel,
            stride=spec.stride,
        )

    def admitted(sequence: int, prefilled: Prefilled) -> None:
        state[0, sequence] = 0

    t.side.append(admitted)
    return {"shallow_score": score}
