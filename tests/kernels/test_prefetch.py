"""Missing blocks reach exactly their slots, whatever the launch settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from sparda.kernels.prefetch import prefetch, prefetch_reference  # noqa: E402

Place = Callable[["torch.Tensor"], "torch.Tensor"]
both_types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
HOST_ROWS, GPU_ROWS, LISTED = 12, 9, 7


def _case(
    device: str, place: Place, values: int, count: int, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """pool, cache, src, dst, count: random rows; the entries past ``count`` name rows that exist."""
    random = torch.Generator().manual_seed(values + count)
    pool = place(torch.randn(HOST_ROWS, values, generator=random).to(dtype))
    cache = torch.randn(GPU_ROWS, values, generator=random).to(device, dtype)
    src = torch.randint(HOST_ROWS, (LISTED,), generator=random, dtype=torch.int32).to(device)
    dst = torch.randperm(GPU_ROWS, generator=random)[:LISTED].to(device, torch.int32)
    return [pool, cache, src, dst, torch.tensor([count], dtype=torch.int32, device=device)]


def _assert_copies(case: list[torch.Tensor], *, ctas: int, warps: int, stages: int, chunk_values: int) -> None:
    pool, cache, *lists = case
    expected = cache.clone()
    prefetch_reference(pool, expected, *lists)
    prefetch(pool, cache, *lists, ctas=ctas, warps=warps, stages=stages, chunk_values=chunk_values)
    assert torch.equal(cache.view(torch.int16), expected.view(torch.int16))


@both_types
@pytest.mark.parametrize("stages", [1, 2, 6])
@pytest.mark.parametrize(("values", "chunk"), [(2048, 512), (4096, 4096), (2048, 8), (16384, 8192)])
def test_copies_listed_rows_for_any_chunk_and_depth(
    device: str, host_pool: Place, values: int, chunk: int, stages: int, dtype: torch.dtype
) -> None:
    ctas = 64 if chunk == 8 else 2
    _assert_copies(_case(device, host_pool, values, 5, dtype), ctas=ctas, warps=4, stages=stages, chunk_values=chunk)


@both_types
@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("ctas", [1, 2, 3, 6, 50])
def test_copies_listed_rows_for_any_number_of_thread_blocks(
    device: str, host_pool: Place, ctas: int, parts: int, dtype: torch.dtype
) -> None:
    case = _case(device, host_pool, 1024, 6, dtype)
    _assert_copies(case, ctas=ctas, warps=1, stages=2, chunk_values=1024 // parts)


@both_types
def test_copies_the_bits_of_values_that_are_no_numbers(device: str, host_pool: Place, dtype: torch.dtype) -> None:
    case = _case(device, host_pool, 1024, LISTED, dtype)
    bits = torch.arange(-256, 256, dtype=torch.int16).repeat(HOST_ROWS * case[0].element_size())
    case[0] = host_pool(bits.view(dtype).view(HOST_ROWS, 1024))
    _assert_copies(case, ctas=2, warps=4, stages=2, chunk_values=512)


@pytest.mark.parametrize("count", [1, 3, LISTED])
def test_copies_no_entry_past_the_count(device: str, host_pool: Place, count: int) -> None:
    case = _case(device, host_pool, 512, count)
    before = case[1].clone()
    _assert_copies(case, ctas=4, warps=2, stages=4, chunk_values=256)
    untouched = sorted(set(range(GPU_ROWS)) - set(case[3][:count].tolist()))
    assert torch.equal(case[1][untouched], before[untouched])
    assert torch.equal(case[1][case[3][:count].long()].cpu(), case[0][case[2][:count].long().cpu()].cpu())


@pytest.mark.parametrize("stages", [1, 8])
def test_an_empty_list_leaves_the_cache_untouched(device: str, host_pool: Place, stages: int) -> None:
    case = _case(device, host_pool, 512, 0)
    before = case[1].clone()
    prefetch(*case, ctas=3, warps=4, stages=stages, chunk_values=512)
    assert torch.equal(case[1], before)


def test_one_source_row_may_fill_several_slots(device: str, host_pool: Place) -> None:
    case = _case(device, host_pool, 512, LISTED)
    case[2].fill_(3)
    _assert_copies(case, ctas=2, warps=4, stages=3, chunk_values=128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ctas": 0}, "ctas must be at least 1, got 0"),
        ({"warps": 3}, "warps must be .* got 3"),
        ({"chunk_values": 48}, "chunk_values must be a power of two .* got 48"),
        ({"chunk_values": 1024}, "divides the 512 values"),
        ({"chunk_values": 4}, "from 8 up"),
        ({"stages": 0}, "stages must be 1 to 200"),
        ({"stages": 201}, "stages must be 1 to 200: .* got 201"),
        ({"chunk_values": 2, "dtype": torch.float32}, "from 4 up"),
        ({"stages": 101, "dtype": torch.float32}, "stages must be 1 to 100: .* got 101"),
    ],
)
def test_refuses_settings_that_cannot_work(device: str, host_pool: Place, change: dict[str, Any], message: str) -> None:
    settings = {"ctas": 2, "warps": 4, "stages": 2, "chunk_values": 512, **change}
    pool, cache, src, dst, count = _case(device, host_pool, 512, 1, settings.pop("dtype", torch.bfloat16))
    with pytest.raises(ValueError, match=message):
        prefetch(pool, cache, src, dst, count, **settings)


@pytest.mark.parametrize(("dtype", "chunk"), [(torch.bfloat16, 8192), (torch.float32, 4096)], ids=["bf16", "fp32"])
def test_chunks_are_as_many_bytes_for_either_type_and_the_deepest_pipeline_is_named(
    device: str, host_pool: Place, dtype: torch.dtype, chunk: int
) -> None:
    with pytest.raises(ValueError, match=f"stages must be 1 to 12: that many chunks of {chunk} values"):
        prefetch(*_case(device, host_pool, 16384, 1, dtype), ctas=1, warps=4, stages=13)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda pool: pool.half(), "pool must be contiguous bf16 or fp32"),
        (0, lambda pool: pool.float(), "pool is torch.float32 and cache is torch.bfloat16: they must be alike"),
        (1, lambda cache: cache.float(), "pool is torch.bfloat16 and cache is torch.float32: they must be alike"),
        (0, lambda pool: pool[:, :256].contiguous(), "pool has .* must agree"),
        (1, lambda cache: cache[:, ::2], "cache must be contiguous"),
        (2, lambda src: src.long(), "src must be a contiguous int32 vector"),
        (3, lambda dst: dst[:-1], "equally long"),
        (4, lambda count: count.repeat(2), "count hold one value"),
    ],
)
def test_refuses_tensors_of_the_wrong_shape_or_type(
    device: str, host_pool: Place, index: int, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    case = _case(device, host_pool, 512, 1)
    case[index] = change(case[index])
    if index == 0:
        case[0] = host_pool(case[0])
    with pytest.raises(ValueError, match=message):
        prefetch(*case, ctas=1, warps=4, stages=2, chunk_values=512)
