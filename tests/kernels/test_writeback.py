"""The newest token of every layer, sequence and head reaches its place in the pool, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from sparda.kernels.writeback import write_newest, write_newest_reference  # noqa: E402

Place = Callable[["torch.Tensor"], "torch.Tensor"]
both_types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def _case(
    device: str,
    place: Place,
    positions: list[int],
    *,
    layers: int = 2,
    heads: int = 3,
    slots: int = 3,
    block: int = 16,
    head_dim: int = 64,
    capacity: int = 5,
    host_rows: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> list[torch.Tensor]:
    """caches, slot_of_block, positions, pool: random values and slots, and a poisoned pool."""
    random = torch.Generator().manual_seed(sum(positions) + head_dim)
    owners = (layers, len(positions), heads)
    caches = torch.randn(*owners, slots, 2, block, head_dim, generator=random).to(device, dtype)
    table = torch.randint(slots, (*owners, capacity), generator=random, dtype=torch.int32).to(device)
    rows = layers * len(positions) * heads * capacity if host_rows is None else host_rows
    pool = place(torch.full((rows, 2 * block * head_dim), float("nan"), dtype=dtype))
    return [caches, table, torch.tensor(positions, dtype=torch.int32, device=device), pool]


def _write(case: list[torch.Tensor], device: str, *, block: int = 16, pool_base: int = 0) -> torch.Tensor:
    """Runs kernel and reference, requires equal bits, and returns the pool."""
    caches, table, positions, pool = case
    expected = pool.clone()
    write_newest_reference(caches, table, positions, expected, block=block, pool_base=pool_base)
    write_newest(caches, table, positions, pool, block=block, pool_base=pool_base)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(pool.view(torch.int16), expected.view(torch.int16))
    return pool


@both_types
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block", [16, 64])
def test_writes_first_and_last_tokens_of_blocks(
    device: str, host_pool: Place, block: int, head_dim: int, dtype: torch.dtype
) -> None:
    positions = [0, block - 1, block, 3 * block + 5, 5 * block - 1]
    case = _case(device, host_pool, positions, layers=1, heads=2, block=block, head_dim=head_dim, dtype=dtype)
    _write(case, device, block=block)


@both_types
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_writes_an_odd_batch_of_any_number_of_heads(
    device: str, host_pool: Place, heads: int, dtype: torch.dtype
) -> None:
    pool = _write(_case(device, host_pool, [0, 37, 79], heads=heads, dtype=dtype), device)
    assert int((~pool.isnan()).sum()) == 2 * 3 * heads * 2 * 64


def test_each_layer_and_head_has_its_own_row_and_only_one_token_is_written(device: str, host_pool: Place) -> None:
    case = _case(device, host_pool, [37, 2])
    pool = _write(case, device).view(2, 2, 3, 5, 2, 16, 64)
    caches, table = case[0].cpu(), case[1].cpu()
    for b, (index, token) in enumerate([(2, 5), (0, 2)]):
        for layer in range(2):
            for h in range(3):
                newest = caches[layer, b, h, table[layer, b, h, index], :, token]
                assert torch.equal(pool[layer, b, h, index, :, token], newest)
    assert int((~pool.isnan()).sum()) == 2 * 2 * 3 * 2 * 64


@pytest.mark.parametrize(("host_rows", "pool_base"), [(60, 31), (70, 65), (61, 1000)])
def test_rows_start_at_the_base_and_wrap_around_the_pool(
    device: str, host_pool: Place, host_rows: int, pool_base: int
) -> None:
    _write(_case(device, host_pool, [17, 79], host_rows=host_rows), device, pool_base=pool_base)


def test_a_block_in_no_slot_or_past_the_capacity_writes_nothing(device: str, host_pool: Place) -> None:
    case = _case(device, host_pool, [33, 80])
    case[1][:, 0, :, 2] = -1
    assert bool(_write(case, device).isnan().all())


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda caches: caches.half(), "caches must be contiguous bf16 or fp32"),
        (0, lambda caches: caches.float(), "pool must be contiguous torch.float32 .* got torch.bfloat16"),
        (0, lambda caches: caches[..., :48].contiguous(), "powers of two"),
        (1, lambda table: table[:1], "slot_of_block must be contiguous int32"),
        (1, lambda table: table.long(), "slot_of_block must be contiguous int32"),
        (2, lambda positions: positions[:1], "positions must be contiguous int32"),
        (3, lambda pool: pool[:, :1024].contiguous(), "2 \\* block \\* D = 2048 values a row, got 1024"),
        (3, lambda pool: pool.float(), "pool must be contiguous torch.bfloat16 .* got torch.float32"),
    ],
)
def test_refuses_tensors_that_do_not_fit(
    device: str, host_pool: Place, index: int, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    case = _case(device, host_pool, [3, 4])
    case[index] = change(case[index])
    with pytest.raises(ValueError, match=message):
        write_newest(*case, block=16)


def test_refuses_a_block_size_other_than_the_caches_and_a_negative_base(device: str, host_pool: Place) -> None:
    case = _case(device, host_pool, [3, 4])
    with pytest.raises(ValueError, match="caches must end in"):
        write_newest(*case, block=32)
    with pytest.raises(ValueError, match="pool_base must be at least 0, got -1"):
        write_newest(*case, block=16, pool_base=-1)
