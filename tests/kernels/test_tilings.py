"""How linears are cut: every multiprocessor busy where that is possible, sums split no finer than is worth it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.kernels.tilings import LEAST_DEPTH, LONG, MAX_SPLITS, ROWS, Tiling, splits_of, tiling_for

sizes = st.integers(1, 1 << 17)


@pytest.mark.parametrize(
    ("rows", "columns", "sms", "splits"),
    [
        # 76 tiles of 64 rows leave 132 multiprocessors half idle; two parts of the sum each fill them.
        (4864, 4096, 132, 2),
        (4864, 4096, 76, 1),
        # 64 tiles: two parts make 128 thread blocks, more than 95 % of 132.
        (4096, 4096, 132, 2),
        (4096, 4096, 68, 2),
        (4096, 4096, 64, 1),
        # A long sum that is cut at all is cut twice as often.
        (4096, 16384, 132, 4),
        (4096, 16384, 64, 1),
        # Never finer than 256 products, nor in more than eight parts.
        (64, 1024, 132, 4),
        (64, 4096, 132, 8),
    ],
)
def test_sums_are_cut_until_every_multiprocessor_has_a_thread_block(
    rows: int, columns: int, sms: int, splits: int
) -> None:
    assert splits_of(rows, columns, sms) == splits


@given(sizes, sizes, st.integers(1, 300))
def test_splits_are_powers_of_two_that_leave_enough_products_to_each(rows: int, columns: int, sms: int) -> None:
    splits = splits_of(rows, columns, sms)
    doubled = 2 if columns >= LONG else 1
    assert splits & (splits - 1) == 0
    assert 1 <= splits <= doubled * MAX_SPLITS
    assert splits == 1 or columns // splits >= LEAST_DEPTH / doubled


@given(sizes, sizes, st.integers(1, 300))
def test_fewer_multiprocessors_never_need_more_splits(rows: int, columns: int, sms: int) -> None:
    assert splits_of(rows, columns, sms) <= splits_of(rows, columns, sms + 1)


@given(sizes, sizes, st.integers(1, 300))
def test_enough_tiles_are_not_split(rows: int, columns: int, sms: int) -> None:
    if -(-rows // ROWS) >= 0.95 * sms:
        assert splits_of(rows, columns, sms) == 1


def test_wide_tiles_are_taken_where_narrow_ones_would_leave_an_uneven_last_turn() -> None:
    # 152 narrow tiles on 132 multiprocessors: some would have two and most one.
    assert tiling_for(4864, 4096, 16, 132, splits=2) == Tiling(2 * ROWS, 128, 2, 3, 4)
    assert tiling_for(4096, 4096, 16, 132, splits=2).rows == ROWS, "128 of 132 are even enough"
    assert tiling_for(4864, 4096, 16, 132, splits=2, gated=True).rows == ROWS, "two matrices fill a tile already"


def test_short_sums_have_a_shallow_tile_whatever_the_batch() -> None:
    found = {tiling_for(100, 64, batch, 132, splits=1, narrow=True) for batch in (1, 64, 128)}
    assert found == {Tiling(ROWS, 32, 1, 2, 4)}


@given(sizes, sizes, st.integers(1, 128), st.integers(1, 300), st.sampled_from((1, 2, 4, 8)), st.booleans())
def test_a_tile_has_one_or_two_times_the_rows_and_the_splits_asked_for(
    rows: int, columns: int, batch: int, sms: int, splits: int, gated: bool
) -> None:
    found = tiling_for(rows, columns, batch, sms, splits=splits, gated=gated)
    assert found.rows in ((ROWS,) if gated else (ROWS, 2 * ROWS))
    assert (found.splits, found.depth) == (splits, 64 if batch > 64 else 128)
    assert found.stages in (3, 4)
