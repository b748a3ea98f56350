"""How well predictions order CTA counts: Kendall's tau over the pairs that measuring can tell apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sparda.calibrate.holdout import HeldOut
from sparda.calibrate.ranking import Ranking, rankings
from sparda.engine.config import Config, Workload

CELL = Workload(16, 131072, 0.06)
SPREAD = 0.01


def steps(times: Mapping[int, tuple[float, float]], workload: Workload = CELL, lookahead: int = 1) -> list[HeldOut]:
    """Steps by CTAs: (measured, predicted) microseconds."""
    return [
        HeldOut(workload, Config(prefetch_ctas=ctas, lookahead=lookahead), measured, predicted, SPREAD)
        for ctas, (measured, predicted) in times.items()
    ]


def test_a_right_order_ranks_1_and_a_wrong_one_minus_1() -> None:
    right = {1: (100.0, 50.0), 2: (110.0, 51.0), 4: (120.0, 52.0)}
    assert rankings(steps(right)) == [Ranking(CELL, 3, 1.0)]
    wrong = {ctas: (measured, -predicted) for ctas, (measured, predicted) in right.items()}
    assert rankings(steps(wrong)) == [Ranking(CELL, 3, -1.0)]


def test_every_pair_counts_for_one_or_against() -> None:
    # 2 before 1 is the one wrong pair of six.
    one_wrong = {1: (100.0, 11.0), 2: (110.0, 10.0), 4: (120.0, 12.0), 8: (130.0, 13.0)}
    assert rankings(steps(one_wrong)) == [Ranking(CELL, 6, (5 - 1) / 6)]


def test_a_predicted_tie_of_steps_that_measuring_tells_apart_counts_against() -> None:
    tied = {1: (100.0, 10.0), 2: (110.0, 10.0), 4: (120.0, 12.0)}
    assert rankings(steps(tied)) == [Ranking(CELL, 3, (2 - 1) / 3)]


def test_pairs_within_their_spread_do_not_count() -> None:
    # 1 and 2 are half a percent apart: of six pairs five are left, whichever way the two were predicted.
    close = {1: (100.0, 11.0), 2: (100.5, 10.0), 4: (120.0, 12.0), 8: (130.0, 13.0)}
    assert rankings(steps(close)) == [Ranking(CELL, 5, 1.0)]
    unsure = [replace(s, spread=0.5) for s in steps(close)]
    assert rankings(unsure) == [], "nothing is left to order"


def test_the_larger_spread_of_a_pair_decides() -> None:
    first, *others = steps({1: (100.0, 3.0), 2: (110.0, 2.0), 4: (120.0, 1.0), 8: (130.0, 0.5)})
    (found,) = rankings([replace(first, spread=0.15), *others])
    assert (found.pairs, found.tau) == (5, -1.0)


def test_fewer_than_three_pairs_say_nothing() -> None:
    assert rankings(steps({1: (100.0, 1.0), 2: (200.0, 2.0)})) == []
    assert rankings([]) == []


def test_only_steps_that_differ_in_ctas_alone_are_ranked_and_the_worst_cell_comes_first() -> None:
    right = {1: (100.0, 1.0), 2: (200.0, 2.0), 4: (300.0, 3.0)}
    wrong = {1: (100.0, 3.0), 2: (200.0, 2.0), 4: (300.0, 1.0)}
    other = Workload(64, 131072, 0.06)
    found = rankings([*steps(right), *steps(wrong, other), *steps(right, lookahead=2)])
    assert found == [Ranking(other, 3, -1.0), Ranking(CELL, 3, 1.0), Ranking(CELL, 3, 1.0)]
    # Half of a cell at each lookahead is no cell.
    assert rankings([*steps({1: (100.0, 1.0), 2: (200.0, 2.0)}), *steps({4: (300.0, 3.0)}, lookahead=2)]) == []


@given(st.dictionaries(st.integers(1, 64), st.tuples(st.floats(1, 1e4), st.floats(1, 1e4)), min_size=3, max_size=8))
def test_a_rank_lies_between_its_ends_and_monotone_predictions_change_nothing(
    times: dict[int, tuple[float, float]],
) -> None:
    found = rankings(steps(times))
    squared = rankings(steps({ctas: (m, 3 * p) for ctas, (m, p) in times.items()}))
    assert found == squared
    assert all(-1.0 <= r.tau <= 1.0 and r.pairs <= len(times) * (len(times) - 1) / 2 for r in found)
    perfect = rankings(steps({ctas: (m, m) for ctas, (m, _) in times.items()}))
    assert all(r.tau == 1.0 for r in perfect)
