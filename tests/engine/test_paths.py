"""Steps of a tiny model by every transfer path: the very bits of the step whose kernel reads host memory in place."""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("triton", reason="the engine's kernels need triton")

import torch
from torch import Tensor

from sparda.engine.batch import Batch, Generation
from sparda.engine.config import Config
from tests.engine.test_decoder import SHAPE, SPEC, config_of, decoder_of, weights

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter: set TRITON_INTERPRET=1"
)

BY_HOST = ("gather", "blocks", "batch")
CASES = [
    ("sparda", 0, 1),
    ("sparda", 1, 2),
    ("sparda", 2, 1),
    ("sparda-on-demand", 1, 1),
    ("sparse", 1, 1),
    ("nosa", 1, 1),
    ("shallow", 1, 1),
]
"""(policy, lookahead, steps)"""


@functools.cache
def run(policy: str, lookahead: int, steps: int, transfer: str) -> tuple[Tensor, Tensor, list[int]]:
    """Tokens, logits and misses by layer of a few steps."""
    decoder = decoder_of(replace(config_of(policy, lookahead), transfer=transfer), 1)
    tokens, logits = [], []
    for _ in range(steps):
        decoder.issue()
        tokens.append(decoder.tokens.clone())
        logits.append(decoder.logits.clone())
    return torch.stack(tokens), torch.stack(logits), decoder.tiers.miss_total.tolist()


@pytest.mark.parametrize("transfer", BY_HOST)
@pytest.mark.parametrize(("policy", "lookahead", "steps"), CASES)
def test_a_step_gives_the_very_bits_of_the_path_that_reads_in_place(
    policy: str, lookahead: int, steps: int, transfer: str
) -> None:
    (tokens, logits, misses), (uva_tokens, uva_logits, uva_misses) = (
        run(policy, lookahead, steps, t) for t in (transfer, "uva")
    )
    assert torch.equal(tokens, uva_tokens)
    assert torch.equal(logits, uva_logits)
    assert misses == uva_misses
    assert sum(misses) > 0


@pytest.mark.parametrize("transfer", BY_HOST)
def test_every_kind_of_operation_is_bound_and_reports_bring_only_what_their_path_reads(transfer: str) -> None:
    decoder = decoder_of(replace(config_of("sparda", 1), transfer=transfer), 1)
    assert {op.kind for op in decoder.plan} <= decoder.bindings.keys()
    assert bool(decoder.run.reports.dst) == (transfer != "gather")


def test_prompts_of_different_lengths_become_the_same_text_by_every_path() -> None:
    def text(transfer: str) -> list[Generation]:
        batch = Batch(weights(), Config(top_k=4, transfer=transfer), rows=2, capacity=70, spec=SPEC)
        prompts = [[(7 * i) % SHAPE.vocab for i in range(n)] for n in (66, 20)]
        return batch.generate(prompts, 2)

    assert text("gather") == text("batch") == text("uva")
