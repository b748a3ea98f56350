"""Thread blocks that take a multiprocessor each: they end by themselves or when told, and count what they read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.kernels import handicap
from sparda.kernels.handicap import (
    CHUNK,
    MOST_NS,
    PAUSE_NS,
    ROUND,
    Board,
    hold_sms,
    new_board,
    stream_hbm,
    stream_reference,
)
from sparda.kernels.launch import with_multiprocessors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def buffer_of(chunks: int, device: str = DEVICE) -> torch.Tensor:
    random = torch.Generator().manual_seed(chunks)
    values = torch.randint(-(1 << 31), 1 << 31, (chunks * CHUNK,), dtype=torch.int32, generator=random)
    return values.to(device)


def counts(board: Board) -> tuple[int, int]:
    return int(board.started), int(board.ended)


@given(st.integers(1, 4), st.integers(1, 20 * PAUSE_NS))
@settings(deadline=None, max_examples=20)
def test_multiprocessors_are_held_for_as_long_as_was_asked(blocks: int, duration_ns: int) -> None:
    board = new_board(blocks, DEVICE)
    hold_sms(board, duration_ns=duration_ns)
    assert counts(board) == (blocks, blocks)
    # A look goes by the time of the one before it; a pause on a GPU is at most twice what was asked for.
    most = duration_ns + (PAUSE_NS if DEVICE == "cpu" else 5 * PAUSE_NS)
    assert all(duration_ns <= held < most for held in board.progress.tolist())


def test_the_flag_ends_them_at_the_first_look(device: str) -> None:
    board = new_board(3, device)
    board.flag.fill_(1)
    hold_sms(board, duration_ns=MOST_NS)
    assert counts(board) == (3, 3)
    assert all(held <= 2 * PAUSE_NS for held in board.progress.tolist())
    board = new_board(2, device)
    board.flag.fill_(1)
    stream_hbm(buffer_of(3), board, duration_ns=MOST_NS)
    assert counts(board) == (2, 2)
    assert board.progress.tolist() == [4 * CHUNK * ROUND] * 2


@pytest.mark.parametrize(("blocks", "chunks"), [(1, 1), (1, 5), (2, 4), (3, 1), (4, 7)])
def test_readers_read_what_they_count(device: str, blocks: int, chunks: int) -> None:
    board, buffer = new_board(blocks, device), buffer_of(chunks, device)
    stream_hbm(buffer, board, duration_ns=1 if device == "cpu" else 100_000)
    assert counts(board) == (blocks, blocks)
    assert all(read > 0 and read % (4 * CHUNK * ROUND) == 0 for read in board.progress.tolist())
    assert board.checks.tolist() == stream_reference(buffer, board).tolist()


def test_readers_between_them_read_the_whole_buffer(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handicap, "ROUND", 2)
    board, chunks = new_board(2, device), 4
    buffer = torch.zeros(chunks * CHUNK, dtype=torch.int32, device=device)
    buffer[::CHUNK] = 1 << torch.arange(chunks, dtype=torch.int32, device=device)
    board.flag.fill_(1)
    stream_hbm(buffer, board, duration_ns=1)
    assert board.checks.tolist() == [0b0101, 0b1010]


@pytest.mark.parametrize("duration_ns", [0, -1, MOST_NS + 1])
def test_a_time_without_a_near_end_is_refused(device: str, duration_ns: int) -> None:
    with pytest.raises(ValueError, match=f"duration_ns must be 1 to {MOST_NS}"):
        hold_sms(new_board(1, device), duration_ns=duration_ns)


def test_more_thread_blocks_than_multiprocessors_are_refused_whatever_work_is_cut_for(device: str) -> None:
    with with_multiprocessors(4096), pytest.raises(ValueError, match=r"thread blocks must be 1 to .*, got 1000"):
        hold_sms(new_board(1000, device), duration_ns=1)
    with with_multiprocessors(1):
        hold_sms(new_board(4, device), duration_ns=1)


@pytest.mark.parametrize("name", ["flag", "started", "ended", "clock", "progress", "checks"])
def test_a_board_that_is_not_whole_is_refused(device: str, name: str) -> None:
    board = new_board(2, device)
    for wrong in (torch.zeros(3, dtype=getattr(board, name).dtype), getattr(board, name).float()):
        # Of another size the clock says how many thread blocks there are; then the others do not fit.
        with pytest.raises(ValueError, match="must be contiguous"):
            hold_sms(replace(board, **{name: wrong.to(device)}), duration_ns=1)


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(CHUNK),
        torch.zeros(CHUNK - 1, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(2 * CHUNK, dtype=torch.int32)[::2],
    ],
    ids=["fp32", "short", "empty", "strided"],
)
def test_a_buffer_that_cannot_be_read_in_chunks_is_refused(device: str, buffer: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="buffer must be contiguous int32"):
        stream_hbm(buffer.to(device), new_board(1, device), duration_ns=1)
