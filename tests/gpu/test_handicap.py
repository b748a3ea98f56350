"""Part of a real GPU taken away: nothing runs where it is held, it comes back, and tokens do not depend on it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from sparda.calibrate.measure.rivals import CopyRival, KernelRival, Rival, beside
from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.policies import make_plan
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.tiers import Tiers
from sparda.engine.trace import rotating_trace
from sparda.engine.weights import Weights
from sparda.kernels.handicap import PAUSE_NS, hold_sms, new_board, stream_hbm
from sparda.kernels.launch import multiprocessors_there, with_multiprocessors

SPEC = SparseSpec()
CONTEXT = 16384 - 40
STEPS = 100
LASTS_NS = 1_000_000_000
DEVICE = torch.device("cuda")


@pytest.fixture(scope="module")
def sms() -> int:
    return multiprocessors_there(torch.zeros(1, device=DEVICE))


def holding(blocks: int, lasts_ns: int = LASTS_NS) -> KernelRival:
    return KernelRival(partial(hold_sms, duration_ns=lasts_ns), blocks, DEVICE, reads=False)


@pytest.mark.parametrize("blocks", [1, 16, 64])
def test_held_multiprocessors_come_back_at_their_time(blocks: int) -> None:
    board, lasts_ns = new_board(blocks, DEVICE), 20_000_000
    hold_sms(board, duration_ns=lasts_ns)
    torch.cuda.synchronize()
    assert (int(board.started), int(board.ended)) == (blocks, blocks)
    assert all(lasts_ns <= held < lasts_ns + 5 * PAUSE_NS for held in board.progress.tolist())


def test_held_multiprocessors_come_back_when_told() -> None:
    rival = holding(16)
    with beside(rival):
        rival.begin()
        rival.end()
        assert rival.lasted
    assert int(rival.board.ended) == 16
    assert int(rival.board.progress.max()) < LASTS_NS


@pytest.mark.parametrize("free", [0, 1])
def test_nothing_runs_on_a_held_multiprocessor(sms: int, free: int) -> None:
    x, ran, other = torch.zeros(32, device=DEVICE), torch.cuda.Event(), torch.cuda.Stream()
    x.add_(1.0)
    rival = holding(sms - free)
    with beside(rival):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            x.add_(1.0)
            ran.record()
        # Each look takes a copy engine some microseconds, a thousand times what the sum takes.
        looks = 0
        while looks < 1000 and not ran.query():
            looks += 1
            assert int(rival.board.ended) == 0
        assert ran.query() == bool(free)
    torch.cuda.synchronize()
    assert x.tolist() == [2.0] * 32


def decoder_of(shape: ModelShape, weights: Weights, pool: Tensor, sms: int) -> Decoder:
    workload, config = Workload(4, CONTEXT, 0.06), Config()
    tiers = Tiers(shape, SPEC, workload, config, DEVICE, capacity=CONTEXT + 400, pool=pool)
    trace = rotating_trace(shape, SPEC, workload, config, blocks=tiers.blocks, device=DEVICE)
    with with_multiprocessors(sms):
        decoder = Decoder(make_plan(shape, SPEC, workload, config), weights, tiers, trace)
        decoder.capture()
    return decoder


def decode(decoder: Decoder, rival: Rival) -> tuple[Tensor, Tensor]:
    """Tokens [STEPS, B] and the last logits, from the same start every time; checked that the rival lasted."""
    decoder.tiers.seed(seed=5)
    decoder.tokens.copy_(torch.arange(4) * 17)
    decoder.step()
    tokens = torch.zeros(STEPS, 4, dtype=torch.int64, device=DEVICE)
    tokens[0].copy_(decoder.tokens)
    with beside(rival):
        rival.begin()
        for step in range(1, STEPS):
            decoder.step()
            tokens[step].copy_(decoder.tokens)
        rival.end()
    assert rival.lasted
    return tokens, decoder.logits.clone()


@pytest.mark.parametrize("held", [16, 64])
def test_a_held_gpu_decodes_the_very_bits_of_a_free_one_cut_for_as_many_multiprocessors(
    shape: ModelShape, weights: Weights, pool: Tensor, sms: int, held: int
) -> None:
    decoder = decoder_of(shape, weights, pool, sms - held)
    free, beside_it = decode(decoder, Rival()), decode(decoder, holding(held))
    assert torch.equal(free[0], beside_it[0])
    assert torch.equal(free[1], beside_it[1])


def test_readers_and_a_copy_move_bytes_and_change_no_bits(
    shape: ModelShape, weights: Weights, pool: Tensor, sms: int
) -> None:
    decoder = decoder_of(shape, weights, pool, sms - 8)
    expected = decode(decoder, Rival())
    buffer = torch.zeros(1 << 26, dtype=torch.int32, device=DEVICE)
    reading = KernelRival(partial(stream_hbm, buffer, duration_ns=LASTS_NS), 8, DEVICE, reads=True)
    landing = torch.empty(min(1 << 25, pool.numel()), dtype=pool.dtype, device=DEVICE)
    copying = CopyRival(pool, landing, 400)
    for rival in (reading, copying):
        found = decode(decoder, rival)
        assert rival.gb_s > 0
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
