"""The directions that InfiniGen keeps: all of them lose nothing, more of them lose less."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch
from torch import Tensor

from sparda.engine.partial import SAMPLE, PartialKeys, along, partial_basis, random_basis
from sparda.engine.shapes import MODELS

DIM, TOKENS, GROUP, HEADS = 32, 256, 4, 2


def sample(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Queries [H, group, N, D] and keys [H, N, D] whose size falls from one hidden direction to the next."""
    random = torch.Generator().manual_seed(seed)
    hidden, _ = torch.linalg.qr(torch.randn(HEADS, DIM, DIM, generator=random))
    size = 2.0 * 0.9 ** torch.arange(DIM)
    common = torch.randn(HEADS, 1, TOKENS, DIM, generator=random)
    queries = (common + 0.3 * torch.randn(HEADS, GROUP, TOKENS, DIM, generator=random)) * size
    keys = torch.randn(HEADS, TOKENS, DIM, generator=random) * size
    return queries @ hidden.mT[:, None], keys @ hidden.mT


def scores(queries: Tensor, keys: Tensor) -> Tensor:
    """[H, N, N] for the mean query of the group."""
    return queries.mean(1) @ keys.mT


def captured_mass(queries: Tensor, keys: Tensor, basis: Tensor) -> float:
    """Softmax mass of the exact scores on the eighth of the tokens that the partial scores put first."""
    exact = scores(queries, keys).softmax(-1)
    guessed = (queries.mean(1) @ basis) @ (keys @ basis).mT
    best = guessed.topk(TOKENS // 8, dim=-1).indices
    return float(exact.gather(-1, best).sum(-1).mean())


def test_the_directions_are_orthonormal() -> None:
    basis = partial_basis(*sample(), 12)
    assert basis.shape == (HEADS, DIM, 12)
    assert basis.dtype == torch.float32
    torch.testing.assert_close(basis.mT @ basis, torch.eye(12).expand(HEADS, -1, -1), rtol=0, atol=1e-5)


def test_with_every_direction_scores_are_exact() -> None:
    queries, keys = sample()
    basis = partial_basis(queries, keys, DIM)
    guessed = (queries.mean(1) @ basis) @ (keys @ basis).mT
    torch.testing.assert_close(guessed, scores(queries, keys), rtol=1e-4, atol=1e-4)


def test_the_score_mass_that_is_found_grows_with_the_directions_kept() -> None:
    queries, keys = sample()
    found = [captured_mass(queries, keys, partial_basis(queries, keys, dims)) for dims in (1, 2, 4, 8, 32)]
    assert found == sorted(found)
    assert found[0] < 0.7 * found[-1]
    assert found[-2] > 0.95 * found[-1]


def test_the_directions_of_a_sample_find_more_than_random_ones_and_serve_other_tokens() -> None:
    queries, keys = sample()
    half = TOKENS // 2
    learnt = partial_basis(queries[:, :, :half], keys[:, :half], 8)
    blind, _ = torch.linalg.qr(torch.randn(HEADS, DIM, DIM, generator=torch.Generator().manual_seed(5)))
    assert captured_mass(queries, keys, learnt) > 1.1 * captured_mass(queries, keys, blind[..., :8])


def test_a_direction_along_which_keys_are_small_is_not_kept_however_large_the_queries() -> None:
    random = torch.Generator().manual_seed(1)
    queries = torch.randn(1, 1, 64, 4, generator=random) * torch.tensor([9.0, 3.0, 2.0, 1.0])
    keys = torch.randn(1, 64, 4, generator=random) * torch.tensor([1e-3, 1.0, 1.0, 1.0])
    kept = partial_basis(queries, keys, 2)[0]
    assert float(kept[0].norm()) < 0.3
    assert float(kept[1].norm()) > 0.9


@pytest.mark.parametrize("tokens", [1, 5, 16, 31, 32, 33])
@pytest.mark.parametrize("dims", [16, 32])
def test_a_short_sample_still_gives_as_many_orthonormal_directions_as_asked_for(tokens: int, dims: int) -> None:
    queries, keys = sample()
    basis = partial_basis(queries[:, :, :tokens], keys[:, :tokens], dims)
    assert basis.shape == (HEADS, DIM, dims)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(dims).expand(HEADS, -1, -1), rtol=0, atol=1e-5)


def test_what_a_single_token_asks_for_is_among_its_directions() -> None:
    """One of them is along its mean query, so its score of any key is kept."""
    queries, keys = sample()
    kept = partial_basis(queries[:, :, :1], keys[:, :1], 16)
    one = queries[:, :, 0].mean(1, keepdim=True)
    torch.testing.assert_close(one @ kept @ kept.mT, one, rtol=1e-4, atol=1e-4)


def test_the_same_sample_gives_the_same_directions_however_short() -> None:
    queries, keys = (x[..., :3, :] for x in sample())
    assert torch.equal(partial_basis(queries, keys, 16), partial_basis(queries.clone(), keys.clone(), 16))


def test_a_random_basis_is_a_part_of_a_rotation_the_same_for_every_layer_and_seed() -> None:
    shape = MODELS["minicpm4.1-8b"]
    basis = random_basis(shape, 3, "cpu", seed=4)
    assert basis.shape == (3, 2, 128, 32)
    assert basis.is_contiguous()
    torch.testing.assert_close(basis.mT @ basis, torch.eye(32).expand(3, 2, -1, -1), rtol=0, atol=1e-5)
    assert torch.equal(basis, random_basis(shape, 3, "cpu", seed=4))
    assert torch.equal(basis[0, 0], basis[2, 1])
    assert not torch.equal(basis, random_basis(shape, 3, "cpu", seed=5))


def test_filling_sets_one_layers_rows_from_its_keys_and_leaves_the_rest() -> None:
    basis = torch.randn(2, HEADS, DIM, 8)
    partial = PartialKeys(basis, torch.zeros(2, 1, HEADS, 20, 8, dtype=torch.bfloat16))
    keys = torch.randn(1, HEADS, 13, DIM)
    partial.fill(1, keys)
    torch.testing.assert_close(partial.rows[1, :, :, :13].float(), along(keys, basis[1]), rtol=8e-3, atol=1e-2)
    assert not partial.rows[0].any()
    assert not partial.rows[1, :, :, 13:].any()


def test_a_prompt_enters_its_own_row_of_every_layer() -> None:
    basis = torch.randn(2, HEADS, DIM, 8)
    partial = PartialKeys(basis, torch.zeros(2, 3, HEADS, 20, 8))
    keys = torch.randn(2, HEADS, 13, DIM)
    partial.admit(1, keys)
    torch.testing.assert_close(partial.rows[:, 1, :, :13], torch.einsum("lhtd,lhdr->lhtr", keys, basis))
    assert not partial.rows[:, [0, 2]].any()
    assert not partial.rows[:, 1, :, 13:].any()


def empty(rows: int = 2) -> PartialKeys:
    """Two layers with as many directions as a quarter of a head has, along nothing yet."""
    return PartialKeys(torch.zeros(2, HEADS, DIM, DIM // 4), torch.zeros(2, rows, HEADS, TOKENS, DIM // 4))


def prompt(seed: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Keys [2, H, N, D] and queries [2, Hq, N, D] of two layers."""
    layers = [sample(seed), sample(seed + 1)]
    keys, queries = torch.stack([k for _, k in layers]), torch.stack([q.flatten(0, 1) for q, _ in layers])
    return keys[:, :, :tokens], queries[:, :, :tokens]


def test_the_first_prompt_gives_each_layer_its_directions_before_its_keys_are_stored() -> None:
    partial, (keys, queries) = empty(), prompt(0)
    partial.admit(1, keys, queries[:, :, :40])
    for layer in range(2):
        own = queries[layer].view(HEADS, GROUP, TOKENS, DIM)[:, :, :40]
        assert torch.equal(partial.basis[layer], partial_basis(own, keys[layer, :, :40], DIM // 4))
    torch.testing.assert_close(partial.rows[:, 1], torch.einsum("lhtd,lhdr->lhtr", keys, partial.basis))
    assert not torch.equal(partial.basis[0], partial.basis[1])


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_later_prompts_leave_the_directions_alone_however_short_the_first(tokens: int) -> None:
    partial = empty()
    address = partial.basis.data_ptr()
    assert partial.sample == SAMPLE
    partial.admit(0, *prompt(0, tokens))
    assert partial.sample == 0
    before, stored = partial.basis.clone(), partial.rows[:, 0].clone()
    partial.admit(1, *prompt(5))
    assert torch.equal(partial.basis, before)
    assert torch.equal(partial.rows[:, 0], stored)
    assert partial.basis.data_ptr() == address


@pytest.mark.parametrize("seeded", [True, False])
def test_keys_that_are_stored_settle_the_directions_without_queries_too(seeded: bool) -> None:
    partial, (keys, queries) = empty(), prompt(0)
    if seeded:
        partial.fill(0, keys)
    else:
        partial.admit(0, keys)
    assert partial.sample == 0
    partial.admit(1, keys, queries)
    assert not partial.basis.any()
