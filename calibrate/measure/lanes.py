"""What the streams of selection and copying cost the main stream, in the order in which a step runs them.

Attention needs this order. Beside a copy that was there before it, an attention whose thread blocks just filled the
GPU comes in two waves; in a step it starts together with the selection, and the copy takes the selection's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median

from sparda.calibrate.costs import IN_ORDER, TINY
from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.measure.copies import Lists, Shape, beside_compute, copy_case, rough_gb_s
from sparda.calibrate.measure.parts import Case
from sparda.calibrate.measure.timing import METHOD, replay_us
from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.graph import captured
from sparda.engine.lanes import Binding, CudaLanes, SerialLanes, issue
from sparda.engine.plan import MAIN, PREFETCH, SELECT, Op, Plan, PlanBuilder

CONTEXT = 65536
REPEATS = 9
SHARE = 0.6
"""Length of each copy, as a share of the attention that it runs beside."""

COPY_START_US = 3.0


def lanes_plan(plan: Plan, middle: tuple[str, ...], lanes: bool) -> Plan:
    """Per offloaded layer: score, then the kinds of ``middle``, with or without selection's streams beside them.

    As with a lookahead of one, the first kind of ``middle`` waits for what was chosen a layer ago.
    """
    ops, ready = PlanBuilder(), dict[int, int]()
    of = {kind: {op.layer: op for op in plan.of_kind(kind)} for kind in ("score", "select", "prefetch", *middle)}
    layers = [layer for layer in of["prefetch"] if layer is not None]
    for layer in layers:
        scored = ops.add("score", of["score"][layer].work, layer=layer)
        if lanes:
            chosen = ops.add("select", of["select"][layer].work, layer=layer, stream=SELECT, after=[scored])
            copy = of["prefetch"][layer].work
            ready[layer] = ops.add("prefetch", copy, layer=layer, stream=PREFETCH, after=[chosen])
        for position, kind in enumerate(middle):
            waits = [ready.pop(layer - 1)] if position == 0 and layer - 1 in ready else []
            ops.add(kind, of[kind][layer].work, layer=layer, after=waits)
    if ready:
        ops.add("norm", plan.of_kind("norm")[0].work, layer=layers[0], stream=MAIN, after=list(ready.values()))
    return ops.plan(plan.shape, plan.spec, plan.workload, plan.config)


def lanes_cases(batch: int) -> Iterator[Case]:
    """Every row of ``measure_lanes``; first the two that all others are compared to."""
    workload, config = Workload(batch, CONTEXT, 0.0), Config()
    for name in ("launches", "lanes"):
        yield Case("corun", name, {"batch": batch}, workload, config)
    for ctas, shape in beside_compute():
        yield Case("corun", IN_ORDER, copy_case(batch, ctas, shape), workload, config)


def measure_lanes(bench: Bench, lists: Lists, batch: int) -> None:
    """Rows ``corun``/``launches``, ``lanes`` and ``attention in order``, microseconds per layer.

    ``launches``: a layer of tiny kernels with selection's streams beside them. ``lanes``: attention with them.
    ``attention in order``: attention with copies of real length; ``alone_us`` is the layer with empty copies.
    """
    case, lanes, *_ = lanes_cases(batch)
    todo = [(c, s) for c, s in beside_compute() if not bench.measured("corun", IN_ORDER, copy_case(batch, c, s))]
    if (not todo and bench.measured(lanes.kind, lanes.op, lanes.conditions)) or bench.hindered(lanes):
        return
    decoder = bench.decoder(Workload(batch, CONTEXT, 0.0), Config())
    for _ in range(2):
        decoder.issue()
    for name, middle in (("launches", ("norm",) * TINY), ("lanes", ("attention",))):
        with_us = _layer_us(decoder, lanes_plan(decoder.plan, middle, True), decoder.bindings)
        without = _layer_us(decoder, lanes_plan(decoder.plan, middle, False), decoder.bindings)
        values = {"alone_us": median(without)}
        if name == "lanes":
            empty_us, attention_us = median(with_us), median(without) - _score_us(decoder)
        bench.keep(bench.row("corun", name, case.conditions, with_us, METHOD, values))
    plan = lanes_plan(decoder.plan, ("attention",), True)
    for ctas, shape in todo:
        bench.clock.check()
        rate = rough_gb_s(ctas, shape)
        blocks = max(2, round((SHARE * attention_us - COPY_START_US) * rate * 1e3 / (2 * lists.pool.shape[1])))
        bindings = {**decoder.bindings, "prefetch": _copy_of(lists, blocks, ctas, shape)}
        samples = _layer_us(decoder, plan, bindings)
        values = {"alone_us": empty_us, "copy_bytes": float(blocks * lists.pool.shape[1] * 2)}
        bench.keep(bench.row("corun", IN_ORDER, copy_case(batch, ctas, shape), samples, METHOD, values))


def _copy_of(lists: Lists, blocks: int, ctas: int, shape: Shape) -> Callable[[Op], None]:
    count = lists.count(blocks)

    def copy(op: Op) -> None:
        lists.run(count, ctas, *shape, offset=lists.fresh(blocks))

    return copy


def _layer_us(decoder: Decoder, plan: Plan, bindings: Mapping[str, Binding]) -> tuple[float, ...]:
    issue(plan, bindings, SerialLanes())
    graph = captured(lambda: issue(plan, bindings, CudaLanes()))
    return replay_us(graph, REPEATS, per=len({op.layer for op in plan}))


def _score_us(decoder: Decoder) -> float:
    """Microseconds of a layer's score alone."""
    return median(_layer_us(decoder, lanes_plan(decoder.plan, (), False), decoder.bindings))
