"""Compute beside a prefetch: what either costs the other, and what selection's own streams cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch

from sparda.calibrate.costs import LAYER
from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.measure.copies import Lists, Shape, beside_compute, copy_case, rough_gb_s
from sparda.calibrate.measure.kernels import body_of, chain
from sparda.calibrate.measure.lanes import lanes_cases, measure_lanes
from sparda.calibrate.measure.parts import Case
from sparda.calibrate.measure.timing import replay_us
from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.graph import captured
from sparda.engine.plan import MAIN
from sparda.engine.shapes import ModelShape

METHOD = "a bounded prefetch inside a long CUDA graph of one kind; events around both"
KINDS = ("norm", "qkv", "append", "attention", "oproj", "gateup", "down", "lm_head", "score", "select")
BATCHES = (1, 4, 16, 32, 64)
CONTEXT = 65536
SAMPLES = 3

COMPUTE_US = 2500.0
"""Length of the compute graph alone."""

COPY_US = 1000.0
"""Length of the prefetch inside it: long beside its start, short enough to end before the compute does."""

GATE_CYCLES = 5_000_000
"""GPU cycles, some 2.5 ms, for which both streams are held: by then everything is enqueued, and no host's delay
between two launches is taken for the GPU's."""

LATER_CYCLES = 40_000
"""Cycles, 20 us, by which the compute starts after the prefetch, whose thread blocks then all have their places."""

STARVED = 0.02
"""Least share of its speed that compute is taken to keep: below it the samples cannot tell how little it was."""


@dataclass(frozen=True, slots=True)
class Compute:
    """A long graph of one kind: ``ops`` operations that take ``alone_us`` in all."""

    graph: torch.cuda.CUDAGraph
    ops: int
    alone_us: float


def _layers(decoder: Decoder) -> tuple[Callable[[], None], int]:
    """A body that issues the main stream of every offloaded layer in a step's order, and how many layers those are."""
    first = decoder.tiers.whole
    ops = [op for op in decoder.plan if op.stream == MAIN and op.layer is not None and op.layer >= first]
    return body_of(decoder, ops), len({op.layer for op in ops})


def _compute(decoder: Decoder, kind: str) -> Compute:
    if kind == LAYER:
        body, count = _layers(decoder)
    else:
        body, ops = chain(decoder, kind)
        count = len(ops)
    body()
    once = captured(body)
    repeats = max(1, round(COMPUTE_US / median(replay_us(once, 5))))

    def repeated() -> None:
        for _ in range(repeats):
            body()

    graph = captured(repeated)
    return Compute(graph, count * repeats, median(replay_us(graph, 5)))


def _of(batch: int, kind: str, ctas: int, shape: Shape) -> Case:
    return Case("corun", kind, copy_case(batch, ctas, shape), Workload(batch, CONTEXT, 0.06), Config())


def cases(shape: ModelShape) -> Iterator[Case]:
    """Every row of this part."""
    for batch in BATCHES:
        for kind in (*KINDS, LAYER):
            for ctas, copy in beside_compute():
                yield _of(batch, kind, ctas, copy)
        yield from lanes_cases(batch)


def measure_corun(bench: Bench) -> None:
    """Rows of kind ``corun``: each sample microseconds per operation (or per layer) while the prefetch runs.

    ``slowdown``, ``alone_us``, and of the prefetch ``copy_us`` and ``copy_bytes`` in values. The prefetch is there
    first and ends before the compute does. While both run, compute does what it does alone in (that time - time lost).
    """
    lists = Lists(bench)
    side = torch.cuda.Stream(priority=-1)
    for batch in BATCHES:
        decoder = None
        for kind in (*KINDS, LAYER):
            todo = [(c, s) for c, s in beside_compute() if not bench.measured("corun", kind, copy_case(batch, c, s))]
            if not todo or bench.hindered(_of(batch, kind, *todo[0])):
                continue
            if decoder is None:
                decoder = bench.decoder(Workload(batch, CONTEXT, 0.06), Config())
                decoder.issue()
            compute = _compute(decoder, kind)
            alone = compute.alone_us / compute.ops
            for ctas, shape in todo:
                bench.clock.check()
                slow, copies, moved = _beside(lists, side, compute, ctas, shape)
                values = {"alone_us": alone, "copy_us": median(copies), "copy_bytes": moved, "slowdown": median(slow)}
                samples = tuple(alone * s for s in slow)
                bench.keep(bench.row("corun", kind, copy_case(batch, ctas, shape), samples, METHOD, values))
        measure_lanes(bench, lists, batch)


def _beside(
    lists: Lists, side: torch.cuda.Stream, compute: Compute, ctas: int, shape: Shape
) -> tuple[list[float], list[float], float]:
    """Slow-downs of the compute and microseconds of the copy, one of each a sample; bytes that each copy moves."""
    block_bytes = lists.pool.shape[1] * 2
    blocks = int(COPY_US * rough_gb_s(ctas, shape) * 1e3 / block_bytes)
    slow: list[float] = []
    copies: list[float] = []
    for _ in range(SAMPLES + 3):
        moved = float(blocks * block_bytes)
        copy_us, both_us, total_us, inside = _once(lists, side, compute, ctas, shape, blocks)
        if not inside:
            blocks, slow, copies = blocks // 2, [], []
            continue
        done_us = both_us - (total_us - compute.alone_us)
        slow.append(max(1.0, both_us / max(done_us, STARVED * both_us)))
        copies.append(copy_us)
        if len(slow) == SAMPLES:
            break
    return slow or [1 / STARVED], copies or [copy_us], moved


def _once(
    lists: Lists, side: torch.cuda.Stream, compute: Compute, ctas: int, shape: Shape, blocks: int
) -> tuple[float, float, float, bool]:
    """One run: microseconds of the copy, of both together, of the compute; whether the copy ended first."""
    begin, end, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    gate = torch.cuda.Event()
    count, offset = lists.count(blocks), lists.fresh(blocks)
    torch.cuda.synchronize()
    torch.cuda._sleep(GATE_CYCLES)
    gate.record()
    side.wait_event(gate)
    with torch.cuda.stream(side):
        first.record()
        lists.run(count, ctas, *shape, offset=offset)
        last.record()
    torch.cuda._sleep(LATER_CYCLES)
    begin.record()
    compute.graph.replay()
    end.record()
    torch.cuda.synchronize()
    inside = begin.elapsed_time(last) < begin.elapsed_time(end)
    copy_us, both_us = first.elapsed_time(last) * 1e3, begin.elapsed_time(last) * 1e3
    return copy_us, both_us, begin.elapsed_time(end) * 1e3, inside
