"""A prompt enters one row: what is then in its slots, in host memory and among its compressed keys."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("triton", reason="the engine's kernels need triton")

import torch

from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.prefill import Prefilled
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.tiers import Tiers, new_pool

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter: set TRITON_INTERPRET=1"
)

SHAPE = ModelShape("tiny", layers=3, d_model=96, heads=6, kv_heads=2, head_dim=64, ffn=128, vocab=211)
SPEC = SparseSpec(block=16, kernel=8, stride=4, init_blocks=1, local_blocks=2)
CAPACITY = 200
LENGTHS = [1, 7, 8, 15, 16, 63, 64, 150, 191, 192, 200]


def tiers_of(policy: str = "sparda", resident: int = 0, pool: torch.Tensor | None = None) -> Tiers:
    config = Config(policy, top_k=6, resident_blocks=resident, score_layer=1)
    return Tiers(SHAPE, SPEC, Workload(3, CAPACITY, 0.0), config, "cpu", capacity=CAPACITY, pool=pool)


def prompt(length: int, dtype: torch.dtype = torch.bfloat16) -> Prefilled:
    generator = torch.Generator().manual_seed(length)
    keys, values = torch.randn(2, 3, 2, length, 64, generator=generator).to(dtype)
    return Prefilled(keys, values, torch.zeros(211))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_token_of_a_prompt_is_in_the_gpu_layers_or_in_host_memory(policy: str, length: int) -> None:
    tiers, given = tiers_of(policy), prompt(length)
    tiers.admit(1, given)
    for layer, tier in enumerate(tiers.layers):
        whole = tier.cache
        if tier.pool_base >= 0:
            rows = tiers.pool[tier.pool_base : tier.pool_base + tiers.heads * tiers.blocks]
            whole = rows.view(3, 2, tiers.blocks, 2, 16, 64)
        keys, values = whole[1].unbind(2)
        assert torch.equal(keys.flatten(1, 2)[:, :length], given.keys[layer])
        assert torch.equal(values.flatten(1, 2)[:, :length], given.values[layer])
    assert tiers.positions.tolist() == [CAPACITY, length, CAPACITY]


@pytest.mark.parametrize("resident", [0, 9, 40])
@pytest.mark.parametrize("length", LENGTHS)
def test_slots_hold_the_first_and_the_newest_blocks_and_the_last_slot_is_free(length: int, resident: int) -> None:
    tiers = tiers_of(resident=resident)
    tiers.step += 5
    tiers.admit(1, prompt(length))
    count = length // 16 + 1
    held = min(count, tiers.slots - 1)
    for tier in tiers.layers[1:]:
        for head in range(2):
            blocks = tier.block_of_slot[1, head].tolist()
            assert blocks == [0, *range(count - held + 1, count), *[-1] * (tiers.slots - held)]
            assert tier.stamp[1, head].tolist() == [5] * held + [-1] * (tiers.slots - held)
            where = tier.slot_of_block[1, head].tolist()
            assert {b: s for b, s in enumerate(where) if s >= 0} == {b: s for s, b in enumerate(blocks) if b >= 0}


@pytest.mark.parametrize("length", LENGTHS)
def test_a_slot_holds_what_host_memory_holds_of_its_block(length: int) -> None:
    tiers = tiers_of()
    tiers.admit(2, prompt(length))
    pool = tiers.pool.view(2, 3, 2, tiers.blocks, 2, 16, 64)
    for layer, tier in enumerate(tiers.layers[1:]):
        for head, slot in (tier.block_of_slot[2] >= 0).nonzero().tolist():
            block = int(tier.block_of_slot[2, head, slot])
            assert torch.equal(tier.cache[2, head, slot], pool[layer, 2, head, block])


@pytest.mark.parametrize("length", LENGTHS)
def test_a_compressed_key_is_the_mean_of_a_window_that_is_complete(length: int) -> None:
    tiers, given = tiers_of(), prompt(length)
    tiers.admit(0, given)
    for layer, tier in enumerate(tiers.layers):
        for index in range(tier.keys.shape[2]):
            window = given.keys[layer, :, 4 * index : 4 * index + 8].float()
            whole = window.shape[1] == 8
            expected = window.mean(1).bfloat16() if whole else torch.zeros(2, 64, dtype=torch.bfloat16)
            assert torch.equal(tier.keys[0, :, index], expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_other_rows_and_every_address_stay_as_they_are(policy: str) -> None:
    tiers = tiers_of(policy)
    # Memory that nobody has written may hold anything, and what is no number is not even equal to itself.
    tiers.pool.zero_()
    for row in range(3):
        tiers.admit(row, prompt(150 + row))
    state = [x for tier in tiers.layers for x in (tier.cache, tier.block_of_slot, tier.stamp, tier.keys)]
    state += [tiers.positions, tiers.slot_of_block.transpose(0, 1)]
    if tiers.offloaded:
        state.append(tiers.pool.view(tiers.offloaded, 3, -1).transpose(0, 1))
    before = [x.clone() for x in state]
    addresses = [x.data_ptr() for x in state]
    tiers.admit(1, prompt(40))
    tiers.park(1)
    tiers.admit(1, prompt(70))
    for now, then in zip(state, before, strict=True):
        assert torch.equal(now[[0, 2]], then[[0, 2]])
    assert not torch.equal(tiers.keys[:, 1], torch.stack([before[4 * layer + 3][1] for layer in range(3)]))
    assert [x.data_ptr() for x in state] == addresses


def test_a_parked_row_holds_its_first_block_and_is_at_position_0() -> None:
    tiers = tiers_of()
    tiers.admit(1, prompt(150))
    tiers.park(1)
    assert tiers.positions.tolist() == [CAPACITY, 0, CAPACITY]
    assert tiers.layers[0].block_of_slot[1, 0].tolist() == list(range(tiers.blocks))
    assert tiers.layers[1].block_of_slot[1, 0].tolist() == [0] + [-1] * 6


def test_what_a_policy_keeps_besides_is_filled_with_the_row() -> None:
    tiers, given, seen = tiers_of(), prompt(20), []
    tiers.side.append(lambda sequence, prefilled: seen.append((sequence, prefilled)))
    tiers.admit(2, given)
    assert seen == [(2, given)]


@pytest.mark.parametrize(
    ("row", "given", "says"),
    [
        (3, prompt(20), "there is no row 3; the batch has rows 0 to 2"),
        (0, prompt(20, torch.float32), "prefilled with another model"),
        (0, Prefilled(torch.zeros(2, 2, 9, 64), torch.zeros(2, 2, 9, 64), torch.zeros(2)), "prefilled with another"),
        (0, prompt(224), "a prompt of 224 tokens and one more do not fit in a row of 224"),
    ],
)
def test_a_prompt_that_has_no_place_is_refused(row: int, given: Prefilled, says: str) -> None:
    with pytest.raises(SpardaError, match=says):
        tiers_of().admit(row, given)


def test_a_pool_that_sequences_share_takes_no_prompt() -> None:
    exact = 2 * 6 * (SPEC.blocks(CAPACITY) + 1)
    tiers = tiers_of(pool=new_pool(exact - 1, 2 * 16 * 64, torch.device("cpu")))
    with pytest.raises(SpardaError, match=f"a host pool of {exact - 1} blocks is shared .* needs {exact}"):
        tiers.admit(0, prompt(20))
