"""Compute beside a running prefetch: what either costs the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.measure.kernels import chain
from sparda.calibrate.measure.link import DEFAULT, Lists
from sparda.calibrate.measure.timing import replay_us, warm_and_captured
from sparda.engine.config import Config, Workload

METHOD = "CUDA graph replays on one stream while a prefetch runs on another, events around each"
KINDS = ("norm", "qkv", "append", "attention", "oproj", "gateup", "silu", "down", "lm_head", "score", "select")
BATCHES = (1, 4, 16, 32, 64)
CTAS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
FEWER_CTAS = (2, 3, 4, 8, 16, 32)
OTHER_SHAPES = ((1, 4, 8192), (1, 12, 8192), (8, 1, 8192))
CONTEXT = 65536
TARGET_US = 4000.0
"""How long the compute should go on beside the prefetch: many replays of short kernels, few of long ones."""

LINK_BYTES_PER_US = 50_000
MAX_BLOCKS = 1 << 17


def _shapes() -> Iterator[tuple[int, tuple[int, int, int]]]:
    for ctas in CTAS:
        yield ctas, DEFAULT
    for shape in OTHER_SHAPES:
        for ctas in FEWER_CTAS:
            yield ctas, shape


def measure_corun(bench: Bench) -> None:
    """Rows of kind ``corun``: samples per operation beside the prefetch; ``alone_us`` and ``gb_s`` in values."""
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
            body, ops = chain(decoder, kind)
            graph = warm_and_captured(body)
            alone = sorted(replay_us(graph, 9))[4]
            for ctas, shape in todo:
                bench.clock.check()
                samples, rate = _beside(lists, side, graph, alone, ctas, shape)
                per = tuple(s / len(ops) for s in samples)
                values = {"alone_us": alone / len(ops), "gb_s": rate}
                bench.keep(bench.row("corun", kind, _case(batch, ctas, shape), per, METHOD, values))


def _case(batch: int, ctas: int, shape: tuple[int, int, int]) -> dict[str, float | int | str | bool]:
    warps, stages, chunk = shape
    return {"batch": batch, "ctas": ctas, "warps": warps, "stages": stages, "chunk_bytes": 2 * chunk}


def _beside(
    lists: Lists, side: torch.cuda.Stream, graph: torch.cuda.CUDAGraph, alone: float, ctas: int, shape: tuple[int, ...]
) -> tuple[tuple[float, ...], float]:
    """Replay samples while a prefetch runs throughout, and the prefetch's GB/s while replays run throughout."""
    warps, stages, chunk = shape
    replays = max(6, min(60, round(TARGET_US / alone)))
    block_bytes = lists.pool.shape[1] * 2
    blocks = min(MAX_BLOCKS, int(2.5 * replays * alone * LINK_BYTES_PER_US / block_bytes))
    count = lists.count(blocks)
    for _ in range(3):
        finished = torch.cuda.Event()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            lists.run(count, ctas, warps, stages, chunk)
            finished.record()
        samples = replay_us(graph, replays, warmup=2)
        if not finished.query():
            break
        count = lists.count(min(MAX_BLOCKS, int(count.item() * 2)))
    torch.cuda.synchronize()
    # The other way round: a short transfer inside a long run of replays.
    short = max(256, blocks // 8)
    few = lists.count(short)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):
        graph.replay()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        start.record()
        lists.run(few, ctas, warps, stages, chunk)
        end.record()
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    return samples, short * block_bytes / (start.elapsed_time(end) * 1e6)
