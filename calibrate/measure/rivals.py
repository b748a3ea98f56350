"""What takes part of a GPU away while something is timed: held multiprocessors, readers of GPU memory, a copy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.store import Value
from sparda.engine.errors import SpardaError
from sparda.kernels.handicap import Board, hold_sms, new_board, stream_hbm

LASTS_NS = 2_000_000_000
"""When a rival that nobody ends gives the GPU back: long after any steps beside it have ended."""

START_S = 1.0
"""Seconds within which every thread block of a rival must have found its multiprocessor."""

STREAM_VALUES = 1 << 28
"""Values of 4 bytes that readers go round: 1 GiB, many times what the L2 cache holds."""

PIECE_VALUES = 1 << 27
"""Values of 2 bytes that are copied at a time: 256 MiB, some 5 ms of a Gen5 link."""

PIECE_GB_S = 56.0
"""Rate at which a copy has the link to itself, at the most: to enqueue enough of them."""


@dataclass(frozen=True, slots=True)
class Handicap:
    """What is taken away: multiprocessors held, ``copy`` for a copy engine on the link, thread blocks that read."""

    held_sms: int = 0
    link_rival: str = "none"
    hbm_ctas: int = 0

    @property
    def taken(self) -> int:
        """Multiprocessors that nothing else can use."""
        return self.held_sms + self.hbm_ctas

    @property
    def case(self) -> dict[str, Value]:
        return asdict(self)


class Rival:
    """Nothing, and what all rivals can do: run on a stream of their own and say what they moved meanwhile.

    Between ``begin`` and ``end``, both on the current stream, is what it is a rival of. ``lasted`` says afterwards
    whether it ran all that time; a rival that did not may have been held up behind what it should have been beside.
    """

    lasted = True

    def __init__(self) -> None:
        # From a pool that gives the next one every time: another attempt is made on another of the GPU's queues.
        self.side = torch.cuda.Stream()
        self.marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def start(self) -> None:
        """Begin; returns when it runs. Raises SpardaError where it cannot."""

    def begin(self) -> None:
        self.marks[0].record()

    def end(self) -> None:
        """Waits for the current stream."""
        self.marks[1].record()
        self.marks[1].synchronize()

    def stop(self) -> None:
        """Let it end, and wait until it has."""

    def moved_bytes(self) -> float:
        """Bytes moved between ``begin`` and ``end``; known once it has stopped."""
        return 0.0

    @property
    def gb_s(self) -> float:
        """GB/s between ``begin`` and ``end``."""
        lasted_ms = float(self.marks[0].elapsed_time(self.marks[1]))
        return self.moved_bytes() / lasted_ms / 1e6


class KernelRival(Rival):
    """``blocks`` thread blocks of a kernel that takes a board; ``reads`` where their progress is bytes."""

    def __init__(self, launch: Callable[[Board], None], blocks: int, device: torch.device, *, reads: bool) -> None:
        super().__init__()
        self.launch, self.reads, self.board = launch, reads, new_board(blocks, device)
        self.seen = torch.zeros(2, blocks, dtype=torch.int64, device=device)
        self.one = torch.ones(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def start(self) -> None:
        # Once now: what is used for the first time beside a kernel that does not end can wait for that kernel.
        note_progress(self.seen[0], self.board)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.launch(self.board)
        limit = time.monotonic() + START_S
        while int(self.board.started) < self.board.blocks:
            if time.monotonic() > limit:
                self.stop()
                raise SpardaError(
                    f"{self.board.blocks} thread blocks did not each find an empty multiprocessor within {START_S:g} s;"
                    " end whatever else runs on the GPU and measure again."
                )

    def begin(self) -> None:
        note_progress(self.seen[0], self.board)
        super().begin()

    def end(self) -> None:
        note_progress(self.seen[1], self.board)
        super().end()
        # Not an event behind the kernel: waiting for it would hold up other streams that share its queue.
        self.lasted = int(self.board.ended) == 0

    def stop(self) -> None:
        # By a copy, since a kernel may find no multiprocessor to run on.
        self.board.flag.copy_(self.one, non_blocking=True)
        self.side.synchronize()

    def moved_bytes(self) -> float:
        return float((self.seen[1] - self.seen[0]).sum()) if self.reads else 0.0


class CopyRival(Rival):
    """``pieces`` copies of pinned memory into ``landing``, one after the other, by a copy engine."""

    def __init__(self, pool: Tensor, landing: Tensor, pieces: int) -> None:
        super().__init__()
        self.source, self.landing = pool.view(-1), landing
        # The first is there to end: from then on it runs.
        self.ends = [torch.cuda.Event(enable_timing=True) for _ in range(1 + pieces)]

    def start(self) -> None:
        self.side.wait_stream(torch.cuda.current_stream())
        size = self.landing.numel()
        places = self.source.numel() // size
        with torch.cuda.stream(self.side):
            for number, end in enumerate(self.ends):
                first = number % places * size
                copy_piece(self.landing, self.source[first : first + size])
                end.record()
        self.ends[0].synchronize()

    def end(self) -> None:
        super().end()
        self.lasted = not self.ends[-1].query()

    def stop(self) -> None:
        self.side.synchronize()

    def moved_bytes(self) -> float:
        zero, piece = self.ends[0], self.landing.numel() * self.landing.element_size()
        ends_ms = [zero.elapsed_time(e) for e in self.ends]
        first, last = np.interp([zero.elapsed_time(m) for m in self.marks], ends_ms, np.arange(len(ends_ms)))
        return float(last - first) * piece


class Rivals:
    """Makes the rival of each handicap; holds the memory that they use, which is taken when first needed."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.device = bench, bench.device

    @cached_property
    def buffer(self) -> Tensor:
        """What readers read: int32, random, since memory of zeros costs less power."""
        return torch.randint(-(1 << 31), 1 << 31, (STREAM_VALUES,), dtype=torch.int32, device=self.device)

    @cached_property
    def landing(self) -> Tensor:
        """Where copies go."""
        pool = self.bench.pool
        return torch.empty(min(PIECE_VALUES, pool.numel()), dtype=pool.dtype, device=self.device)

    def copy(self, lasting_us: float) -> CopyRival:
        """A copy that lasts at least so long."""
        piece_us = self.landing.numel() * self.landing.element_size() / PIECE_GB_S / 1e3
        return CopyRival(self.bench.pool, self.landing, math.ceil(lasting_us / piece_us))

    def of(self, handicap: Handicap, lasting_us: float) -> Rival:
        """Ready to start; a copy lasts ``lasting_us``, others until they are ended."""
        if handicap.link_rival == "copy":
            return self.copy(lasting_us)
        if handicap.hbm_ctas:
            read = partial(stream_hbm, self.buffer, duration_ns=LASTS_NS)
            return KernelRival(read, handicap.hbm_ctas, self.device, reads=True)
        if handicap.held_sms:
            return KernelRival(partial(hold_sms, duration_ns=LASTS_NS), handicap.held_sms, self.device, reads=False)
        return Rival()


@contextmanager
def beside(rival: Rival) -> Iterator[None]:
    """``rival`` runs inside, and has ended after it, however that ends."""
    rival.start()
    try:
        yield
    finally:
        rival.stop()


def note_progress(seen: Tensor, board: Board) -> None:
    """Enqueue a copy of what each thread block has done so far."""
    seen.copy_(board.progress)


def copy_piece(target: Tensor, source: Tensor) -> None:
    """Enqueue a copy of pinned memory to the GPU."""
    target.copy_(source, non_blocking=True)
