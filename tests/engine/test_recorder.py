"""Recording what the engine chooses, and letting it follow what was recorded or drawn: it misses what is foretold."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("triton", reason="the engine's kernels need triton")

import numpy as np

from sparda.engine.batch import Batch
from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.dynamics.choices import Choices
from sparda.engine.dynamics.generator_params import GeneratorParams
from sparda.engine.dynamics.residents import miss_counts
from sparda.engine.errors import SpardaError
from sparda.engine.policies import make_plan
from sparda.engine.recorder import recording
from sparda.engine.reference import chosen_blocks
from sparda.engine.replay import ReplayTrace, drawn, follows, replay_trace
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.tiers import Tiers
from sparda.engine.weights import Weights, random_weights

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter: set TRITON_INTERPRET=1"
)

SHAPE = ModelShape("tiny", layers=2, d_model=32, heads=2, kv_heads=1, head_dim=16, ffn=32, vocab=31)
SPEC = SparseSpec(block=16, kernel=8, stride=4, init_blocks=1, local_blocks=1)
CONTEXT, TOP_K, STEPS = 16 * 30 + 14, 8, 4
"""The third step opens a block, so the second gives it a slot."""
PARAMS = GeneratorParams("none", 16, 1, 1, TOP_K, CONTEXT, (1.0, 2.0, 5.0), ((0.8, 0.5, 0.0),), stays=0.5)


@functools.cache
def weights() -> Weights:
    return random_weights(SHAPE, "cpu", seed=1)


def config_of(policy: str = "sparda", resident: int = 0) -> Config:
    return Config(policy, top_k=TOP_K, resident_blocks=resident, score_layer=0)


def decoder_of(config: Config, choices: Choices | None = None, batch: int = 2) -> Decoder:
    workload = Workload(batch, CONTEXT, 0.0)
    tiers = Tiers(SHAPE, SPEC, workload, config, "cpu", capacity=CONTEXT + STEPS)
    tiers.seed(3)
    case = (SHAPE, SPEC, workload, config)
    made = replay_trace(*case, blocks=tiers.blocks, device="cpu", choices=choices) if choices else None
    return Decoder(make_plan(SHAPE, SPEC, workload, config), weights(), tiers, made)


def drawn_for(config: Config, batch: int = 2, steps: int = STEPS) -> Choices:
    return drawn(SHAPE, SPEC, Workload(batch, CONTEXT, 0.0), config, params=PARAMS, steps=steps, seed=4)


@interpreted
@pytest.mark.parametrize(("policy", "resident"), [("sparda", 0), ("sparse", 11)])
def test_on_a_replayed_trace_the_engine_misses_exactly_what_is_counted_from_it(policy: str, resident: int) -> None:
    config = config_of(policy, resident)
    choices = drawn_for(config)
    decoder = decoder_of(config, choices)
    counted = miss_counts(choices, config.slots).sum(2)
    with recording(decoder) as recorder:
        before = decoder.tiers.miss_total.clone()
        for step in range(STEPS):
            decoder.step()
            missed = (decoder.tiers.miss_total - before).tolist()
            whole = decoder.tiers.whole
            assert missed == [0] * whole + counted[step, whole:].tolist(), step
            before = decoder.tiers.miss_total.clone()
    assert counted[:, 1:].sum() > STEPS
    assert np.array_equal(recorder.choices().blocks, choices.blocks), "and chooses what it says"


@interpreted
@pytest.mark.parametrize("policy", ["sparda", "sparse", "nosa", "infinigen", "sparda-resident", "shallow"])
def test_what_is_recorded_is_what_every_policy_chose(policy: str) -> None:
    decoder, expected = decoder_of(config_of(policy), batch=1), []
    with recording(decoder) as recorder:
        for _ in range(2):
            decoder.step()
            expected.append(chosen_blocks(decoder.tiers, decoder.chosen_slots, decoder.chosen_count))
    found = recorder.choices(seed=7, conditions="two steps")
    f = found.facts
    assert f.layers == ((1,) if policy == "shallow" else (0, 1))
    assert (f.source, f.model, f.seed, f.conditions) == (policy, "tiny", 7, "two steps")
    assert (f.block, f.forced, f.top_k, f.context_tokens) == (16, 3, TOP_K, (CONTEXT,))
    for step, layers in enumerate(expected):
        for place, layer in enumerate(f.layers):
            chosen = [row.nonzero().flatten().tolist() for row in layers[layer][0]]
            assert found.blocks[step, place].tolist() == chosen
    assert decoder.graph is None, "nothing stays behind"


@interpreted
def test_every_prompt_of_a_batch_is_a_sequence_of_its_own() -> None:
    batch = Batch(weights(), config_of(), rows=2, capacity=160, spec=SPEC)
    # The third prompt takes the row of the second, and is as long as if that went on.
    long, short, later = [3] * 140, [4] * 60, [5] * 62
    with recording(batch.decoder) as recorder:
        assert [batch.admit(prompt, new) for prompt, new in ((long, 5), (short, 3))] == [0, 1]
        batch.step()
        batch.step()
        assert batch.admit(later, 3) == 1
        while batch.live:
            batch.step()
    found = recorder.choices()
    assert found.facts.context_tokens == (140, 60, 62)
    assert found.lengths().tolist() == [4, 2, 2]
    assert not batch.tiers.side
    counted = miss_counts(found, 8, start="newest")
    fetched = int(batch.tiers.miss_total.sum())
    assert counted[:, 1:].sum() == fetched


@interpreted
def test_a_policy_that_chooses_nothing_and_no_step_are_refused() -> None:
    with (
        pytest.raises(SpardaError, match="policy dense attends to all blocks"),
        recording(decoder_of(config_of("dense"))),
    ):
        pass
    with recording(decoder_of(config_of())) as recorder, pytest.raises(SpardaError, match="no step was recorded"):
        recorder.choices()


def test_a_trace_is_spread_over_layers_sequences_and_heads() -> None:
    choices = drawn_for(config_of(), batch=2)
    shape = replace(SHAPE, layers=4, kv_heads=2)
    trace = replay_trace(shape, SPEC, Workload(3, CONTEXT), config_of(), blocks=40, device="cpu", choices=choices)
    assert isinstance(trace, ReplayTrace)
    assert (trace.period, trace.steps) == (4 * STEPS, STEPS)
    for step in range(STEPS):
        named = trace.scores[trace.phase(2) + step]
        for b in range(3):
            for h in range(2):
                expected = choices.blocks[step, 1, b % 2].tolist()
                assert named[b, h].nonzero().flatten().tolist() == expected


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"block": 8}, "its block is 8 and 16 is decoded with"),
        ({"local_blocks": 0}, "its local_blocks is 0"),
        ({"positions_per_step": 2}, "its positions_per_step is 2"),
        ({"context_tokens": (CONTEXT, CONTEXT + 16)}, f"it begins at a context of {CONTEXT}, {CONTEXT + 16} tokens"),
    ],
)
def test_choices_of_another_geometry_are_not_replayed(facts: dict[str, Any], said: str) -> None:
    choices = drawn_for(config_of())
    other = Choices(replace(choices.facts, **facts), choices.blocks)
    assert said in follows(other, SPEC, Workload(2, CONTEXT), config_of())
    with pytest.raises(SpardaError, match="fit it and generate one"):
        replay_trace(SHAPE, SPEC, Workload(2, CONTEXT), config_of(), blocks=40, device="cpu", choices=other)


def test_choices_that_the_engine_could_not_make_are_not_replayed() -> None:
    choices, case = drawn_for(config_of()), (SPEC, Workload(2, CONTEXT), config_of())
    assert follows(choices, *case) == ""
    fewer, unforced = choices.blocks.copy(), choices.blocks.copy()
    fewer[2, 0, 0, -1] = -1
    assert "chooses fewer blocks than top_k" in follows(Choices(choices.facts, fewer), *case)
    unforced[2, 0, 0] = np.arange(1, TOP_K + 1)
    assert "leaves out a block that is always chosen" in follows(Choices(choices.facts, unforced), *case)
    with pytest.raises(SpardaError, match="have room for 31; decode fewer steps"):
        replay_trace(SHAPE, *case, blocks=31, device="cpu", choices=choices)
