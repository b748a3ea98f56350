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

    By way of the host, whose issuing stands still while it waits for a report, the plan's order is another. In a layer
    the host issues the projection, the score and the choice for ``lookahead`` layers on, and only then turns to what
    the layer before had reported; after that it issues the attention and all up to the next score. That report is
    there as soon as the main stream comes to the attention of the layer before, and all that the main stream can do
    from there until it needs an attention's blocks is in its queue. To turn to a report at once, before the rest of
    the layer that made it is issued, would leave the main stream idle until the host is done; to turn to it later
    would start the copies later.
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
    late = step.by_host and fetch != MAIN
    ready: dict[int, list[int]] = {}
    reported: dict[int, int] = {}
    step.prologue()
    for layer in range(shape.layers):
        target = layer + ahead
        own = layer < ahead
        appended = step.project(layer, queries=int(target < shape.layers) + int(own))
        fetched: list[int] = []
        if target < shape.layers:
            chosen = step.choose("score", target, choose, appended)
            if target < resident:
                ready[target] = [chosen]
            else:
                reported[target] = step.report(target, choose[1], chosen)
        if not late and target in reported:
            ready[target] = fetched = [step.fetch(target, fetch, reported[target])]
        if own:
            ready[layer] = [step.choose("score", layer, (MAIN, MAIN), appended)]
        if late and target - 1 in reported:
            ready[target - 1] = [step.fetch(target - 1, fetch, reported[target - 1])]
        # A main stream that fetches by itself goes on when that is done, whichever stream carries the copies.
        step.attend(layer, [*ready[layer], *(fetched if fetch == MAIN else ())])
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
