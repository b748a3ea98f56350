"""Attention over chosen blocks equals dense attention over their tokens, however the work is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from sparda.kernels.attention import (  # noqa: E402
    biased_attention,
    block_attention,
    block_attention_reference,
    dense_attention,
)


@dataclass
class Case:
    """Inputs of one call; all results and scratch start as NaN."""

    q: torch.Tensor
    cache: torch.Tensor
    chosen_slots: torch.Tensor
    chosen_count: torch.Tensor
    positions: torch.Tensor

    def results(self, splits: int) -> dict[str, torch.Tensor]:
        batch, heads = self.cache.shape[:2]
        group, head_dim = self.q.shape[1] // heads, self.q.shape[2]
        device = self.q.device
        return {
            "out": torch.full(tuple(self.q.shape), float("nan"), dtype=torch.bfloat16, device=device),
            "partial": torch.full((batch, heads, splits, group, head_dim), float("nan"), device=device),
            "stats": torch.full((batch, heads, splits, group, 2), float("nan"), device=device),
        }

    def attend(self, splits: int, results: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        results = self.results(splits) if results is None else results
        block_attention(
            self.q,
            self.cache,
            self.chosen_slots,
            self.chosen_count,
            self.positions,
            **results,
            splits=splits,
        )
        return results["out"]

    def check(self, splits: int) -> None:
        results = self.results(splits)
        out = self.attend(splits, results).float()
        expected = block_attention_reference(self.q, self.cache, self.chosen_slots, self.chosen_count, self.positions)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
        assert splits == 1 or not results["stats"].isnan().any()


def _case(
    device: str,
    counts: list[list[int]],
    positions: list[int],
    *,
    group: int = 3,
    block: int = 16,
    head_dim: int = 64,
    top_k: int = 6,
    slots: int = 8,
) -> Case:
    """Random blocks in random slots, with NaN in every slot row that no chosen token uses."""
    random = torch.Generator().manual_seed(sum(positions) + group)
    batch, heads = len(counts), len(counts[0])
    q = torch.randn(batch, heads * group, head_dim, generator=random) * 2
    cache = torch.full((batch, heads, slots, 2, block, head_dim), float("nan"))
    chosen = torch.full((batch, heads, top_k), -1, dtype=torch.int32)
    for b, position in enumerate(positions):
        for h, count in enumerate(counts[b]):
            chosen[b, h, :count] = torch.randperm(slots, generator=random)[:count]
            for entry, slot in enumerate(chosen[b, h, :count].tolist()):
                tokens = position % block + 1 if entry == count - 1 else block
                cache[b, h, slot, :, :tokens] = torch.randn(2, tokens, head_dim, generator=random)
    return Case(
        q.to(device, torch.bfloat16),
        cache.to(device, torch.bfloat16),
        chosen.to(device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.tensor(positions, dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize("splits", range(1, 8))
def test_equals_dense_attention_for_any_number_of_splits_and_of_chosen_blocks(device: str, splits: int) -> None:
    _case(device, [[6, 3], [1, 5]], [100, 31]).check(splits)


@pytest.mark.parametrize(("head_dim", "block"), [(64, 64), (128, 64), (128, 16)])
@pytest.mark.parametrize("group", [1, 3, 16])
def test_equals_dense_attention_for_any_shape(device: str, group: int, head_dim: int, block: int) -> None:
    _case(device, [[4, 2]], [5 * block + 9], group=group, block=block, head_dim=head_dim).check(2)


@pytest.mark.parametrize("group", [17, 5])
def test_equals_dense_attention_for_unusual_group_sizes(device: str, group: int) -> None:
    _case(device, [[5]], [3], group=group).check(3)


@pytest.mark.parametrize("splits", [1, 4])
def test_one_block_of_one_token_returns_that_tokens_value(device: str, splits: int) -> None:
    case = _case(device, [[1, 1]], [0])
    out = case.attend(splits).view(1, 2, 3, 64)
    for h in range(2):
        value = case.cache[0, h, int(case.chosen_slots[0, h, 0]), 1, 0]
        assert torch.equal(out[0, h], value.expand(3, 64))


def test_more_splits_than_one_merge_reads_at_once(device: str) -> None:
    _case(device, [[21]], [15], group=16, head_dim=128, top_k=21, slots=22).check(21)


def test_choosing_every_block_is_dense_attention_over_the_sequence(device: str) -> None:
    length, heads, group, head_dim, block = 75, 2, 3, 64, 16
    random = torch.Generator().manual_seed(5)
    keys, values = (torch.randn(heads, 80, head_dim, generator=random).to(torch.bfloat16) for _ in range(2))
    q = torch.randn(1, heads * group, head_dim, generator=random).to(torch.bfloat16)
    cache = torch.stack([x.view(heads, 5, block, head_dim) for x in (keys, values)], dim=2).unsqueeze(0)
    slots = torch.arange(5, dtype=torch.int32).expand(1, heads, 5).contiguous()
    counts, positions = torch.full((1, heads), 5, dtype=torch.int32), torch.tensor([length - 1], dtype=torch.int32)
    case = Case(*(x.to(device) for x in (q, cache.contiguous(), slots, counts, positions)))
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.view(heads, group, head_dim).float(), keys[:, :length].float(), values[:, :length].float()
    )
    for splits in (1, 3):
        out = case.attend(splits).float().cpu()
        torch.testing.assert_close(out, dense.view(1, -1, head_dim), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("splits", [1, 3])
def test_attention_to_a_whole_cache_in_place_is_attention_to_all_its_blocks(device: str, splits: int) -> None:
    case = _case(device, [[5, 5], [3, 3]], [16 * 4 + 9, 16 * 2 + 3], top_k=5, slots=5)
    case.chosen_slots = torch.arange(5, dtype=torch.int32, device=device).expand(2, 2, 5).contiguous()
    # In place, block m lies in slot m: give every existing block what the attention may read.
    case.cache = torch.nan_to_num(case.cache, nan=0.5)
    results = case.results(splits)
    dense_attention(case.q, case.cache, case.positions, **results, splits=splits)
    assert torch.equal(results["out"], case.attend(splits))


def _biased(case: Case, bias: torch.Tensor, block_of_slot: torch.Tensor, splits: int) -> torch.Tensor:
    results = case.results(splits)
    biased_attention(
        case.q,
        case.cache,
        case.chosen_slots,
        case.chosen_count,
        case.positions,
        block_of_slot,
        bias,
        **results,
        splits=splits,
    )
    return results["out"]


def _biases(case: Case, blocks: int, block: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Random biases of ``blocks`` blocks, NaN for tokens to come and blocks not chosen; and the block in each slot."""
    batch, heads, slots = case.cache.shape[:3]
    random = torch.Generator().manual_seed(blocks)
    bias = torch.full((batch, heads, blocks * block), float("nan"))
    block_of_slot = torch.full((batch, heads, slots), -1, dtype=torch.int32)
    for b, position in enumerate(case.positions.tolist()):
        newest = position // block
        for h, count in enumerate(case.chosen_count[b].tolist()):
            chosen = [*sorted(torch.randperm(newest, generator=random)[: count - 1].tolist()), newest]
            for slot, m in zip(case.chosen_slots[b, h, :count].tolist(), chosen, strict=True):
                block_of_slot[b, h, slot] = m
                end = min(m * block + block, position + 1)
                bias[b, h, m * block : end] = 3 * torch.randn(end - m * block, generator=random)
    return bias.to(case.q.device), block_of_slot.to(case.q.device)


@pytest.mark.parametrize(("splits", "group"), [(1, 3), (3, 3), (2, 16), (5, 1)])
def test_a_bias_is_added_to_the_scaled_logits_of_its_token(device: str, splits: int, group: int) -> None:
    case = _case(device, [[6, 3], [1, 5]], [150, 121], group=group)
    bias, block_of_slot = _biases(case, 11)
    tensors = (case.q, case.cache, case.chosen_slots, case.chosen_count, case.positions)
    expected = block_attention_reference(*tensors, block_of_slot, bias)
    torch.testing.assert_close(_biased(case, bias, block_of_slot, splits).float(), expected, rtol=2e-2, atol=1e-2)
    assert not torch.allclose(expected, block_attention_reference(*tensors), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_bias_of_zero_changes_nothing(device: str, splits: int) -> None:
    case = _case(device, [[6, 4]], [155])
    bias, block_of_slot = _biases(case, 11)
    zero = torch.where(bias.isnan(), bias, 0.0)
    assert torch.equal(_biased(case, zero, block_of_slot, splits), case.attend(splits))


def test_a_bias_of_the_wrong_type_or_shape_is_refused(device: str) -> None:
    case = _case(device, [[6, 4]], [155])
    bias, block_of_slot = _biases(case, 11)
    with pytest.raises(ValueError, match=r"bias must be contiguous torch\.float32"):
        _biased(case, bias.bfloat16(), block_of_slot, 2)
    with pytest.raises(ValueError, match=r"block_of_slot must be contiguous torch\.int32"):
        _biased(case, bias, block_of_slot[:, :, 1:], 2)


@pytest.mark.parametrize("splits", [1, 3])
def test_the_slots_that_hold_the_blocks_do_not_change_a_bit(device: str, splits: int) -> None:
    case = _case(device, [[6, 4], [5, 6]], [90, 47])
    out = case.attend(splits)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1)).to(device)
    place = torch.argsort(order).to(torch.int32)
    moved = torch.where(case.chosen_slots < 0, -1, place[case.chosen_slots.clamp(min=0).long()]).to(torch.int32)
    shuffled = Case(case.q, case.cache[:, :, order].contiguous(), moved, case.chosen_count, case.positions)
    assert torch.equal(shuffled.attend(splits), out)


def test_queries_may_be_a_slice_of_a_wider_projection(device: str) -> None:
    case = _case(device, [[3, 4]], [20])
    wide = torch.full((1, 11, 64), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, 2:8] = case.q
    expected = case.attend(2)
    case.q = wide[:, 2:8]
    assert torch.equal(case.attend(2), expected)


def test_scratch_may_be_used_again_at_once(device: str) -> None:
    case = _case(device, [[6, 2]], [50])
    results = case.results(3)
    first = case.attend(3, results).clone()
    results["out"].fill_(float("nan"))
    assert torch.equal(case.attend(3, results), first)


def test_large_scores_do_not_overflow(device: str) -> None:
    case = _case(device, [[5]], [70])
    case.q *= 100
    assert bool(case.attend(2).isfinite().all())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("q", "q must be torch.bfloat16 like cache"),
        ("cache", "cache must be contiguous bf16"),
        ("chosen_slots", "chosen_slots must be contiguous torch.int32"),
        ("chosen_count", "chosen_count must be contiguous torch.int32"),
        ("positions", "positions must be contiguous torch.int32"),
    ],
)
def test_refuses_inputs_of_the_wrong_type(device: str, name: str, message: str) -> None:
    case = _case(device, [[3, 4]], [20])
    setattr(case, name, getattr(case, name).double())
    with pytest.raises(ValueError, match=message):
        case.attend(2, case.results(2))


@pytest.mark.parametrize("name", ["out", "partial", "stats"])
def test_refuses_results_of_the_wrong_shape(device: str, name: str) -> None:
    case = _case(device, [[3, 4]], [20])
    results = case.results(2)
    results[name] = results[name][:, :1]
    with pytest.raises(ValueError, match=f"{name} must be contiguous"):
        case.attend(2, results)


def test_refuses_shapes_that_do_not_fit(device: str) -> None:
    case = _case(device, [[3, 4]], [20])
    with pytest.raises(ValueError, match="splits must be at least 1, got 0"):
        case.attend(0)
    case.q = case.q[:, :5]
    with pytest.raises(ValueError, match="a multiple of 2"):
        case.attend(2, case.results(2))
    case = _case(device, [[3, 4]], [20])
    case.cache = case.cache[..., :8, :].contiguous()
    with pytest.raises(ValueError, match="powers of two from 16 up, got 8 and 64"):
        case.attend(2)
