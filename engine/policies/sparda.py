"""SparDA (arXiv 2606.04511): the Forecast of layer l chooses the blocks of layer l + lookahead.

Extended here to any lookahead: with lookahead d the first d layers are resident and choose for themselves.
"""

from __future__ import annotations

from sparda.engine.config import Config, Workload
from sparda.engine.plan import MAIN, PREFETCH, SELECT, Plan
from sparda.engine.policies.base import Policy, every_layer
from sparda.engine.policies.common import StepBuilder
from sparda.engine.shapes import ModelShape, SparseSpec


def prefetched(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config) -> Plan:
    """Choice and copy run on streams of their own, ``lookahead`` layers ahead of the attention that needs them.

    The score comes first on the main stream: it reads as many bytes beside the attention as before it, and the copy
    can begin sooner. Choosing has a stream apart from the copies, so that a layer's choice never queues behind the
    copy of an earlier layer: when the link is the bottleneck it then never idles while the next choice is made.
    """
    if config.lookahead == 0:
        return on_demand(shape, spec, workload, config)
    return _step(shape, spec, workload, config, (MAIN, SELECT), PREFETCH, first_layers(config, shape.layers))


def on_demand(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config) -> Plan:
    """The same choice as ``prefetched``, made and fetched by the main stream: the paper's "no prefetch" ablation."""
    return _step(shape, spec, workload, config, (MAIN, MAIN), MAIN, first_layers(config, shape.layers))


def resident(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config) -> Plan:
    """The same choice with the whole KV cache on the GPU: nothing is fetched."""
    streams = (MAIN, SELECT) if config.lookahead else (MAIN, MAIN)
    return _step(shape, spec, workload, config, streams, PREFETCH, shape.layers)


def _step(
    shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config, choose: tuple[str, str], fetch: str,
    resident: int,
) -> Plan:  # fmt: skip
    step = StepBuilder(shape, spec, workload, config)
    ahead = config.lookahead
    ready: dict[int, list[int]] = {}
    step.prologue()
    for layer in range(shape.layers):
        target = layer + ahead
        own = layer < ahead
        appended = step.project(layer, queries=int(target < shape.layers) + int(own))
        if target < shape.layers:
            chosen = step.choose("score", target, choose, appended)
            ready[target] = [step.fetch(target, fetch, chosen) if target >= resident else chosen]
        if own:
            ready[layer] = [step.choose("score", layer, (MAIN, MAIN), appended)]
        step.attend(layer, ready[layer])
    return step.epilogue(shape.layers - resident)


def first_layers(config: Config, layers: int) -> int:
    """The layers that nothing could forecast: with lookahead d the first d, and always layer 0."""
    return max(1, config.lookahead)


def queries(config: Config, layer: int, layers: int) -> tuple[str, ...]:
    """A Forecast where a layer lies ``lookahead`` ahead, a query of its own where no layer lies that far behind."""
    forecast = ("forecast",) if layer + config.lookahead < layers else ()
    current = ("current",) if layer < config.lookahead else ()
    return forecast + current


POLICIES = (
    Policy(
        "sparda",
        "the Forecast of layer l - lookahead chooses, a side stream prefetches",
        prefetched,
        first_layers,
        queries,
    ),
    Policy(
        "sparda-on-demand", "the same choice, fetched by the main stream when needed", on_demand, first_layers, queries
    ),
    Policy("sparda-resident", "the same choice, the whole KV cache on the GPU", resident, every_layer, queries),
)
