"""InfiniGen (arXiv 2406.19707): the next layer's queries are guessed from this layer's input, scored against partial
keys, and the host gathers what is missing.

The guess of layer l + 1 is its query projection, meaned over each group, applied to the normed input of layer l. A
partial key is a token's key along its few most important directions; those of all tokens stay on the GPU.
"""

from __future__ import annotations

from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.plan import MAIN, PREFETCH, SELECT, Plan
from sparda.engine.policies.base import Policy, first_layer
from sparda.engine.policies.common import StepBuilder
from sparda.engine.shapes import ModelShape, SparseSpec


def plan(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config) -> Plan:
    """Layer l's guess chooses for layer l + 1; the host gathers and uploads while the GPU goes on.

    A layer's guess and choice come before the host turns to what that layer itself lacks: while the host gathers
    for layer l + 1, the GPU has the rest of layer l and the beginning of layer l + 1 to do.

    Raises SpardaError for a lookahead other than 1 and for a transfer path that the method has not.
    """
    if config.lookahead != 1:
        raise SpardaError(
            f"config.lookahead is {config.lookahead}; infinigen guesses the queries of the next layer and no other: "
            "give a lookahead of 1, or another policy."
        )
    if config.transfer not in ("uva", "gather"):
        raise SpardaError(
            f"config.transfer is {config.transfer!r}; infinigen has the host gather what is missing: leave it out, "
            "give 'gather', or choose another policy."
        )
    step = StepBuilder(shape, spec, workload, config)
    step.prologue()
    reported: dict[int, int] = {}
    for layer in range(shape.layers):
        following = layer + 1
        appended = step.project(layer, queries=len(queries(config, layer, shape.layers)))
        if following < shape.layers:
            reported[following] = _guess(step, following)
        if layer == 0:
            ready = step.choose("headscore", layer, (MAIN, MAIN), appended)
        else:
            ready = step.fetch(layer, PREFETCH, reported[layer])
        step.attend(layer, [ready])
    step.ops.add("partial_keys", step.sizes.partial_keys(shape.layers - 1), stream=PREFETCH, after=[appended])
    return step.epilogue(shape.layers - 1)


def _guess(step: StepBuilder, layer: int) -> int:
    """Score and choose the blocks of ``layer``, and tell the host which are missing; the report's index."""
    step.ops.add("partial_query", step.sizes.partial_query(), layer=layer)
    scored = step.ops.add("partial_score", step.sizes.partial_score(), layer=layer)
    chosen = step.ops.add("select", step.sizes.select(), layer=layer, stream=SELECT, after=[scored])
    return step.report(layer, SELECT, chosen)


def queries(config: Config, layer: int, layers: int) -> tuple[str, ...]:
    """A guess in every layer that has a next one."""
    return ("proxy",) if layer + 1 < layers else ()


POLICIES = (
    Policy(
        "infinigen",
        "the next layer's queries guessed and scored against partial keys, gathered by the host",
        plan,
        first_layer,
        queries,
        ("partial",),
    ),
)
