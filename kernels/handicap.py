"""Taking part of a GPU away: thread blocks that hold a multiprocessor each, idle or reading GPU memory.

Each lasts until the host says so or its time is over, whichever is first: nothing here can hang a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparda.kernels.launch import multiprocessors_there, shared_bytes

MOST_NS = 10_000_000_000
"""Longest time for which multiprocessors can be taken, whatever the host does."""
WARPS = 32
"""Warps of each thread block: all that one may have, so that 64 registers a thread are all of a multiprocessor's."""
PAUSE_NS = 50_000
"""Nanoseconds between two looks at the flag; where kernels are interpreted, the time that a look is taken to last."""
HELD = 1024
"""Values of 8 bytes by which the shared memory of a thread block is counted out."""
CHUNK = 8192
"""Values of 4 bytes read at a time: twice 16 bytes a thread."""
STAGES = 7
"""Depth of the pipeline of reads: six chunks, 192 KiB, on their way, more than a multiprocessor can make use of."""
ROUND = 128
"""Chunks that a thread block reads between two looks at the flag, 4 MiB."""


@dataclass(frozen=True, slots=True)
class Board:
    """What the host and the thread blocks of one launch tell each other, in GPU memory; to be cleared between launches.

    ``flag`` int32 [1]: not 0 ends them. ``started``, ``ended`` int32 [1]: how many have begun and how many are done.
    ``clock`` int64 [n]: each one's GPU time, nanoseconds, as of its last look at the flag. ``progress`` int64 [n]:
    nanoseconds held so far, or bytes read. ``checks`` int32 [n]: exclusive or of all values read.
    """

    flag: torch.Tensor
    started: torch.Tensor
    ended: torch.Tensor
    clock: torch.Tensor
    progress: torch.Tensor
    checks: torch.Tensor

    @property
    def blocks(self) -> int:
        """Thread blocks, n."""
        return int(self.clock.numel())


def new_board(blocks: int, device: torch.device | str) -> Board:
    """A clear board for ``blocks`` thread blocks."""

    def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return Board(zeros(1), zeros(1), zeros(1), zeros(blocks, torch.int64), zeros(blocks, torch.int64), zeros(blocks))


@triton.jit
def _look(
    flag: tl.tensor, clock: tl.tensor, begin: tl.tensor, duration: tl.tensor, looks: tl.tensor, PAUSE: tl.constexpr,
    COUNTED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Nanoseconds since ``begin`` as of the look before this one, and whether to go on.

    Warps that disagreed about it would wait for each other for ever. So what they go by is what one thread read: an
    atomic's result is handed to all of them, and the clock, which each reads for itself, takes that way.
    """
    now = looks.to(tl.int64) * PAUSE if COUNTED else tl.extra.cuda.globaltimer()
    since = tl.atomic_xchg(clock, now, sem="relaxed") - begin
    told = tl.atomic_add(flag, 0, sem="relaxed")
    return since, (since < duration) & (told == 0)


@triton.jit
def _begin(started: tl.tensor, clock: tl.tensor, COUNTED: tl.constexpr) -> tl.tensor:
    """GPU time in nanoseconds, the same for all threads."""
    if not COUNTED:
        tl.atomic_xchg(clock, tl.extra.cuda.globaltimer(), sem="relaxed")
    tl.atomic_add(started, 1, sem="relaxed")
    return tl.atomic_max(clock, 0, sem="relaxed")


@triton.jit
def _take_whole(rows: tl.tensor, never: tl.tensor, HELD: tl.constexpr, HELD_STAGES: tl.constexpr) -> None:
    """Costs nothing but its room: the shared memory of a pipeline, and every register of the multiprocessor.

    ``never`` is 0, which the compiler cannot know. The values read before the inner loop and written after it take 48
    registers of each thread, the loop takes most of the other 16.
    """
    many = tl.arange(0, 16 * HELD)
    more = 16 * HELD + tl.arange(0, 8 * HELD)
    held = tl.arange(0, HELD)
    for _ in tl.range(0, never, num_stages=1):
        first = tl.load(rows + many)
        second = tl.load(rows + more)
        for task in tl.range(0, never, num_stages=HELD_STAGES):
            tl.store(rows + task * HELD + held, tl.load(rows + never + task * HELD + held))
        tl.store(rows + many, first)
        tl.store(rows + more, second)


@triton.jit
def _hold_kernel(
    flag: tl.tensor, started: tl.tensor, ended: tl.tensor, clock: tl.tensor, progress: tl.tensor, duration: tl.tensor,
    never: tl.tensor, PAUSE: tl.constexpr, COUNTED: tl.constexpr, HELD: tl.constexpr, HELD_STAGES: tl.constexpr,
) -> None:  # fmt: skip
    mine = tl.program_id(0)
    begin = _begin(started, clock + mine, COUNTED)
    looks = begin.to(tl.int32) * 0
    going = looks == 0
    while going:
        if not COUNTED:
            tl.inline_asm_elementwise(
                "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [PAUSE], dtype=tl.int32, is_pure=False, pack=1
            )
        looks += 1
        since, going = _look(flag, clock + mine, begin, duration, looks, PAUSE, COUNTED)
        tl.store(progress + mine, since)
    tl.atomic_add(ended, 1, sem="relaxed")
    if HELD_STAGES:
        _take_whole(progress, never, HELD, HELD_STAGES)


@triton.jit
def _stream_kernel(
    buffer: tl.tensor, chunks: tl.tensor, flag: tl.tensor, started: tl.tensor, ended: tl.tensor, clock: tl.tensor,
    progress: tl.tensor, checks: tl.tensor, duration: tl.tensor, never: tl.tensor, CHUNK: tl.constexpr,
    ROUND: tl.constexpr, STAGES: tl.constexpr, PAUSE: tl.constexpr, COUNTED: tl.constexpr, HELD: tl.constexpr,
    HELD_STAGES: tl.constexpr,
) -> None:  # fmt: skip
    mine = tl.program_id(0)
    programs = tl.num_programs(0)
    inside = tl.arange(0, CHUNK)
    begin = _begin(started, clock + mine, COUNTED)
    looks = begin.to(tl.int32) * 0
    going = looks == 0
    first = mine % chunks
    check = looks
    while going:
        # Made anew in every round: Triton 3.6 compiles no ``while`` that carries a tensor through.
        total = tl.zeros([CHUNK], tl.int32)
        for task in tl.range(0, ROUND, num_stages=STAGES):
            chunk = (first + task * programs) % chunks
            total ^= tl.load(buffer + chunk.to(tl.int64) * CHUNK + inside)
        check ^= tl.xor_sum(total, 0)
        first = (first + ROUND * programs) % chunks
        looks += 1
        tl.store(progress + mine, looks.to(tl.int64) * (ROUND * CHUNK * 4))
        _, going = _look(flag, clock + mine, begin, duration, looks, PAUSE, COUNTED)
    tl.store(checks + mine, check)
    tl.atomic_add(ended, 1, sem="relaxed")
    if HELD_STAGES:
        _take_whole(progress, never, HELD, HELD_STAGES)


def hold_sms(board: Board, *, duration_ns: int) -> None:
    """Hold ``board.blocks`` multiprocessors, on the current stream, until the flag is set or the time is over.

    Each thread block takes all registers and almost all shared memory of one, so that nothing runs beside it; it
    begins where it finds one empty. ``board.progress``: nanoseconds that each held its own, at the end at least
    ``duration_ns`` unless the flag was set.

    duration_ns: nanoseconds of GPU time, 1 to MOST_NS; exceeded by about two pauses. Where kernels are interpreted each
    look at the flag counts as PAUSE_NS. Raises ValueError for more thread blocks than multiprocessors, another
    duration, or a board that is not whole.
    """
    _check(board, duration_ns)
    _hold_kernel[(board.blocks,)](
        board.flag, board.started, board.ended, board.clock, board.progress, duration_ns, never=0, PAUSE=PAUSE_NS,
        COUNTED=not _compiled(), HELD=HELD, HELD_STAGES=_held_stages(board), num_warps=WARPS,
    )  # fmt: skip


def stream_hbm(buffer: torch.Tensor, board: Board, *, duration_ns: int) -> None:
    """Read ``buffer`` over and over from ``board.blocks`` thread blocks, on the current stream; else as ``hold_sms``.

    Thread block p reads chunk p, p + blocks, and so on, around the buffer, ROUND of them between two looks at the
    flag. ``board.progress``: bytes that each has read.

    buffer: int32, contiguous, a multiple of CHUNK values, in GPU memory; several times what the L2 cache holds, or that
    is what is read. Raises ValueError as ``hold_sms`` does, and for another buffer.
    """
    _check(board, duration_ns)
    if buffer.dtype != torch.int32 or not buffer.is_contiguous() or not buffer.numel() or buffer.numel() % CHUNK:
        raise ValueError(
            f"buffer must be contiguous int32, a multiple of {CHUNK} values, got {buffer.dtype} {tuple(buffer.shape)}"
        )
    if buffer.device != board.flag.device:
        raise ValueError(f"buffer must be on {board.flag.device} like the board, got {buffer.device}")
    _stream_kernel[(board.blocks,)](
        buffer, buffer.numel() // CHUNK, board.flag, board.started, board.ended, board.clock, board.progress,
        board.checks, duration_ns, never=0, CHUNK=CHUNK, ROUND=ROUND, STAGES=STAGES, PAUSE=PAUSE_NS,
        COUNTED=not _compiled(), HELD=HELD, HELD_STAGES=_held_stages(board), num_warps=WARPS,
    )  # fmt: skip


def stream_reference(buffer: torch.Tensor, board: Board) -> torch.Tensor:
    """int32 [n]: the ``checks`` that belong to ``board.progress``, from the chunks that each thread block then read."""
    chunks = buffer.cpu().view(-1, CHUNK)
    found = []
    for mine, read in enumerate(board.progress.tolist()):
        total = torch.zeros(CHUNK, dtype=torch.int32)
        for task in range(read // (4 * CHUNK)):
            total ^= chunks[(mine + task * board.blocks) % len(chunks)]
        while len(total) > 1:
            total = total[: len(total) // 2] ^ total[len(total) // 2 :]
        found.append(total)
    return torch.cat(found)


def _compiled() -> bool:
    return isinstance(_hold_kernel, triton.runtime.JITFunction)


def _held_stages(board: Board) -> int:
    """Stages of a pipeline of HELD values each that fills a multiprocessor's shared memory; 0 where interpreted."""
    # A pipeline keeps one chunk fewer than it has stages.
    return shared_bytes(board.flag) // (8 * HELD) if board.flag.is_cuda else 0


def _check(board: Board, duration_ns: int) -> None:
    there = multiprocessors_there(board.flag)
    if not 1 <= board.blocks <= there:
        raise ValueError(f"thread blocks must be 1 to {there}, one a multiprocessor, got {board.blocks}")
    if not 1 <= duration_ns <= MOST_NS:
        raise ValueError(f"duration_ns must be 1 to {MOST_NS}, got {duration_ns}")
    for name in ("flag", "started", "ended", "clock", "progress", "checks"):
        tensor: torch.Tensor = getattr(board, name)
        size, dtype = (1 if name in ("flag", "started", "ended") else board.blocks), torch.int32
        if name in ("clock", "progress"):
            dtype = torch.int64
        if tuple(tensor.shape) != (size,) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype} [{size}], got {tensor.dtype} {tuple(tensor.shape)}")
