"""Transfer paths by way of the host, part by part: what the host does, the copy engine, the kernel and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter

import torch

from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.measure.copies import Lists
from sparda.calibrate.measure.parts import Case
from sparda.calibrate.measure.timing import METHOD, replay_us, warm_and_captured
from sparda.engine.config import Config
from sparda.engine.copy_engine import BlockCopies
from sparda.engine.cuda_runtime import CudaRuntime, cuda_runtime
from sparda.engine.errors import SpardaError
from sparda.engine.kinds.gather import carry, collect, spread, wide
from sparda.engine.shapes import ModelShape
from sparda.engine.tiers import new_pool

BLOCKS = (1, 8, 32, 92, 184, 368, 737, 1475)
"""Blocks that a layer lacks: the last three at 3, 6 and 12 % misses and batch 64, the three before them at batch 16
and 3 and 6 % or a smaller batch."""
THREADS = (1, 4, 0)
"""Of the host's gather; 0 for as many as torch takes by itself. How many those are is in the row's values."""
REPORT_BATCHES = (1, 4, 16, 64)
"""Batches whose miss lists are reported; a list is as long as the slots, whatever is missing."""

LISTS = (1, 2)
"""Lists in a report: what is missing, and the slots that it is for."""

REPEATS = 15
LAUNCHES = 16
GATE_CYCLES = 1_000_000
"""GPU cycles, some half a millisecond, for which the stream is held: by then what is timed is enqueued behind it."""

BY_HOST = "the host's clock around its own part"
BEHIND_A_GATE = "events around a copy behind a held stream"
TO_THE_LAST_BYTE = "events, from before the host lists its copies to the end of the last one"


class Parts:
    """Lists as a step has them, on the GPU and on the host, staging on either side, and a stream for the copies."""

    def __init__(self, bench: Bench, runtime: CudaRuntime | None) -> None:
        self.bench, self.lists = bench, Lists(bench)
        self.src, self.dst = self.lists.src.cpu(), self.lists.dst.cpu()
        self.pool = wide(self.lists.pool)
        most, values = max(BLOCKS), int(self.lists.pool.shape[1])
        self.staged = new_pool(most, values, bench.device)
        self.uploaded = torch.zeros(most, values, dtype=self.staged.dtype, device=bench.device)
        self.order = torch.arange(most, dtype=torch.int32, device=bench.device)
        self.copies = BlockCopies(self.lists.pool, most, runtime)
        self.stream = torch.cuda.Stream(priority=-1)
        self.block_bytes = values * self.staged.element_size()

    def keep(
        self,
        case: Case,
        samples: Sequence[float],
        method: str,
        values: dict[str, float] | None = None,
    ) -> None:
        """Keep a row; of ``blocks`` in the case GB/s are told."""
        found = dict(values or {})
        if blocks := int(case.conditions.get("blocks", 0)):
            found["gb_s"] = blocks * self.block_bytes / median(samples) / 1e3
        self.bench.keep(self.bench.row("link", case.op, case.conditions, tuple(samples), method, found))


def _of_blocks(op: str, blocks: int) -> Case:
    return Case("link", op, {"blocks": blocks})


def _gathered(blocks: int, threads: int) -> Case:
    return Case("link", "gather", {"blocks": blocks, "threads": threads})


def _reported(shape: ModelShape, batch: int, lists: int) -> Case:
    entries = batch * shape.kv_heads * (Config().slots + 1)
    return Case("link", "report", {"entries": entries, "lists": lists})


def cases(shape: ModelShape) -> Iterator[Case]:
    """Every row of ``measure_paths``."""
    for blocks in BLOCKS:
        yield from (_gathered(blocks, threads) for threads in THREADS)
        yield from (_of_blocks(op, blocks) for op in ("upload", "blocks", "batch", "scatter"))
    yield from (_reported(shape, batch, lists) for batch in REPORT_BATCHES for lists in LISTS)


def measure_paths(bench: Bench) -> None:
    """Rows of kind ``link``: ops ``gather``, ``upload``, ``blocks``, ``batch``, ``scatter``, by blocks, and ``report``.

    Microseconds; ``gb_s`` in values. ``gather`` is the host's time, by ``threads`` too. ``blocks`` and ``batch`` are
    measured from the moment when the host has a report to their last byte; ``host_us`` of that the host is busy,
    ``enlist_us`` with the list alone. ``report``: its copies by themselves; ``round_trip_us`` from the end of the
    kernel before it to the end of a tiny graph that the host starts when it has seen the report, less that graph alone.
    """
    runtime = cuda_runtime()
    parts = Parts(bench, runtime)
    starts: dict[str, Callable[[], None]] = {"blocks": parts.copies.one_by_one}
    try:
        runtime.require_batch()
        starts["batch"] = parts.copies.at_once
    except SpardaError as e:
        bench.say(f"skipped: {e}")
    for blocks in BLOCKS:
        _gather(parts, blocks)
        _upload(parts, blocks)
        for op, start in starts.items():
            _copies(parts, blocks, op, start)
        _scatter(parts, blocks)
    for batch in REPORT_BATCHES:
        for lists in LISTS:
            _report(parts, batch, lists)


def _gather(parts: Parts, blocks: int) -> None:
    """The host's own time, by threads."""
    usual = torch.get_num_threads()
    try:
        for threads in THREADS:
            case = _gathered(blocks, threads)
            if not parts.bench.due(case):
                continue
            torch.set_num_threads(threads or usual)
            samples = [_gather_once(parts, blocks) for _ in range(REPEATS + 1)]
            parts.keep(case, samples[1:], BY_HOST, {"threads": float(threads or usual)})
    finally:
        torch.set_num_threads(usual)


def _gather_once(parts: Parts, blocks: int) -> float:
    """Microseconds to gather blocks that have not been read for as long as can be."""
    offset = parts.lists.fresh(blocks)
    begun = perf_counter()
    collect(parts.pool, parts.src[offset : offset + blocks], wide(parts.staged))
    return (perf_counter() - begun) * 1e6


def _upload(parts: Parts, blocks: int) -> None:
    """One copy of what the host has just gathered."""
    case = _of_blocks("upload", blocks)
    if not parts.bench.due(case):
        return
    samples = []
    for _ in range(REPEATS + 1):
        _gather_once(parts, blocks)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(parts.stream):
            torch.cuda._sleep(GATE_CYCLES)
            begin.record()
            carry(parts.staged, parts.uploaded, blocks)
            end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
    parts.keep(case, samples[1:], BEHIND_A_GATE)


def _copies(parts: Parts, blocks: int, op: str, start: Callable[[], None]) -> None:
    """Copies straight into slots, on a stream that has nothing else to do: they run while the host starts others."""
    case = _of_blocks(op, blocks)
    if not parts.bench.due(case):
        return
    samples, listed, busy = [], [], []
    for _ in range(REPEATS + 1):
        offset = parts.lists.fresh(blocks)
        src, dst = parts.src[offset : offset + blocks], parts.dst[offset : offset + blocks]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(parts.stream):
            begin.record()
            begun = perf_counter()
            parts.copies.enlist(src, dst, blocks, parts.lists.cache)
            enlisted = perf_counter()
            start()
            started = perf_counter()
            end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
        listed.append((enlisted - begun) * 1e6)
        busy.append((started - begun) * 1e6)
    values = {"host_us": median(busy[1:]), "enlist_us": median(listed[1:])}
    parts.keep(case, samples[1:], TO_THE_LAST_BYTE, values)


def _scatter(parts: Parts, blocks: int) -> None:
    """The kernel alone, inside GPU memory."""
    case = _of_blocks("scatter", blocks)
    if not parts.bench.due(case):
        return
    lists, count = parts.lists, parts.lists.count(blocks)
    offsets = [lists.fresh(blocks) for _ in range(LAUNCHES)]

    def body() -> None:
        for offset in offsets:
            dst = lists.dst[offset : offset + blocks]
            spread(parts.uploaded, lists.cache, parts.order[:blocks], dst, count)

    parts.keep(case, replay_us(warm_and_captured(body), REPEATS, per=LAUNCHES), METHOD)


def _report(parts: Parts, batch: int, lists: int) -> None:
    """A report of ``lists`` lists, and how long it is until the GPU does what the host starts upon it."""
    case = _reported(parts.bench.shape, batch, lists)
    if not parts.bench.due(case):
        return
    entries = int(case.conditions["entries"])
    device, cuda = parts.bench.device, parts.bench.device.type == "cuda"
    told = [torch.zeros(n, dtype=torch.int32, device=device) for n in (*[entries] * lists, 1)]
    heard = [torch.zeros(x.shape, dtype=torch.int32, pin_memory=cuda) for x in told]
    tiny = torch.zeros(32, device=device)

    def report() -> None:
        for there, here in zip(told, heard, strict=True):
            here.copy_(there, non_blocking=True)

    def something() -> None:
        tiny.add_(1.0)

    def reports() -> None:
        for _ in range(LAUNCHES):
            report()

    samples = replay_us(warm_and_captured(reports), REPEATS, per=LAUNCHES)
    once, after = warm_and_captured(report), warm_and_captured(something)
    after_us = median(replay_us(after, REPEATS))
    trips = [_round_trip_us(parts, once, after) for _ in range(REPEATS + 1)]
    parts.keep(case, samples, METHOD, {"round_trip_us": median(trips[1:]) - after_us})


def _round_trip_us(parts: Parts, report: torch.cuda.CUDAGraph, after: torch.cuda.CUDAGraph) -> float:
    """From the end of a kernel to the end of the graph that the host starts when it has seen the report behind it."""
    ended, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seen = torch.cuda.Event()
    with torch.cuda.stream(parts.stream):
        torch.cuda._sleep(GATE_CYCLES)
        ended.record()
        report.replay()
        seen.record()
    seen.synchronize()
    after.replay()
    last.record()
    torch.cuda.synchronize()
    return float(ended.elapsed_time(last)) * 1e3
