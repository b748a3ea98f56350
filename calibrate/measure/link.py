"""The link: copy engine, and the prefetch kernel by CTAs, warps, stages, chunk and miss list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.measure.copies import CTAS, DEFAULT, Lists
from sparda.calibrate.measure.parts import Case
from sparda.calibrate.measure.timing import METHOD, replay_us, warm_and_captured
from sparda.calibrate.store import Value
from sparda.engine.shapes import ModelShape

TOP_K = 96
REPEATS = 5
FRESH_BLOCKS = 24576
"""Blocks that the launches of one graph read between them, 768 MiB: more than a host keeps in its caches."""

MOST_LAUNCHES = 128

MISS15_B16_BLOCKS = round(0.15 * TOP_K * 2 * 16)
ALL_MISS_BLOCKS = 16 * 2 * TOP_K
"""Every block of one layer missing at batch 16: 96 MiB."""

SHAPES = ((1, 8, 8192), (1, 4, 8192), (1, 12, 8192), (1, 12, 4096), (4, 8, 8192), (8, 1, 8192))
"""(warps, stages, chunk values): pipelined at several depths and widths, and not pipelined."""

DEEP_SHAPES = ((1, 12, 4096), (1, 16, 4096), (1, 20, 4096), (1, 24, 4096), (2, 20, 4096), (1, 24, 2048))
DEEP_CTAS = (1, 2, 3)
"""Deeper pipelines of smaller chunks, for the few CTAs that do not fill the link otherwise."""


COPY_MIB = (1, 4, 16, 64, 512)
DIRECTIONS = ("h2d", "d2h")


def _copies() -> Iterator[tuple[str, int, int, tuple[int, int, int]]]:
    for shape in SHAPES:
        for ctas in CTAS:
            yield "all_miss", ALL_MISS_BLOCKS, ctas, shape
    for shape in DEEP_SHAPES:
        for ctas in DEEP_CTAS:
            yield "all_miss", ALL_MISS_BLOCKS, ctas, shape
            yield "miss15_b16", MISS15_B16_BLOCKS, ctas, shape
    for ctas in CTAS:
        for name, batch, share in (("miss15_b16", 16, 0.15), ("miss15_b4", 4, 0.15), ("miss03_b4", 4, 0.03)):
            yield name, round(share * TOP_K * 2 * batch), ctas, DEFAULT
        yield "none", 0, ctas, DEFAULT
        yield "one", 1, ctas, DEFAULT


def _copy(name: str, blocks: int, ctas: int, shape: tuple[int, int, int]) -> Case:
    warps, stages, chunk = shape
    case: dict[str, Value] = {
        "case": name,
        "blocks": blocks,
        "ctas": ctas,
        "warps": warps,
        "stages": stages,
        "chunk_bytes": 2 * chunk,
    }
    return Case("link", "prefetch", case)


def _engine(direction: str, mib: int) -> Case:
    return Case("link", "copy_engine", {"direction": direction, "mib": mib})


def cases(shape: ModelShape) -> Iterator[Case]:
    """Every row of this part."""
    yield from (_copy(*copy) for copy in _copies())
    yield from (_engine(direction, mib) for mib in COPY_MIB for direction in DIRECTIONS)


def measure_link(bench: Bench) -> None:
    """Rows of kind ``link``: op ``prefetch`` and op ``copy_engine``; ``gb_s`` in values."""
    lists = Lists(bench)
    block_bytes = lists.pool.shape[1] * 2
    for name, blocks, ctas, shape in _copies():
        case = _copy(name, blocks, ctas, shape)
        if not bench.due(case):
            continue
        count = lists.count(blocks)
        # Launches in a row read different rows of the pool, as the layers of a step do.
        inner = max(4, min(MOST_LAUNCHES, FRESH_BLOCKS // max(1, blocks)))
        offsets = [lists.fresh(blocks) for _ in range(inner)]

        def body(
            at: Sequence[int] = offsets, c: Tensor = count, a: int = ctas, k: tuple[int, int, int] = shape
        ) -> None:
            for offset in at:
                lists.run(c, a, *k, offset=offset)

        samples = replay_us(warm_and_captured(body), REPEATS, per=inner)
        median = sorted(samples)[len(samples) // 2]
        rate = {"gb_s": blocks * block_bytes / median / 1e3} if blocks else {}
        bench.keep(bench.row("link", "prefetch", case.conditions, samples, METHOD, rate))
    _copy_engine(bench)


def _copy_engine(bench: Bench) -> None:
    for mib in COPY_MIB:
        host = bench.pool.view(-1)[: mib << 19]
        device = torch.empty(host.shape, dtype=host.dtype, device=bench.device)
        for direction, target, source in ((DIRECTIONS[0], device, host), (DIRECTIONS[1], host, device)):
            case = _engine(direction, mib)
            if not bench.due(case):
                continue

            def body(t: Tensor = target, s: Tensor = source) -> None:
                t.copy_(s, non_blocking=True)

            samples = replay_us(warm_and_captured(body), REPEATS)
            median = sorted(samples)[len(samples) // 2]
            rate = {"gb_s": (mib << 20) / median / 1e3}
            bench.keep(bench.row("link", "copy_engine", case.conditions, samples, METHOD, rate))
