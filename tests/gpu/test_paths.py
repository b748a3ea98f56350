"""Every transfer path on a real GPU: whatever brings the missing blocks, the step gives the very same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparda.engine.config import Config, Workload
from sparda.engine.copy_engine import BlockCopies
from sparda.engine.cuda_runtime import cuda_runtime
from sparda.engine.decoder import Decoder
from sparda.engine.pieces import Pieces
from sparda.engine.policies import make_plan
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.tiers import Tiers
from sparda.engine.trace import rotating_trace
from sparda.engine.weights import Weights

SPEC = SparseSpec()
CONTEXT = 16384 - 40
BATCH, STEPS, SEED = 4, 60, 5
CASES = [
    ("sparda", 1, 0.12),
    ("sparda", 1, None),
    ("sparda", 2, 0.12),
    ("sparda", 3, 0.06),
    ("sparda-on-demand", 1, 0.12),
    ("sparse", 1, None),
    ("nosa", 1, None),
    ("shallow", 1, 0.12),
]
"""(policy, lookahead, miss rate of a trace, or none: the model chooses)"""

Decoded = tuple[Tensor, Tensor, list[int]]
"""Tokens [steps, B], last logits, blocks fetched by each layer."""


@pytest.fixture
def decoded(shape: ModelShape, weights: Weights, pool: Tensor) -> Callable[..., Decoded]:
    """What a decoder makes of the seeded history; in pieces where the host has a part, unless ``serial``."""

    def decode(config: Config, miss_rate: float | None, serial: bool = False) -> Decoded:
        workload = Workload(BATCH, CONTEXT, miss_rate or 0.0)
        tiers = Tiers(shape, SPEC, workload, config, "cuda", capacity=CONTEXT + 400, pool=pool)
        trace = None
        if miss_rate is not None:
            trace = rotating_trace(shape, SPEC, workload, config, blocks=tiers.blocks, device="cuda")
        decoder = Decoder(make_plan(shape, SPEC, workload, config), weights, tiers, trace)
        tiers.seed(SEED)
        if not serial:
            decoder.capture()
            assert isinstance(decoder.graph, Pieces) == (config.path != "uva")
        tiers.seed(SEED)
        decoder.tokens.copy_(torch.arange(BATCH) * 17)
        tokens = []
        for _ in range(STEPS):
            decoder.step()
            tokens.append(decoder.tokens.clone())
        torch.cuda.synchronize()
        return torch.stack(tokens), decoder.logits.clone(), tiers.miss_total.tolist()

    return decode


def config_of(policy: str, lookahead: int, transfer: str) -> Config:
    """The first of six layers scores where one does for all, so that five fetch."""
    return Config(policy, lookahead=lookahead, transfer=transfer, score_layer=0)


def check_same(one: Decoded, other: Decoded) -> None:
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert one[2] == other[2]
    assert sum(one[2]) > 0


@pytest.mark.parametrize(("policy", "lookahead", "miss_rate"), CASES)
def test_every_path_gives_the_very_bits_of_the_kernel_that_reads_in_place(
    decoded: Callable[..., Decoded], policy: str, lookahead: int, miss_rate: float | None
) -> None:
    in_place = decoded(config_of(policy, lookahead, "uva"), miss_rate)
    for transfer in ("gather", "blocks", "batch"):
        check_same(decoded(config_of(policy, lookahead, transfer), miss_rate), in_place)


@pytest.mark.parametrize("transfer", ["gather", "blocks", "batch"])
def test_a_step_in_pieces_gives_the_very_bits_of_the_plan_issued_on_one_stream(
    decoded: Callable[..., Decoded], transfer: str
) -> None:
    config = config_of("sparda", 1, transfer)
    check_same(decoded(config, 0.12), decoded(config, 0.12, serial=True))


@pytest.mark.parametrize("start", [BlockCopies.one_by_one, BlockCopies.at_once])
@pytest.mark.parametrize("default_stream", [False, True])
@pytest.mark.parametrize("count", [0, 1, 1475])
def test_the_listed_blocks_and_no_others_come_over_the_link(
    pool: Tensor, start: Callable[[BlockCopies], None], default_stream: bool, count: int
) -> None:
    sources = pool[:4096]
    sources.view(torch.int32).copy_(torch.arange(4096, dtype=torch.int32)[:, None].expand(-1, pool.shape[1] // 2))
    slots = torch.zeros(2048, pool.shape[1], dtype=pool.dtype, device="cuda")
    src, dst = torch.randperm(4096).int(), torch.randperm(2048).int()
    copies = BlockCopies(sources, 2048, cuda_runtime())
    copies.enlist(src, dst, count, slots)
    torch.cuda.synchronize()
    stream = torch.cuda.default_stream() if default_stream else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        start(copies)
        found = slots.clone()
    torch.cuda.synchronize()
    expected = torch.zeros_like(slots)
    expected[dst[:count].long().cuda()] = sources[src[:count].long()].cuda()
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
