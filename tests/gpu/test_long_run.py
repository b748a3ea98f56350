"""Two thousand steps in a row: sequences grow, end and are replaced, and each gets the tokens it gets alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from sparda.engine.batch import Batch, Generation
from sparda.engine.config import Config
from sparda.engine.shapes import ModelShape
from sparda.engine.weights import Weights

ROWS, CAPACITY, TOP_K, STEPS = 4, 3072, 40, 2000
LASTING = 700
"""Tokens of the prompt that decodes through the whole run: past top_k blocks, where choosing begins, before its end."""

VISITORS = [
    (2559, 2000),  # fills its row
    (1, 70),  # the shortest, past its first block
    (3071, 9),  # two tokens from the end of its row
    (63, 200),
    (64, 2),  # begins with a block that is still empty
    (2600, 300),
    (31, 34),  # completes its first compressed key at once
    (2048, 500),
    (3072, 5),  # a full row: one token, which needs no step
    (2815, 2000),
    (16, 333),
    (32, 1),  # one token, which needs no step
    (47, 18),
]
"""Tokens of a prompt and most new ones of those that come and go meanwhile, again and again."""


@dataclass
class Visit:
    """A sequence of the run: its prompt and what became of it."""

    prompt: list[int]
    generation: Generation


def begin(batch: Batch, number: int, length: int, max_new: int) -> Visit:
    vocab = batch.weights.shape.vocab
    prompt = torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(number)).tolist()
    generation = batch.generations[batch.admit(prompt, max_new)]
    assert generation is not None
    return Visit(prompt, generation)


def long_run(batch: Batch) -> list[Visit]:
    """STEPS steps; free rows are given away but in the last tenth of every 500 steps, when they stay unused."""
    visits, coming = [begin(batch, 0, LASTING, STEPS + 1)], itertools.cycle(VISITORS)
    for step in range(STEPS):
        while batch.free and step % 500 < 450:
            visits.append(begin(batch, len(visits), *next(coming)))
        assert batch.live
        batch.step()
    return visits


@pytest.mark.parametrize(("policy", "lookahead"), [("sparda", 1), ("sparda", 2), ("sparse", 1)])
def test_in_two_thousand_steps_every_sequence_gets_the_tokens_of_the_resident_twin_that_decodes_it_alone(
    shape: ModelShape, weights: Weights, policy: str, lookahead: int
) -> None:
    config = Config(policy, top_k=TOP_K, lookahead=lookahead)
    batch = Batch(weights, config, rows=ROWS, capacity=CAPACITY)
    visits = long_run(batch)
    assert visits[0].generation.reason == "length"
    assert len(visits[0].generation.tokens) == STEPS + 1
    assert {v.generation.reason for v in visits} >= {"length", "capacity"}
    assert len(visits) > len(VISITORS)
    assert batch.tiers.misses_per_layer() > 0
    whole = batch.tiers.whole
    assert batch.tiers.miss_total[:whole].tolist() == [0] * whole

    # As many rows, so that every product is made by the same kernel; all but one of them unused.
    twin = Batch(weights, Config(f"{policy}-resident", top_k=TOP_K, lookahead=lookahead), rows=ROWS, capacity=CAPACITY)
    for number, visit in enumerate(visits):
        tokens = visit.generation.tokens
        alone = twin.generate([visit.prompt], len(tokens))[0]
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, alone.tokens, strict=False))
        agreed = len(list(same))
        assert alone.tokens == tokens, f"sequence {number}, {len(visit.prompt)} tokens long, departs at new {agreed}"
