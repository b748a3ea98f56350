"""Selection and residency follow the reference exactly, step after step, and keep the maps consistent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparda.kernels.select import select_blocks, select_reference

BLOCK = 16
EMPTY = -1
POISON = -77


class Decoder:
    """A batch of sequences with its maps, stepped through the kernel and through the reference side by side."""

    def __init__(self, device: str, spots: list[int], *, kv_heads: int, blocks: int, slots: int, top_k: int) -> None:
        """Start with nothing resident, positions `spots`, and poisoned outputs."""
        self.device, self.shape, self.slots, self.top_k = device, (len(spots), kv_heads), slots, top_k
        self.blocks, self.now = blocks, 0
        self.rules: dict[str, Any] = {"top_k": top_k, "init_blocks": 1, "local_blocks": 2, "block": BLOCK}
        self.rules |= {"pool_rows": 97, "pool_base": 11, "phase": 0}
        self.positions = self._ints(0, len(spots)) + torch.tensor(spots, dtype=torch.int32, device=device)
        self.inside = self._ints(EMPTY, *self.shape, slots)
        self.stamp = self._ints(EMPTY, *self.shape, slots)
        self.place = self._ints(EMPTY, *self.shape, blocks)
        self.expected = [self.inside.cpu(), self.stamp.cpu(), self.place.cpu()]
        self.expected = [tensor.clone() for tensor in self.expected]

    def _ints(self, value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self.device)

    def step(self, scores: torch.Tensor) -> tuple[torch.Tensor, set[tuple[int, int]]]:
        """Select at the present positions, compare everything with the reference, and move on by one token."""
        chosen, count = self._ints(POISON, *self.shape, self.top_k), self._ints(POISON, *self.shape)
        rows = self.shape[0] * self.shape[1] * self.slots
        source, target, misses = self._ints(POISON, rows), self._ints(POISON, rows), self._ints(0, 1)
        before = self.place.clone()
        select_blocks(
            scores.to(self.device), self._ints(self.now, 1), self.positions, self.inside, self.stamp, self.place,
            chosen, count, source, target, misses, self._ints(POISON, *self.shape, self.slots), **self.rules,
        )  # fmt: skip
        want, copies = select_reference(scores.cpu(), self.now, self.positions.cpu(), *self.expected, **self.rules)
        for got, expected in zip((self.inside, self.stamp, self.place), self.expected, strict=True):
            assert torch.equal(got.cpu(), expected)
        for b in range(self.shape[0]):
            for h in range(self.shape[1]):
                assert chosen[b, h].tolist() == want[b][h] + [POISON] * (self.top_k - len(want[b][h]))
                assert int(count[b, h]) == len(want[b][h])
        total = int(misses)
        assert total == len(copies)
        assert set(zip(source[:total].tolist(), target[:total].tolist(), strict=True)) == copies
        assert (source[total:] == POISON).all()
        assert (target[total:] == POISON).all()
        self._check_maps(before, chosen, count)
        self.positions += 1
        self.now += 1
        return chosen, copies

    def _check_maps(self, before: torch.Tensor, chosen: torch.Tensor, count: torch.Tensor) -> None:
        for b, t in enumerate(self.positions.tolist()):
            for h in range(self.shape[1]):
                place, inside = self.place[b, h].tolist(), self.inside[b, h].tolist()
                forward = {(m, s) for m, s in enumerate(place) if s >= 0}
                assert forward == {(m, s) for s, m in enumerate(inside) if m >= 0}
                held = [inside[s] for s in chosen[b, h, : int(count[b, h])].tolist()]
                assert held == sorted(set(held))
                assert EMPTY not in held
                assert held[-1] == min(t // BLOCK, self.blocks - 1)
                following = (t + 1) // BLOCK
                assert following >= self.blocks or place[following] >= 0
                moves = zip(before[b, h].tolist(), place, strict=True)
                assert all(new in (old, EMPTY) for old, new in moves if old >= 0)


def _drift(scores: torch.Tensor) -> torch.Tensor:
    return 0.9 * scores + 0.4 * torch.randn_like(scores)


@pytest.mark.parametrize(("slots", "top_k", "kv_heads"), [(9, 8, 1), (17, 8, 2), (22, 16, 1)])
def test_many_steps_of_drifting_scores_match_the_reference(device: str, slots: int, top_k: int, kv_heads: int) -> None:
    torch.manual_seed(slots)
    decoder = Decoder(device, [0, 605], kv_heads=kv_heads, blocks=40, slots=slots, top_k=top_k)
    scores = torch.randn(1, 2, kv_heads, 40)
    missed = 0
    for _ in range(30):
        missed += len(decoder.step(scores)[1])
        scores = _drift(scores)
    assert missed > slots + 4  # the long sequence alone fills its slots and evicts


@pytest.mark.parametrize("spots", [[0, 1, 14, 15], [16, 17, 30, 31], [111, 112, 113, 127], [637, 638, 639, 639 - 16]])
def test_block_boundaries_match_the_reference(device: str, spots: list[int]) -> None:
    torch.manual_seed(spots[0])
    decoder = Decoder(device, spots, kv_heads=1, blocks=40, slots=8, top_k=7)
    for _ in range(2 if max(spots) < 638 else 1):
        decoder.step(torch.randn(1, 4, 1, 40))


def test_the_forecast_of_the_phase_is_read_from_a_ring_of_scores(device: str) -> None:
    torch.manual_seed(3)
    decoder = Decoder(device, [300, 400], kv_heads=2, blocks=33, slots=12, top_k=8)
    decoder.rules["phase"] = 2
    ring = torch.randn(4, 2, 2, 33)
    for _ in range(6):
        decoder.step(ring)


def test_equal_scores_go_to_the_lowest_blocks(device: str) -> None:
    decoder = Decoder(device, [399], kv_heads=1, blocks=32, slots=9, top_k=8)
    chosen, _ = decoder.step(torch.zeros(1, 1, 1, 32))
    assert decoder.inside[0, 0, chosen[0, 0].long()].tolist() == [0, 1, 2, 3, 4, 22, 23, 24]


def test_coarse_scores_with_many_ties_match_the_reference(device: str) -> None:
    torch.manual_seed(4)
    decoder = Decoder(device, [500, 333], kv_heads=2, blocks=40, slots=14, top_k=12)
    for _ in range(6):
        scores = torch.randint(-2, 3, (1, 2, 2, 40)).float()
        scores[torch.rand_like(scores) < 0.2] = float("-inf")
        scores[torch.rand_like(scores) < 0.1] = -0.0
        decoder.step(scores)


def test_blocks_without_a_score_are_a_last_resort(device: str) -> None:
    decoder = Decoder(device, [399], kv_heads=1, blocks=32, slots=9, top_k=8)
    scores = torch.full((1, 1, 1, 32), float("-inf"))
    scores[..., [7, 9]] = torch.tensor([-1e30, float("nan")])
    chosen, _ = decoder.step(scores)
    assert decoder.inside[0, 0, chosen[0, 0].long()].tolist() == [0, 1, 2, 3, 7, 22, 23, 24]


def test_resident_blocks_are_only_stamped(device: str) -> None:
    torch.manual_seed(5)
    decoder = Decoder(device, [400], kv_heads=2, blocks=32, slots=9, top_k=8)
    scores = torch.randn(1, 1, 2, 32)
    decoder.step(scores)
    inside, place = decoder.inside.clone(), decoder.place.clone()
    _, copies = decoder.step(scores)
    assert not copies
    assert torch.equal(decoder.inside, inside)
    assert torch.equal(decoder.place, place)
    assert (decoder.stamp == 1).sum() == 16


def test_wide_maps_use_the_same_rule(device: str) -> None:
    torch.manual_seed(6)
    decoder = Decoder(device, [2049 * BLOCK - 3, 1500 * BLOCK + 7], kv_heads=1, blocks=2049, slots=97, top_k=96)
    scores = torch.randn(1, 2, 1, 2049)
    for _ in range(3):
        decoder.step(scores)
        scores = _drift(scores)


def test_too_few_slots_are_refused(device: str) -> None:
    decoder = Decoder(device, [40], kv_heads=1, blocks=32, slots=8, top_k=8)
    with pytest.raises(ValueError, match="slots: given 8"):
        decoder.step(torch.zeros(1, 1, 1, 32))
