"""The directions that InfiniGen keeps: all of them lose nothing, more of them lose less."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch
from torch import Tensor

from sparda.engine.partial import PartialKeys, along, partial_basis, random_basis
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


def test_a_short_sample_still_gives_as_many_directions_as_asked_for() -> None:
    queries, keys = sample()
    assert partial_basis(queries[:, :, :5], keys[:, :5], 16).shape == (HEADS, DIM, 16)


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
