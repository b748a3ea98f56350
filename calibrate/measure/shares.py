"""What rivals take: the rate of readers of GPU memory by thread blocks, and of two copies that share the link."""

from __future__ import annotations

from statistics import median

import torch

from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.measure.copies import DEFAULT, Lists
from sparda.calibrate.measure.link import ALL_MISS_BLOCKS, FRESH_BLOCKS
from sparda.calibrate.measure.rivals import Rivals, beside
from sparda.calibrate.measure.timing import METHOD, replay_us, warm_and_captured
from sparda.calibrate.store import Value
from sparda.kernels.handicap import new_board, stream_hbm

HBM_CTAS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 132)
READ_NS = 20_000_000
READS = 3
READ = "events around 20 ms of reading GPU memory; microseconds a GiB"

SHARED_CTAS = (2, 4)
REPEATS = 5
LAUNCHES = FRESH_BLOCKS // ALL_MISS_BLOCKS
SHARED = f"{METHOD}, beside a copy engine that never pauses"
LONGER = 6
"""Times as long as the prefetch takes alone that the copy beside it lasts, if it has the link to itself."""


def measure_shares(bench: Bench, rivals: Rivals) -> None:
    """Rows of kind ``link``: ``hbm_read`` by thread blocks, and ``link_shared`` by the prefetch's.

    Of ``hbm_read``: ``gb_s`` in values. Of ``link_shared``: samples are microseconds per launch of the prefetch beside
    the copy; ``gb_s`` is its rate, ``copy_gb_s`` the copy engine's at the same time, ``alone_gb_s`` its rate without.
    """
    _hbm_read(bench, rivals)
    _link_shared(bench, rivals)


def _hbm_read(bench: Bench, rivals: Rivals) -> None:
    there = torch.cuda.get_device_properties(bench.device).multi_processor_count
    for ctas in HBM_CTAS:
        case: dict[str, Value] = {"ctas": ctas}
        if ctas > there or bench.measured("link", "hbm_read", case):
            continue
        bench.clock.check()
        # The first compiles the kernel.
        samples = tuple(_us_per_gib(rivals, ctas) for _ in range(1 + READS))[1:]
        gb_s = 2**30 / median(samples) / 1e3
        bench.keep(bench.row("link", "hbm_read", case, samples, READ, {"gb_s": gb_s}))


def _us_per_gib(rivals: Rivals, ctas: int) -> float:
    board = new_board(ctas, rivals.device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    stream_hbm(rivals.buffer, board, duration_ns=READ_NS)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 * 2**30 / int(board.progress.sum())


def _link_shared(bench: Bench, rivals: Rivals) -> None:
    cases: dict[int, dict[str, Value]] = {c: {"ctas": c, "blocks": ALL_MISS_BLOCKS} for c in SHARED_CTAS}
    todo = [c for c, case in cases.items() if not bench.measured("link", "link_shared", case)]
    if not todo:
        return
    bench.clock.check()
    lists = Lists(bench)
    count, moved = lists.count(ALL_MISS_BLOCKS), ALL_MISS_BLOCKS * lists.pool.shape[1] * 2
    for ctas in todo:
        bench.clock.check()
        offsets = [lists.fresh(ALL_MISS_BLOCKS) for _ in range(LAUNCHES)]

        def body(ctas: int = ctas, offsets: list[int] = offsets) -> None:
            for offset in offsets:
                lists.run(count, ctas, *DEFAULT, offset=offset)

        graph = warm_and_captured(body)
        alone = median(replay_us(graph, REPEATS, per=LAUNCHES))
        rival = rivals.copy(LONGER * alone * LAUNCHES * (1 + REPEATS))
        with beside(rival):
            graph.replay()
            rival.begin()
            samples = replay_us(graph, REPEATS, per=LAUNCHES, warmup=0)
            rival.end()
        values = {
            "gb_s": moved / median(samples) / 1e3,
            "copy_gb_s": rival.gb_s,
            "alone_gb_s": moved / alone / 1e3,
        }
        row = bench.row("link", "link_shared", cases[ctas], samples, SHARED, values, complete=rival.lasted)
        if not rival.lasted:
            bench.say(f"incomplete: a prefetch of {ctas} CTAs beside a copy, which ended first")
        bench.keep(row)
