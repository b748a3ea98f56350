"""The captured step on a real GPU: whoever fetches the blocks, and whenever, the tokens are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.policies import make_plan
from sparda.engine.reference import ReferenceDecoder, chosen_blocks, history_of
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.tiers import Tiers
from sparda.engine.trace import rotating_trace
from sparda.engine.weights import Weights

SPEC = SparseSpec()
CONTEXT = 16384 - 40
"""Not at a block boundary, and 40 tokens before one: a run of 300 tokens opens five blocks."""


WARMUP = 5
"""Steps before misses are counted: the first step after a start fetches what any later step already has."""


def decode(
    shape: ModelShape,
    weights: Weights,
    pool: Tensor,
    config: Config,
    steps: int,
    *,
    miss_rate: float | None = None,
    batch: int = 4,
) -> tuple[Tensor, Tensor, float]:
    """Tokens [steps, B] and last logits of a captured run, and how many blocks were fetched per layer and step."""
    workload = Workload(batch, CONTEXT, miss_rate or 0.0)
    tiers = Tiers(shape, SPEC, workload, config, "cuda", capacity=CONTEXT + 400, pool=pool)
    tiers.seed(seed=5)
    trace = None
    if miss_rate is not None:
        trace = rotating_trace(shape, SPEC, workload, config, blocks=tiers.blocks, device="cuda")
    decoder = Decoder(make_plan(shape, SPEC, workload, config), weights, tiers, trace)
    decoder.capture()
    tiers.seed(seed=5)
    decoder.tokens.copy_(torch.arange(batch) * 17)
    tokens = []
    for _ in range(WARMUP):
        decoder.step()
        tokens.append(decoder.tokens.clone())
    tiers.count_misses()
    for _ in range(steps - WARMUP):
        decoder.step()
        tokens.append(decoder.tokens.clone())
    torch.cuda.synchronize()
    return torch.stack(tokens), decoder.logits.clone(), tiers.misses_per_layer()


@pytest.mark.parametrize("lookahead", [1, 2])
def test_prefetching_gives_bit_equal_outputs_to_fetching_the_same_choice_on_demand(
    shape: ModelShape, weights: Weights, pool: Tensor, lookahead: int
) -> None:
    ahead = decode(shape, weights, pool, Config("sparda", lookahead=lookahead), 300)
    demand = decode(shape, weights, pool, Config("sparda-on-demand", lookahead=lookahead), 300)
    assert torch.equal(ahead[0], demand[0])
    assert torch.equal(ahead[1], demand[1])
    assert ahead[2] == demand[2] > 0


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_the_number_of_ctas_and_the_moment_of_fetching_leave_no_trace_in_the_outputs(
    shape: ModelShape, weights: Weights, pool: Tensor, lookahead: int
) -> None:
    configs = [Config("sparda-on-demand", lookahead=lookahead)]
    configs += [Config("sparda", lookahead=lookahead, prefetch_ctas=c, prefetch_warps=w) for c, w in ((1, 1), (16, 4))]
    runs = [decode(shape, weights, pool, config, 100, miss_rate=0.06) for config in configs]
    for other in runs[1:]:
        assert torch.equal(runs[0][0], other[0])
        assert torch.equal(runs[0][1], other[1])


def test_fetching_from_host_gives_the_tokens_of_the_wholly_resident_cache(
    shape: ModelShape, weights: Weights, pool: Tensor
) -> None:
    offloaded = decode(shape, weights, pool, Config("sparse"), 150)
    resident = decode(shape, weights, pool, Config("sparse-resident"), 150)
    assert torch.equal(offloaded[0], resident[0])
    assert offloaded[2] > 0


@pytest.mark.parametrize("miss_rate", [0.0, 0.03, 0.12])
def test_a_trace_misses_as_often_as_it_states(
    shape: ModelShape, weights: Weights, pool: Tensor, miss_rate: float
) -> None:
    config = Config("sparda")
    *_, misses = decode(shape, weights, pool, config, 128, miss_rate=miss_rate)
    stated = miss_rate * config.top_k * 4 * shape.kv_heads
    assert misses == pytest.approx(stated, rel=0.05, abs=0.6)


def test_tokens_are_those_of_the_plain_reference_across_block_boundaries(
    shape: ModelShape, weights: Weights, pool: Tensor
) -> None:
    config, workload = Config("sparda"), Workload(2, CONTEXT, 0.0)
    tiers = Tiers(shape, SPEC, workload, config, "cuda", capacity=CONTEXT + 400, pool=pool)
    tiers.seed(seed=9)
    reference = ReferenceDecoder(weights, SPEC, config, history_of(tiers))
    decoder = Decoder(make_plan(shape, SPEC, workload, config), weights, tiers)
    decoder.capture()
    tiers.seed(seed=9)
    tokens = torch.tensor([3, 14], device="cuda")
    for _ in range(60):
        decoder.tokens.copy_(tokens)
        decoder.step()
        chosen = chosen_blocks(tiers, decoder.chosen_slots, decoder.chosen_count)
        expected = reference.step(tokens, chosen)
        error = (decoder.logits.float() - expected).norm() / expected.norm()
        assert error < 0.02
        tokens = expected.argmax(-1)
    assert reference.overlooked < 0.05
