"""What is in the slots and in host memory before the first step."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("triton", reason="the engine's kernels need triton")

import torch
from torch import Tensor

from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.policies import resident_layers
from sparda.engine.reference import history_of
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.tiers import Tiers, new_pool

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter: set TRITON_INTERPRET=1"
)

SHAPE = ModelShape("tiny", layers=3, d_model=96, heads=6, kv_heads=2, head_dim=64, ffn=128, vocab=211)
SPEC = SparseSpec(block=16, kernel=8, stride=4, init_blocks=1, local_blocks=2)
CONTEXT = 16 * 11 + 13
BLOCKS = 12


def tiers_of(
    policy: str = "sparda",
    *,
    lookahead: int = 1,
    resident: int = 0,
    batch: int = 2,
    context: int = CONTEXT,
    pool: Tensor | None = None,
    seed: int = 7,
    eviction: tuple[tuple[Tensor, Tensor], ...] = (),
) -> Tiers:
    config = Config(policy, top_k=6, lookahead=lookahead, resident_blocks=resident, score_layer=1)
    tiers = Tiers(SHAPE, SPEC, Workload(batch, context, 0.0), config, "cpu", capacity=context + 32, pool=pool)
    tiers.seed(seed, eviction)
    return tiers


@pytest.mark.parametrize("resident", [0, 8, 40])
@pytest.mark.parametrize("context", [CONTEXT, 16 * 11 + 15, 16 * 12])
def test_the_slots_hold_the_forced_blocks_and_the_last_one_is_free(context: int, resident: int) -> None:
    tiers = tiers_of(context=context, resident=resident)
    current = context // 16
    assert tiers.slots == (min(resident, tiers.blocks - 1) or 6) + 1
    for tier in tiers.layers[1:]:
        for held in tier.block_of_slot.flatten(0, 1).tolist():
            assert {0, current - 2, current - 1, current} <= set(held)
            assert held[-1] == -1
            assert [b for b in held if b >= 0] == sorted(set(held) - {-1})
            assert len(set(held) - {-1}) == min(tiers.slots - 1, current + 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_maps_between_slots_and_blocks_are_inverse(policy: str) -> None:
    tiers = tiers_of(policy)
    for tier in tiers.layers:
        pairs = zip(tier.block_of_slot.flatten(0, 1).tolist(), tier.slot_of_block.flatten(0, 1).tolist(), strict=True)
        for block_of_slot, slot_of_block in pairs:
            held = {(slot, block) for slot, block in enumerate(block_of_slot) if block >= 0}
            assert held == {(slot, block) for block, slot in enumerate(slot_of_block) if slot >= 0}


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_slot_holds_what_host_memory_holds_of_its_block(lookahead: int) -> None:
    tiers = tiers_of(lookahead=lookahead)
    history = tiers.pool.view(-1, 2, 2, tiers.blocks, 2, 16, 64)
    assert history.shape[0] == 3 - max(1, lookahead)
    for layer, tier in enumerate(tiers.layers[tiers.whole :]):
        for b, h, slot in (tier.block_of_slot >= 0).nonzero().tolist():
            block = int(tier.block_of_slot[b, h, slot])
            assert torch.equal(tier.cache[b, h, slot], history[layer, b, h, block])
            assert int(tier.stamp[b, h, slot]) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_layers_are_wholly_on_the_gpu_and_have_no_place_in_host_memory(policy: str) -> None:
    tiers = tiers_of(policy, lookahead=2)
    whole = resident_layers(Config(policy, top_k=6, lookahead=2, score_layer=1), 3)
    assert [tier.pool_base < 0 for tier in tiers.layers] == [layer < whole for layer in range(3)]
    assert [tier.slots for tier in tiers.layers] == [tiers.blocks] * whole + [7] * (3 - whole)
    assert tiers.pool.shape[0] == max(1, (3 - whole) * 4 * tiers.blocks)
    assert not tiers.aliased


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "sparse-resident"])
def test_every_policy_decodes_the_same_history_of_a_seed(policy: str) -> None:
    reference = tiers_of("sparse-resident")
    tiers = tiers_of(policy, lookahead=2)
    for ours, theirs in zip(history_of(tiers), history_of(reference), strict=True):
        assert ours[0].shape == (2, 2, CONTEXT, 64)
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    assert torch.equal(tiers.keys, reference.keys)


def test_another_seed_and_another_layer_give_another_history() -> None:
    layers = [k for k, _ in history_of(tiers_of(seed=7)) + history_of(tiers_of(seed=8))]
    for i, one in enumerate(layers):
        assert not any(torch.equal(one, other) for other in layers[:i])


def test_a_compressed_key_is_the_mean_of_its_window_of_keys() -> None:
    tiers = tiers_of()
    for tier, (k, _) in zip(tiers.layers, history_of(tiers), strict=True):
        for index in (0, 1, 17, SPEC.compressed(CONTEXT) - 1):
            window = k[:, :, 4 * index : 4 * index + 8].mean(2)
            torch.testing.assert_close(tier.keys[:, :, index].float(), window, rtol=0.01, atol=1e-3)


def test_partial_keys_are_kept_of_every_offloaded_layer_for_the_policy_that_asks_for_them_and_no_other() -> None:
    assert tiers_of("sparse").partial is None
    tiers = tiers_of("infinigen")
    assert tiers.partial is not None
    assert tiers.partial.rows.dtype == torch.bfloat16
    for layer, (k, _) in enumerate(history_of(tiers)[1:]):
        expected = torch.einsum("bhtd,hdr->bhtr", k, tiers.partial.basis[layer])
        torch.testing.assert_close(tiers.partial.rows[layer, :, :, :CONTEXT].float(), expected, rtol=8e-3, atol=1e-2)


def test_partial_keys_of_an_aliased_pool_are_random_and_finite() -> None:
    values = SHAPE.block_bytes(SPEC) // 2
    tiers = tiers_of("infinigen", pool=new_pool(10, values, torch.device("cpu")))
    assert tiers.partial is not None
    assert bool(tiers.partial.rows.isfinite().all())
    assert float(tiers.partial.rows.float().std()) == pytest.approx(1.0, abs=0.1)


HEAD = (torch.tensor([0.5, -2.0]), torch.linspace(-1, 1, 256).view(2, 128))


@pytest.mark.parametrize("eviction", [(), (HEAD, HEAD, HEAD)])
def test_biases_are_kept_for_the_policy_that_asks_and_compressed_ones_are_their_means(
    eviction: tuple[tuple[Tensor, Tensor], ...],
) -> None:
    tiers = tiers_of("nosa", eviction=eviction)
    assert tiers.bias.shape == (3, 2, 2, 16 * tiers.blocks)
    assert tiers.bias_keys.shape == tiers.keys.shape[:-1]
    for index in (0, 1, SPEC.compressed(CONTEXT) - 1):
        window = tiers.bias[..., 4 * index : 4 * index + 8].mean(-1)
        torch.testing.assert_close(tiers.bias_keys[..., index], window)
    assert torch.equal(tiers.bias, tiers_of("nosa", eviction=eviction).bias)
    assert tiers_of("sparse").bias.numel() == tiers_of("sparse").bias_keys.numel() == 0


def test_biases_follow_from_the_values_where_the_eviction_heads_are_given() -> None:
    tiers = tiers_of("nosa", eviction=(HEAD, HEAD, HEAD))
    for layer, (_, v) in enumerate(history_of(tiers)):
        wide = torch.cat([v[:, 0], v[:, 1]], -1)
        for h in range(2):
            bias = HEAD[0][h] * torch.nn.functional.softplus(wide @ HEAD[1][h])
            torch.testing.assert_close(tiers.bias[layer, :, h, :CONTEXT], bias)


def test_a_pool_that_is_shared_leaves_biases_random_and_finite() -> None:
    values = SHAPE.block_bytes(SPEC) // 2
    tiers = tiers_of("nosa", pool=new_pool(10, values, torch.device("cpu")), eviction=(HEAD, HEAD, HEAD))
    assert bool(tiers.bias.isfinite().all())
    assert float(tiers.bias_keys.std()) > 0


def test_a_pool_too_small_for_every_block_is_said_to_be_aliased_and_still_fills_the_slots() -> None:
    exact = 2 * 4 * (SPEC.blocks(CONTEXT + 32) + 1)
    values = SHAPE.block_bytes(SPEC) // 2
    cpu = torch.device("cpu")
    assert not tiers_of(pool=new_pool(exact, values, cpu)).aliased
    tiers = tiers_of(pool=new_pool(exact - 1, values, cpu))
    assert tiers.aliased
    assert bool(tiers.pool.isfinite().all())
    pair_rows = torch.arange(4).view(2, 2, 1) * tiers.blocks
    for tier in tiers.layers[1:]:
        rows = (tier.pool_base + pair_rows + tier.block_of_slot[:, :, :-1]) % (exact - 1)
        assert torch.equal(tier.cache[:, :, :-1].flatten(3), tiers.pool[rows.long()])


def test_putting_the_residents_back_forgets_positions_steps_and_misses() -> None:
    tiers = tiers_of()
    before = [tier.block_of_slot.clone() for tier in tiers.layers]
    tiers.positions += 20
    tiers.step += 20
    tiers.miss_count += 1
    tiers.miss_total += 5
    for tier in tiers.layers:
        tier.block_of_slot.fill_(3)
        tier.stamp.fill_(19)
    tiers.reset_residents()
    assert tiers.positions.tolist() == [CONTEXT, CONTEXT]
    assert (int(tiers.step), tiers.miss_count.tolist(), tiers.miss_total.tolist()) == (0, [0, 0, 0], [0, 0, 0])
    assert all(torch.equal(tier.block_of_slot, held) for tier, held in zip(tiers.layers, before, strict=True))
    assert max(int(tier.stamp.max()) for tier in tiers.layers) == 0


def test_misses_are_a_mean_over_offloaded_layers_and_steps_since_counting_began() -> None:
    tiers = tiers_of()
    assert tiers.misses_per_layer() == 0.0
    tiers.step += 4
    tiers.miss_total += 9
    tiers.count_misses()
    assert tiers.misses_per_layer() == 0.0
    tiers.step += 5
    tiers.miss_total += torch.tensor([0, 10, 20])
    assert tiers.misses_per_layer() == 3.0


def test_memory_that_cannot_be_locked_is_an_error_that_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nand a long trace")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(SpardaError, match=r"cannot lock 4\.0 GiB of host memory .*\(CUDA error: out of memory\)"):
        new_pool(1 << 20, 1 << 11, torch.device("cuda"))
