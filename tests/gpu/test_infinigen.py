"""InfiniGen on a real GPU: a step in pieces, with the host at work in its middle, is the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparda.calibrate.measure.timing import replay_us
from sparda.engine.batch import Batch
from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.partial import random_basis
from sparda.engine.pieces import Pieces
from sparda.engine.plan import Op
from sparda.engine.policies import make_plan
from sparda.engine.reference import ReferenceDecoder, chosen_blocks, history_of
from sparda.engine.run import layer_of
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.tiers import Tiers
from sparda.engine.trace import rotating_trace
from sparda.engine.weights import Weights
from sparda.kernels.prefetch import prefetch

SPEC = SparseSpec()
CONTEXT = 16384 - 40
BATCH = 4
SEED = 5
CONFIG = Config("infinigen")

Make = Callable[..., Decoder]


@pytest.fixture
def make(shape: ModelShape, weights: Weights, pool: Tensor) -> Make:
    """A decoder over the seeded history; with ``miss_rate`` a trace chooses the blocks."""

    def made(*, miss_rate: float | None = None, batch: int = BATCH) -> Decoder:
        workload = Workload(batch, CONTEXT, miss_rate or 0.0)
        tiers = Tiers(shape, SPEC, workload, CONFIG, "cuda", capacity=CONTEXT + 400, pool=pool)
        tiers.seed(SEED)
        trace = None
        if miss_rate is not None:
            trace = rotating_trace(shape, SPEC, workload, CONFIG, blocks=tiers.blocks, device="cuda")
        return Decoder(make_plan(shape, SPEC, workload, CONFIG), weights, tiers, trace)

    return made


def decode(decoder: Decoder, steps: int) -> tuple[Tensor, Tensor, list[int]]:
    """Tokens [steps, B], last logits, and blocks fetched by each layer, from the seeded history on."""
    decoder.tiers.seed(SEED)
    decoder.tokens.copy_(torch.arange(len(decoder.tokens)) * 17)
    tokens = []
    for _ in range(steps):
        decoder.step()
        tokens.append(decoder.tokens.clone())
    torch.cuda.synchronize()
    return torch.stack(tokens), decoder.logits.clone(), decoder.tiers.miss_total.tolist()


def by_the_gpu(decoder: Decoder) -> Decoder:
    """The same plan, with every block read from host memory by the GPU in place of gather, upload and scatter."""
    run, tiers = decoder.run, decoder.tiers

    def fetch(op: Op) -> None:
        layer = layer_of(op)
        count = tiers.miss_count[layer : layer + 1]
        src, dst = run.miss_src[layer], run.miss_dst[layer]
        prefetch(tiers.pool, tiers.layers[layer].rows, src, dst, count, ctas=16, warps=4, stages=4)

    nothing = dict.fromkeys(("gather", "upload"), lambda op: None)
    decoder.bindings = {**decoder.bindings, **nothing, "scatter": fetch}
    return decoder


@pytest.mark.parametrize("miss_rate", [None, 0.06, 0.12])
def test_a_step_in_pieces_gives_the_very_bits_of_the_plan_issued_on_one_stream(
    make: Make, miss_rate: float | None
) -> None:
    pieces = make(miss_rate=miss_rate)
    pieces.capture()
    assert isinstance(pieces.graph, Pieces)
    in_pieces = decode(pieces, 200)
    del pieces
    serial = decode(make(miss_rate=miss_rate), 200)
    assert torch.equal(in_pieces[0], serial[0])
    assert torch.equal(in_pieces[1], serial[1])
    assert in_pieces[2] == serial[2]
    assert all(count > 0 for count in in_pieces[2][1:])


@pytest.mark.parametrize("miss_rate", [None, 0.12])
def test_what_the_host_gathers_gives_the_very_bits_of_what_the_gpu_reads_by_itself(
    make: Make, miss_rate: float | None
) -> None:
    gathered = make(miss_rate=miss_rate)
    gathered.capture()
    by_host = decode(gathered, 200)
    del gathered
    read = by_the_gpu(make(miss_rate=miss_rate))
    read.capture()
    by_gpu = decode(read, 200)
    assert torch.equal(by_host[0], by_gpu[0])
    assert torch.equal(by_host[1], by_gpu[1])
    assert by_host[2] == by_gpu[2]


def test_tokens_are_those_of_the_plain_reference_across_block_boundaries(make: Make, weights: Weights) -> None:
    decoder = make(batch=2)
    tiers = decoder.tiers
    decoder.capture()
    tiers.seed(SEED)
    assert tiers.partial is not None
    reference = ReferenceDecoder(weights, SPEC, CONFIG, history_of(tiers), basis=tiers.partial.basis)
    tokens = torch.tensor([3, 14], device="cuda")
    for _ in range(60):
        decoder.tokens.copy_(tokens)
        decoder.step()
        chosen = chosen_blocks(tiers, decoder.chosen_slots, decoder.chosen_count)
        expected = reference.step(tokens, chosen)
        assert (decoder.logits.float() - expected).norm() / expected.norm() < 0.02
        tokens = expected.argmax(-1)
    # The largest of 64 scores has half the spread of one, so the same rounding counts for more.
    assert reference.overlooked < 0.15


def test_a_step_in_pieces_can_be_timed_as_a_graph_can(make: Make) -> None:
    decoder = make(miss_rate=0.06)
    decoder.capture()
    assert decoder.graph is not None
    samples = replay_us(decoder.graph, 5)
    assert len(samples) == 5
    assert min(samples) > 0


def test_a_step_captured_before_the_first_prompt_reads_the_directions_that_the_prompt_gives(
    shape: ModelShape, weights: Weights
) -> None:
    """Rows of different lengths, the longer of more blocks than are chosen, as decoded without a graph."""
    config = Config("infinigen", top_k=48)
    prompts = [[(7 * i + i // 50) % shape.vocab for i in range(n)] for n in (4000, 300)]
    batches = [Batch(weights, config, rows=2, capacity=4100, spec=SPEC) for _ in range(2)]
    captured, plain = batches
    assert isinstance(captured.decoder.graph, Pieces)
    plain.decoder.graph = None
    found = [batch.generate(prompts, 60) for batch in batches]
    learnt = [batch.tiers.partial.basis for batch in batches if batch.tiers.partial is not None]
    assert found[0] == found[1]
    assert torch.equal(learnt[0], learnt[1])
    assert not torch.equal(learnt[0], random_basis(shape, shape.layers - 1, "cuda"))
    unit = torch.eye(shape.partial_dims, device="cuda").expand(*learnt[0].shape[:2], -1, -1)
    torch.testing.assert_close(learnt[0].mT @ learnt[0], unit, rtol=0, atol=1e-4)
