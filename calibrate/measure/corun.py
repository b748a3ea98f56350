"""Compute beside a prefetch: what either costs the other, and what selection's own streams cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch

from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.measure.kernels import chain
from sparda.calibrate.measure.link import DEFAULT, Lists
from sparda.calibrate.measure.timing import METHOD as CHAIN_METHOD
from sparda.calibrate.measure.timing import replay_us
from sparda.calibrate.store import Value
from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.graph import captured
from sparda.engine.lanes import CudaLanes, issue
from sparda.engine.plan import MAIN, PREFETCH, SELECT, Plan, PlanBuilder

METHOD = "a bounded prefetch inside a long CUDA graph of one kind; events around both"
KINDS = ("norm", "qkv", "append", "attention", "oproj", "gateup", "silu", "down", "lm_head", "score", "select")
BATCHES = (1, 4, 16, 32, 64)
CTAS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
FEWER_CTAS = (2, 3, 4, 8, 16, 32)
OTHER_SHAPES = ((1, 4, 8192), (1, 12, 8192), (8, 1, 8192))
CONTEXT = 65536
SAMPLES = 3

COMPUTE_US = 2500.0
"""Length of the compute graph alone."""

COPY_US = 1000.0
"""Length of the prefetch inside it: long beside its start, short enough to end before the compute does."""

GB_S_PER_CTA = {(1, 8): 22.0, (1, 4): 12.0, (1, 12): 24.0, (8, 1): 6.0}
"""What a CTA moves beside compute, roughly: only to choose how many blocks to copy."""

LINK_GB_S = 45.0
STARVED = 0.02
"""Least share of its speed that compute is taken to keep: below it the samples cannot tell how little it was."""


def _shapes() -> Iterator[tuple[int, tuple[int, int, int]]]:
    for ctas in CTAS:
        yield ctas, DEFAULT
    for shape in OTHER_SHAPES:
        for ctas in FEWER_CTAS:
            yield ctas, shape


@dataclass(frozen=True, slots=True)
class Compute:
    """A long graph of one kind: ``ops`` operations that take ``alone_us`` in all."""

    graph: torch.cuda.CUDAGraph
    ops: int
    alone_us: float


def _compute(decoder: Decoder, kind: str) -> Compute:
    body, ops = chain(decoder, kind)
    body()
    once = captured(body)
    repeats = max(1, round(COMPUTE_US / median(replay_us(once, 5))))

    def repeated() -> None:
        for _ in range(repeats):
            body()

    graph = captured(repeated)
    return Compute(graph, len(ops) * repeats, median(replay_us(graph, 5)))


def measure_corun(bench: Bench) -> None:
    """Rows of kind ``corun``: each sample microseconds per operation while the prefetch runs.

    ``alone_us``, ``gb_s`` of the prefetch and ``slowdown`` in values. The prefetch is launched into running compute,
    as in a step, and ends before it. While it runs, compute does what it does alone in (copy time - time it loses).
    """
    lists = Lists(bench)
    side = torch.cuda.Stream(priority=-1)
    for batch in BATCHES:
        decoder = None
        for kind in KINDS:
            todo = [(c, s) for c, s in _shapes() if not bench.measured("corun", kind, _case(batch, c, s))]
            if not todo:
                continue
            if decoder is None:
                decoder = bench.decoder(Workload(batch, CONTEXT, 0.06), Config())
                decoder.issue()
            compute = _compute(decoder, kind)
            for ctas, shape in todo:
                bench.clock.check()
                slow, rates = _beside(lists, side, compute, ctas, shape)
                alone = compute.alone_us / compute.ops
                values = {"alone_us": alone, "gb_s": median(rates), "slowdown": median(slow)}
                samples = tuple(alone * s for s in slow)
                bench.keep(bench.row("corun", kind, _case(batch, ctas, shape), samples, METHOD, values))
        _measure_lanes(bench, batch)


def _case(batch: int, ctas: int, shape: tuple[int, int, int]) -> dict[str, Value]:
    warps, stages, chunk = shape
    return {"batch": batch, "ctas": ctas, "warps": warps, "stages": stages, "chunk_bytes": 2 * chunk}


def _beside(
    lists: Lists, side: torch.cuda.Stream, compute: Compute, ctas: int, shape: tuple[int, int, int]
) -> tuple[list[float], list[float]]:
    """Slow-downs of the compute and GB/s of the copy, one of each a sample."""
    block_bytes = lists.pool.shape[1] * 2
    rate = min(LINK_GB_S, ctas * GB_S_PER_CTA[shape[:2]])
    blocks = int(COPY_US * rate * 1e3 / block_bytes)
    slow: list[float] = []
    rates: list[float] = []
    for attempt in range(SAMPLES + 3):
        begin, end, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        count = lists.count(blocks)
        torch.cuda.synchronize()
        begin.record()
        compute.graph.replay()
        end.record()
        with torch.cuda.stream(side):
            first.record()
            lists.run(count, ctas, *shape, offset=attempt * 8192 % (lists.LENGTH // 2))
            last.record()
        torch.cuda.synchronize()
        copy_us, total_us = first.elapsed_time(last) * 1e3, begin.elapsed_time(end) * 1e3
        if begin.elapsed_time(last) > begin.elapsed_time(end):
            blocks //= 2
            continue
        done_us = copy_us - (total_us - compute.alone_us)
        slow.append(max(1.0, copy_us / max(done_us, STARVED * copy_us)))
        rates.append(blocks * block_bytes / copy_us / 1e3)
        if len(slow) == SAMPLES:
            break
    return slow or [1 / STARVED], rates or [rate]


def _lanes_plan(plan: Plan, lanes: bool) -> Plan:
    """Scores and attention of every layer, with or without selection and an empty copy on streams of their own."""
    ops, ready = PlanBuilder(), {}
    scores, selects, fetches, attentions = (
        {op.layer: op for op in plan.of_kind(kind)} for kind in ("score", "select", "prefetch", "attention")
    )
    layers = [layer for layer in fetches if layer is not None]
    for layer in layers:
        scored = ops.add("score", scores[layer].work, layer=layer)
        if lanes:
            chosen = ops.add("select", selects[layer].work, layer=layer, stream=SELECT, after=[scored])
            ready[layer] = ops.add("prefetch", fetches[layer].work, layer=layer, stream=PREFETCH, after=[chosen])
        # As with a lookahead of one: the attention that follows a score needs what was chosen a layer ago.
        waits = [ready.pop(layer - 1)] if layer - 1 in ready else []
        ops.add("attention", attentions[layer].work, layer=layer, after=waits)
    if ready:
        ops.add("norm", plan.of_kind("norm")[0].work, layer=layers[0], stream=MAIN, after=list(ready.values()))
    return ops.plan(plan.shape, plan.spec, plan.workload, plan.config)


def _measure_lanes(bench: Bench, batch: int) -> None:
    """Row ``corun``/``lanes``: microseconds per layer with selection's streams; without them in ``alone_us``."""
    case: dict[str, Value] = {"batch": batch}
    if bench.measured("corun", "lanes", case):
        return
    decoder = bench.decoder(Workload(batch, CONTEXT, 0.0), Config())
    for _ in range(2):
        decoder.issue()
    with_lanes, without = (_lanes_plan(decoder.plan, lanes) for lanes in (True, False))
    layers = len(without.of_kind("attention"))
    us = {}
    for name, plan in (("with", with_lanes), ("without", without)):
        graph = captured(lambda p=plan: issue(p, decoder.bindings, CudaLanes()))  # type: ignore[misc]
        us[name] = replay_us(graph, 15, per=layers)
    values = {"alone_us": median(us["without"])}
    bench.keep(bench.row("corun", "lanes", case, us["with"], CHAIN_METHOD, values))
