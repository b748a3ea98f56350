"""NOSA's eviction head: the newest token's bias, and the choice of a query joined with the biases."""

from __future__ import annotations

from collections.abc import Mapping

from sparda.engine.errors import SpardaError
from sparda.engine.lanes import Binding
from sparda.engine.plan import Op
from sparda.engine.policies.nosa import by_query
from sparda.engine.prefill import Prefilled
from sparda.engine.run import Run, layer_of
from sparda.kernels.eviction import bias_reference, eviction_bias, shortlist

KINDS = ("bias", "shortlist")


def bind(run: Run) -> Mapping[str, Binding]:
    """Bindings over the tiers' biases, which a prompt that is admitted brings along.

    Raises SpardaError where a layer has no eviction head.
    """
    t, spec = run.tiers, run.plan.spec
    heads = [w.eviction for w in run.weights.layers]
    if None in heads:
        raise SpardaError(
            f"layer {heads.index(None)} of {run.plan.shape.name} has no eviction head; load a checkpoint that has one, "
            "or choose another policy than nosa."
        )

    def bias(op: Op) -> None:
        layer = layer_of(op)
        tier, head = t.layers[layer], heads[layer]
        assert head is not None
        eviction_bias(
            tier.cache,
            tier.slot_of_block,
            t.positions,
            *head,
            t.bias[layer],
            t.bias_keys[layer],
            kernel=spec.kernel,
            stride=spec.stride,
        )

    def join(op: Op) -> None:
        layer = layer_of(op)
        scores = run.scores[layer, 0]
        shortlist(
            scores,
            t.bias_keys[layer],
            t.positions,
            scores,
            count=by_query(run.plan.config, spec),
            init_blocks=spec.init_blocks,
            local_blocks=spec.local_blocks,
            block=spec.block,
            kernel=spec.kernel,
            stride=spec.stride,
        )

    def fill(sequence: int, prefilled: Prefilled) -> None:
        windows = spec.compressed(prefilled.tokens)
        for layer, head in enumerate(heads):
            assert head is not None
            known = bias_reference(prefilled.values[layer][None], *head)[0]
            t.bias[layer, sequence, :, : prefilled.tokens] = known
            if windows:
                means = known.unfold(1, spec.kernel, spec.stride).mean(-1)
                t.bias_keys[layer, sequence, :, :windows] = means

    t.side.append(fill)
    return {"bias": bias, "shortlist": join}
