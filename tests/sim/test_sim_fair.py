"""Max-min fairness of one capacity."""

from __future__ import annotations

from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.sim.fair import max_min_share

demands = st.lists(st.floats(0.0, 1e6), max_size=8)
capacities = st.floats(0.0, 1e6)


@given(demands, capacities)
def test_no_flow_gets_more_than_it_asked_for_and_none_less_than_nothing(asked: list[float], capacity: float) -> None:
    assert all(0.0 <= got <= want for got, want in zip(max_min_share(asked, capacity), asked, strict=True))


@given(demands, capacities)
def test_all_of_the_capacity_is_given_away_or_every_demand_is_met(asked: list[float], capacity: float) -> None:
    assert fsum(max_min_share(asked, capacity)) == pytest.approx(min(capacity, fsum(asked)), rel=1e-12)


@given(demands, capacities)
def test_demands_that_fit_are_met_exactly(asked: list[float], capacity: float) -> None:
    if fsum(asked) <= capacity:
        assert max_min_share(asked, capacity) == asked


@given(demands, capacities)
def test_unmet_flows_all_get_the_same_and_no_met_flow_gets_more(asked: list[float], capacity: float) -> None:
    given_ = max_min_share(asked, capacity)
    unmet = {got for got, want in zip(given_, asked, strict=True) if got < want}
    assert len(unmet) <= 1
    assert all(got <= share for share in unmet for got in given_)


@given(demands, capacities, st.randoms())
def test_the_order_of_the_flows_changes_nothing(asked: list[float], capacity: float, random: object) -> None:
    order = list(range(len(asked)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight = max_min_share(asked, capacity)
    assert max_min_share([asked[i] for i in order], capacity) == [straight[i] for i in order]


def test_a_small_flow_is_met_and_the_large_ones_split_the_rest() -> None:
    assert max_min_share([9.0, 1.0, 7.0], 11.0) == [5.0, 1.0, 5.0]


def test_a_capacity_below_zero_gives_nothing() -> None:
    assert max_min_share([1.0, 2.0], -3.0) == [0.0, 0.0]
