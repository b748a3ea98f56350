"""Intervals of predictions: the same for the same seed, a point where nothing is unexplained, wider the more is."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.calibrate.costs import FittedCosts
from sparda.calibrate.holdout import HeldOut, coverage
from sparda.calibrate.interval import COVERED, DRAWS, Intervals, covered
from sparda.calibrate.residuals import CLASSES, Residuals
from sparda.engine.config import Config, Workload
from sparda.engine.plan import Plan
from sparda.engine.policies import make_plan
from sparda.sim.player import play
from tests.calibrate.conftest import MODEL, SPEC

NOTHING = Residuals({}, (), {}, {})
SOME = Residuals(
    {"down": (0.02, -0.01), "attention": (0.05,)}, (0.03, -0.02, 0.01), {"few": (0.02,)}, {"few": (0.1, -0.3)}
)


def plan_of(batch: int = 64, miss_rate: float = 0.12) -> Plan:
    return make_plan(MODEL, SPEC, Workload(batch, 65536, miss_rate), Config())


def test_the_same_seed_gives_the_same_interval_and_another_seed_another(costs: FittedCosts) -> None:
    plan = plan_of()
    first = Intervals(costs, SOME).of(plan)
    assert Intervals(costs, SOME).of(plan) == first
    assert Intervals(costs, SOME, seed=1).of(plan) != first


def test_an_interval_does_not_depend_on_what_was_asked_before(costs: FittedCosts) -> None:
    intervals, plan = Intervals(costs, SOME), plan_of()
    intervals.of(plan_of(batch=1))
    assert intervals.of(plan) == Intervals(costs, SOME).of(plan)


@pytest.mark.parametrize(
    "left",
    [
        NOTHING,
        Residuals({"down": (0.0,)}, (0.0, 0.0), dict.fromkeys(CLASSES, (0.0,)), dict.fromkeys(CLASSES, ())),
    ],
)
def test_where_nothing_is_unexplained_the_interval_is_the_prediction(costs: FittedCosts, left: Residuals) -> None:
    plan = plan_of()
    point = play(plan, costs).step_us
    assert Intervals(costs, left, draws=3).of(plan) == (point, point)


def test_one_way_off_lies_on_both_sides_of_the_prediction(costs: FittedCosts) -> None:
    plan = plan_of(miss_rate=0.0)
    low, high = Intervals(costs, Residuals({}, (0.1,), {}, {})).of(plan)
    assert low < play(plan, costs).step_us < high


@settings(deadline=None, max_examples=8)
@given(st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=4), st.floats(1.0, 3.0), st.integers(0, 1000))
def test_layers_that_are_further_off_give_an_interval_that_holds_the_narrower(
    costs: FittedCosts, left: list[float], wider: float, seed: int
) -> None:
    plan = plan_of(miss_rate=0.0)
    near = Intervals(costs, Residuals({}, tuple(left), {}, {}), seed, draws=9).of(plan)
    far = Intervals(costs, Residuals({}, tuple(wider * r for r in left), {}, {}), seed, draws=9).of(plan)
    # Whole nanoseconds: each operation of a step is rounded up by itself.
    rounding_us = len(plan.ops) / 1e3
    assert far[0] <= near[0] + rounding_us
    assert far[1] >= near[1] - rounding_us


def test_what_a_copy_leaves_unexplained_matters_only_where_something_is_copied(costs: FittedCosts) -> None:
    copies = Residuals({}, (), {}, {"few": (0.5,)})
    # Twelve percent of 64 sequences: the step waits for the link.
    low, high = Intervals(costs, copies, draws=9).of(plan_of())
    assert low < high
    none = plan_of(miss_rate=0.0)
    assert Intervals(costs, copies, draws=9).of(none) == (play(none, costs).step_us,) * 2


def test_copies_of_another_class_disturb_nothing(costs: FittedCosts) -> None:
    plan = plan_of()
    crowds = Residuals({}, (), {"many": (1.0,)}, {"many": (1.0,)})
    assert plan.config.prefetch_ctas == 2
    assert Intervals(costs, crowds, draws=3).of(plan) == (play(plan, costs).step_us,) * 2


@given(st.lists(st.floats(-1e6, 1e6), min_size=20, max_size=200).map(sorted))
def test_what_is_covered_is_what_numpy_calls_the_quantiles_of_a_sample(ordered: list[float]) -> None:
    low, high = covered(ordered)
    # The i-th of n values is the quantile i / (n + 1): a further value falls into each gap with the same chance. Of the
    # ranks outside the middle 90 % the innermost is meant.
    n = len(ordered)
    rank = max(i for i in range(1, n) if i / (n + 1) <= (1 - COVERED) / 2 + 1e-9)
    assert low == pytest.approx(np.quantile(ordered, rank / (n + 1), method="weibull"), abs=1e-6)
    assert high == pytest.approx(np.quantile(ordered, 1 - rank / (n + 1), method="weibull"), abs=1e-6)


@pytest.mark.parametrize("n", [*range(20, 60), 99, 199, 1000])
def test_an_interval_covers_what_it_should_and_one_value_less_on_either_side_would_not(n: int) -> None:
    low, high = covered([float(k) for k in range(n)])
    assert low + high == n - 1, "as many are left out on either side"
    inside = (high - low) / (n + 1)
    assert inside >= COVERED - 1e-12
    assert inside - 2 / (n + 1) < COVERED


@pytest.mark.parametrize("n", [1, 2, 10, 18])
def test_of_too_few_values_none_is_left_out(n: int) -> None:
    values = [float(k) for k in range(n)]
    assert covered(values) == (values[0], values[-1])


def test_the_usual_number_of_draws_leaves_one_out_on_either_side() -> None:
    assert covered([float(k) for k in range(DRAWS)]) == (1.0, DRAWS - 2.0)


def test_coverage_counts_the_measured_steps_inside(costs: FittedCosts) -> None:
    intervals = Intervals(costs, Residuals({}, (log(1.1),), {}, {}), draws=9)
    workload, config = Workload(64, 65536, 0.0), Config()
    low, high = intervals.of(make_plan(MODEL, SPEC, workload, config))
    steps = [HeldOut(workload, config, us, 1.0, 0.0) for us in (low, (low + high) / 2, high, high * 1.01)]
    assert coverage(steps, intervals, MODEL, SPEC) == 0.75
    assert coverage([], intervals, MODEL, SPEC) is None


def test_progress_is_told_step_by_step(costs: FittedCosts) -> None:
    steps = [HeldOut(Workload(batch, 65536, 0.06), Config(), 1.0, 1.0, 0.0) for batch in (1, 4, 16)]
    told: list[tuple[int, int]] = []
    coverage(steps, Intervals(costs, NOTHING, draws=1), MODEL, SPEC, lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
