"""Rows of one batch: each sequence gets the tokens it gets alone, whatever the others do."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("triton", reason="the engine's kernels need triton")

import torch

from sparda.engine import batch as batch_module
from sparda.engine import room
from sparda.engine.batch import Batch, Generation
from sparda.engine.config import Config
from sparda.engine.errors import SpardaError
from sparda.engine.prefill import prefill
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.weights import Weights, random_weights

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter: set TRITON_INTERPRET=1"
)

SHAPE = ModelShape("tiny", layers=2, d_model=64, heads=2, kv_heads=1, head_dim=64, ffn=64, vocab=211)
SPEC = SparseSpec(block=16, kernel=8, stride=4, init_blocks=1, local_blocks=1)
CONFIG = Config("sparda", top_k=4)
LONG, SHORT, OTHER = (list(range(3, 3 + n)) for n in (109, 14, 46))
"""Seven blocks, of which four are chosen; less than a block, which is soon full; and three blocks, all chosen."""


@functools.cache
def weights() -> Weights:
    return random_weights(SHAPE, "cpu", seed=1)


def batch_of(rows: int = 2, capacity: int = 128, config: Config = CONFIG, stop: Sequence[int] = ()) -> Batch:
    return Batch(weights(), config, rows=rows, capacity=capacity, spec=SPEC, stop=stop)


def config_of(policy: str) -> Config:
    """A shallow choice depends on the row's reserve and on the common step; without either on the sequence alone."""
    return Config(policy, top_k=4, score_layer=0, refresh_steps=0, reserve=0.0)


@functools.cache
def alone(length: int, max_new: int, policy: str = "sparda") -> list[int]:
    """What a prompt becomes in a batch of the same shape that it has to itself."""
    generation = batch_of(config=config_of(policy)).generate([range(3, 3 + length)], max_new)[0]
    assert generation.reason == "length"
    return generation.tokens


@pytest.mark.parametrize("policy", ["sparda", "sparse", "dense", "nosa", "shallow"])
def test_sequences_of_different_lengths_get_the_tokens_that_each_gets_alone(policy: str) -> None:
    found = batch_of(config=config_of(policy)).generate([LONG, SHORT], 5)
    assert [g.tokens for g in found] == [alone(109, 5, policy), alone(14, 5, policy)]
    assert [g.reason for g in found] == ["length", "length"]


def test_host_memory_gives_the_tokens_of_the_cache_that_is_wholly_on_the_gpu() -> None:
    batch = batch_of()
    twin = batch_of(config=Config("sparda-resident", top_k=4))
    assert batch.generate([LONG, SHORT], 6) == twin.generate([LONG, SHORT], 6)
    assert int(batch.tiers.miss_total[1]) > 0


@pytest.mark.parametrize("policy", ["nosa", "shallow"])
def test_a_prompt_in_a_row_that_others_had_gets_the_tokens_it_gets_alone(policy: str) -> None:
    found = batch_of(rows=1, config=config_of(policy)).generate([OTHER, LONG], 5)
    assert found[1].tokens == alone(109, 5, policy)


def test_the_biases_of_a_prompt_are_those_of_its_values() -> None:
    batch = batch_of(config=config_of("nosa"))
    row = batch.admit(LONG, 2)
    eviction, values = weights().layers[1].eviction, prefill(weights(), torch.tensor(LONG)).values[1, 0].float()
    assert eviction is not None
    scale, head = eviction
    bias = scale * torch.nn.functional.softplus(values @ head[0])
    torch.testing.assert_close(batch.tiers.bias[1, row, 0, :109], bias)
    torch.testing.assert_close(batch.tiers.bias_keys[1, row, 0, 25], bias[100:108].mean())
    assert SPEC.compressed(109) == 26


def test_a_row_that_is_given_to_another_prompt_in_mid_flight_leaves_the_others_tokens_alone() -> None:
    batch = batch_of()
    kept, ended = batch.admit(LONG, 9), batch.admit(SHORT, 3)
    batch.step()
    assert batch.free == []
    batch.step()
    assert batch.free == [ended]
    before = [batch.tiers.slot_of_block[:, kept].clone(), batch.tiers.slot_cache[:, kept].clone()]
    assert batch.admit(OTHER, 7) == ended
    assert torch.equal(before[0], batch.tiers.slot_of_block[:, kept])
    assert torch.equal(before[1], batch.tiers.slot_cache[:, kept])
    other = batch.generations[ended]
    while batch.live:
        batch.step()
    assert other is not None
    assert other.tokens == alone(46, 7)
    assert batch.generations[kept] == Generation(109, 9, alone(109, 9), "length")


def test_more_prompts_than_rows_are_decoded_one_after_the_other_in_their_order() -> None:
    found = batch_of().generate([SHORT, OTHER, LONG, SHORT], 3)
    assert [g.prompt for g in found] == [14, 46, 109, 14]
    assert [g.tokens for g in found] == [alone(14, 3), alone(46, 3), alone(109, 3), alone(14, 3)]


def test_a_step_tells_each_rows_token_after_the_first() -> None:
    batch = batch_of()
    row = batch.admit(OTHER, 4)
    first = batch.generations[row]
    assert first is not None
    assert first.tokens == alone(46, 4)[:1]
    assert [batch.step() for _ in range(4)] == [*([(row, token)] for token in alone(46, 4)[1:]), []]


def test_a_stop_token_ends_its_row_and_is_not_kept() -> None:
    tokens = alone(14, 5)
    last = tokens[3]
    found = batch_of(stop=[last]).generate([SHORT], 5)[0]
    assert (found.tokens, found.reason) == (tokens[: tokens.index(last)], "stop")
    batch = batch_of(stop=tokens[:1])
    assert batch.admit(SHORT, 5) == 0
    assert batch.generations[0] == Generation(14, 5, [], "stop")
    assert batch.free == [0, 1]


@pytest.mark.parametrize("capacity", [46, 48, 49])
def test_a_full_row_ends_before_it_writes_outside(capacity: int) -> None:
    batch = batch_of(capacity=capacity)
    last = batch.tiers.positions
    positions = []
    batch.admit(OTHER, 100)
    while batch.live:
        positions.append(int(last.max()))
        batch.step()
    assert positions == list(range(46, capacity))
    found = batch.generations[0]
    assert found is not None
    assert (found.reason, len(found.tokens)) == ("capacity", capacity - 46 + 1)
    assert found.tokens == alone(46, 7)[: len(found.tokens)]


def test_an_unused_row_stays_at_its_first_token_and_fetches_nothing() -> None:
    batch = batch_of(rows=1)
    for _ in range(3):
        batch.decoder.step()
    assert batch.tiers.positions.tolist() == [0]
    assert batch.tiers.miss_total.tolist() == [0, 0]
    assert batch.tiers.slot_of_block[1, 0, 0].tolist() == [0] + [-1] * (batch.tiers.blocks - 1)


def test_a_top_k_above_the_blocks_of_the_capacity_chooses_them_all() -> None:
    batch = batch_of(capacity=40, config=Config("sparda", top_k=96))
    assert batch.config.top_k == 3
    assert batch.generate([SHORT], 4)[0].tokens == alone(14, 4)


@pytest.mark.parametrize(
    ("prompt", "max_new", "says"),
    [
        ([], 1, "a prompt of 0 tokens; a row of this batch holds 1 to 48"),
        ([1] * 49, 1, "a prompt of 49 tokens"),
        ([1, 211], 1, "token 211 is not in the vocabulary of tiny; allowed are 0 to 210"),
        ([1], 0, "0 new tokens are asked for"),
    ],
)
def test_a_prompt_that_cannot_be_decoded_is_refused_before_any_is_begun(
    prompt: list[int], max_new: int, says: str
) -> None:
    batch = batch_of(capacity=48)
    with pytest.raises(SpardaError, match=says):
        batch.generate([SHORT, prompt], max_new)
    assert batch.generations == [None, None]


def test_a_prompt_without_a_free_row_is_refused() -> None:
    batch = batch_of(rows=1)
    batch.admit(SHORT, 2)
    with pytest.raises(SpardaError, match="all 1 rows are in use"):
        batch.admit(SHORT, 2)


def test_memory_is_asked_for_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(batch_module, "Tiers", never)
    monkeypatch.setattr(room, "host_free_bytes", lambda: 1 << 20)
    with pytest.raises(SpardaError, match=r"2 rows of 65536 tokens need .* GiB of host memory, .* lower the rows"):
        batch_of(capacity=65536)


def test_the_gpu_and_pinned_memory_are_asked_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparda.engine.config import Workload

    free = {"gpu": 1 << 40, "host": 1 << 40}
    monkeypatch.setattr(room, "gpu_free_bytes", lambda _device: free["gpu"])
    monkeypatch.setattr(room, "host_free_bytes", lambda: free["host"])
    ask = functools.partial(room.check_room, SHAPE, SPEC, Workload(2, 65536, 0.0), CONFIG, torch.device("cuda"))
    ask()
    free["host"] = 1 << 20
    with pytest.raises(SpardaError, match="host memory to pin"):
        ask()
    free["gpu"] = 1 << 20
    with pytest.raises(SpardaError, match="GiB of GPU memory"):
        ask()
