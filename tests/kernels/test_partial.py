"""Partial keys and projected queries agree with plain PyTorch, and nothing else is written."""

from __future__ import annotations

import pytest
import torch

from sparda.kernels.partial import append_partial, append_partial_reference, project_query, project_query_reference
from sparda.kernels.score import forecast_reference, forecast_scores, tile_blocks


def _case(
    device: str, positions: list[int], *, dtype: torch.dtype = torch.bfloat16, layers: int = 2, kv_heads: int = 3,
    slots: int = 3, block: int = 16, dim: int = 64, rank: int = 32, blocks: int = 5, capacity: int = 80,
) -> list[torch.Tensor]:  # fmt: skip
    """caches, slot_of_block, positions, basis, partial: random values and slots, and poisoned rows."""
    random = torch.Generator().manual_seed(sum(positions) + dim + rank)
    owners = (layers, len(positions), kv_heads)
    caches = torch.randn(*owners, slots, 2, block, dim, generator=random).to(device, dtype)
    table = torch.randint(slots, (*owners, blocks), generator=random, dtype=torch.int32).to(device)
    basis = torch.randn(layers, kv_heads, dim, rank, generator=random).to(device)
    partial = torch.full((*owners, capacity, rank), float("nan"), dtype=dtype, device=device)
    return [caches, table, torch.tensor(positions, dtype=torch.int32, device=device), basis, partial]


def _append(case: list[torch.Tensor]) -> torch.Tensor:
    """Runs kernel and reference, requires that they agree and wrote the same rows, and returns the partial keys."""
    expected = case[4].clone()
    append_partial_reference(case[0], case[1], case[2], case[3], expected)
    append_partial(*case)
    bf16 = expected.dtype == torch.bfloat16
    torch.testing.assert_close(
        case[4], expected, rtol=8e-3 if bf16 else 1e-5, atol=1e-2 if bf16 else 1e-5, equal_nan=True
    )
    return case[4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("dim", "rank"), [(64, 32), (128, 32), (32, 32), (64, 1), (16, 8)])
def test_a_tokens_partial_key_is_its_key_along_the_basis(device: str, dtype: torch.dtype, dim: int, rank: int) -> None:
    partial = _append(_case(device, [0, 15, 16, 53, 79], dtype=dtype, dim=dim, rank=rank))
    assert int(partial.isfinite().all(-1).sum()) == 2 * 5 * 3


@pytest.mark.parametrize(("layers", "kv_heads"), [(1, 1), (1, 2), (3, 1), (4, 5)])
def test_every_layer_and_head_has_a_basis_of_its_own(device: str, layers: int, kv_heads: int) -> None:
    _append(_case(device, [7, 31], layers=layers, kv_heads=kv_heads))


def test_a_block_without_a_slot_and_a_position_past_the_room_are_left_alone(device: str) -> None:
    case = _case(device, [5, 20, 80, 60], capacity=60)
    case[1][:, 0, :, 0] = -1
    partial = _append(case)
    assert partial[:, [0, 2, 3]].isnan().all()
    assert partial[:, 1, :, 20].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "kv_heads", "dim", "rank"), [(1, 1, 64, 32), (3, 2, 128, 32), (5, 3, 32, 32)])
def test_a_query_inside_wider_rows_is_projected_for_each_head(
    device: str, dtype: torch.dtype, batch: int, kv_heads: int, dim: int, rank: int
) -> None:
    random = torch.Generator().manual_seed(dim)
    rows = torch.randn(batch, 3 * kv_heads, dim, generator=random).to(device, dtype)
    basis = torch.randn(kv_heads, dim, rank, generator=random).to(device)
    query, out = rows[:, kv_heads : 2 * kv_heads], torch.empty(batch, kv_heads, rank, dtype=dtype, device=device)
    project_query(query, basis, out)
    bf16 = dtype == torch.bfloat16
    torch.testing.assert_close(
        out, project_query_reference(query, basis), rtol=8e-3 if bf16 else 1e-5, atol=1e-2 if bf16 else 1e-5
    )


@pytest.mark.parametrize("position", [0, 1, 63, 64, 65, 127, 128, 200, 255])
def test_blocks_are_scored_by_the_best_of_their_tokens_and_the_one_before(device: str, position: int) -> None:
    random = torch.Generator().manual_seed(position)
    query = torch.randn(1, 2, 32, generator=random).to(device, torch.bfloat16)
    keys = torch.randn(1, 2, 256, 32, generator=random).to(device, torch.bfloat16)
    keys[:, :, position:] = float("nan")
    positions = torch.tensor([position], dtype=torch.int32, device=device)
    out = torch.full((1, 2, 6), float("nan"), device=device)
    forecast_scores(query, keys, positions, out, block=64, kernel=1, stride=1)
    expected = forecast_reference(query, keys, positions, blocks=6, block=64, kernel=1, stride=1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    dots = (keys[0].float() * query[0, :, None].float()).sum(-1)
    for m in range(position // 64 + 1):
        tokens = dots[:, max(0, 64 * m - 1) : min(64 * m + 64, position)]
        best = tokens.amax(-1) if tokens.shape[1] else torch.full((2,), float("-inf"), device=device)
        torch.testing.assert_close(out[0, :, m], best, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("ratio", "dim", "tile"), [(4, 128, 16), (4, 64, 16), (64, 32, 4), (64, 128, 1), (64, 256, 1)])
def test_a_program_scores_fewer_blocks_the_more_values_these_have(ratio: int, dim: int, tile: int) -> None:
    assert tile_blocks(ratio, dim) == tile


def test_shapes_and_types_that_do_not_fit_are_refused(device: str) -> None:
    caches, table, positions, basis, partial = _case(device, [5])
    with pytest.raises(ValueError, match=r"partial: given .* allowed: contiguous .*bfloat16"):
        append_partial(caches, table, positions, basis, partial.float())
    with pytest.raises(ValueError, match="basis: given"):
        append_partial(caches, table, positions, basis[:, :2].contiguous(), partial)
    with pytest.raises(ValueError, match="slot_of_block: given"):
        append_partial(caches, table.long(), positions, basis, partial)
    with pytest.raises(ValueError, match="R: given 24, allowed: a power of two"):
        append_partial(caches, table, positions, basis[..., :24].contiguous(), partial[..., :24].contiguous())
    query = torch.zeros(1, 3, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="out: given"):
        project_query(query, basis[0], torch.empty(1, 3, 32, device=device))
    with pytest.raises(ValueError, match="query: given"):
        project_query(query.half(), basis[0], torch.empty(1, 3, 32, dtype=torch.float16, device=device))
