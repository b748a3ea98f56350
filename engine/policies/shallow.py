"""Shallow selection: a small scorer in one early layer picks the blocks once for every later layer and KV head.

Layers 0 to ``score_layer`` attend densely and stay on the GPU; the later ones keep their KV in host memory. The choice
stands for ``refresh_steps`` steps; meanwhile only the forced blocks move on, so a steady step fetches little.
"""

from __future__ import annotations

from sparda.engine.config import Config, Workload
from sparda.engine.plan import PREFETCH, SELECT, Plan
from sparda.engine.policies.base import Policy
from sparda.engine.policies.common import StepBuilder
from sparda.engine.shapes import ModelShape, SparseSpec


def plan(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config) -> Plan:
    """All later layers choose and fetch from the moment the scores are there, on streams of their own.

    Every layer has residents of its own, so each has a ``select``, which reads the shared scores. The score itself runs
    on the main stream, where its inputs are; most steps it has nothing to do.

    By way of the host every layer is reported at once too, but the host turns to a layer only when all that comes
    before its attention has been issued: to start every layer's copies first would leave the main stream with nothing
    to do after the dense layers. It need not wait for the GPU, so it is ahead of it by as many layers as it can be.
    """
    step = StepBuilder(shape, spec, workload, config)
    chosen: dict[int, int] = {}
    step.prologue()
    for layer in range(shape.layers):
        appended = step.project(layer, queries=0)
        if layer in chosen:
            ready = step.fetch(layer, PREFETCH, chosen[layer]) if step.by_host else chosen[layer]
            step.attend(layer, [ready])
            continue
        if layer == config.score_layer:
            chosen = _choose_for_all(step, layer, appended)
        step.attend_densely(layer)
    return step.epilogue(shape.layers - dense_layers(config, shape.layers))


def _choose_for_all(step: StepBuilder, layer: int, appended: int) -> dict[int, int]:
    """The scores of ``layer``, then choice and copy of each later layer: the index of each layer's copy.

    By way of the host no copies yet: the index of each layer's report.
    """
    sizes, add = step.sizes, step.ops.add
    scored = add("shallow_score", sizes.shallow_score(), layer=layer, after=[appended])
    done = {}
    for later in range(layer + 1, step.shape.layers):
        chosen = add("select", sizes.select(), layer=later, stream=SELECT, after=[scored])
        reported = step.report(later, SELECT, chosen)
        done[later] = reported if step.by_host else step.fetch(later, PREFETCH, reported)
    return done


def dense_layers(config: Config, layers: int) -> int:
    """Those up to the one that scores."""
    return min(config.score_layer + 1, layers)


POLICIES = (
    Policy("shallow", "one early layer chooses for all later ones, a side stream prefetches", plan, dense_layers),
)
