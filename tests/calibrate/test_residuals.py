"""What calibration leaves unexplained: nothing where all is as predicted, else by just so much."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest

from sparda.calibrate.costs import FittedCosts, KernelCost
from sparda.calibrate.residuals import CLASSES, Residuals, class_of, residuals
from sparda.calibrate.store import Store
from tests.calibrate.conftest import MODEL, SPEC
from tests.calibrate.layers import layer_rows


def found_in(costs: FittedCosts, **off: float) -> Residuals:
    return residuals(costs, list(layer_rows(costs, **off)), MODEL, SPEC)  # type: ignore[arg-type]


def test_a_machine_that_is_as_predicted_leaves_nothing(costs: FittedCosts) -> None:
    found = found_in(costs)
    assert found.layers == pytest.approx([0.0] * 2, abs=1e-9)
    for name in CLASSES:
        assert found.slowed[name] == pytest.approx([0.0] * 2, abs=1e-9)
        assert found.moved[name] == pytest.approx([0.0] * 2, abs=1e-9)


def test_kernels_that_grow_in_a_straight_line_leave_nothing_and_a_bump_leaves_its_logarithm(costs: FittedCosts) -> None:
    straight = KernelCost("", (1.0, 2.0, 3.0), (0.0,), ((10.0,), (20.0,), (30.0,)), ((1.0,), (2.0,), (3.0,)))
    bump = replace(straight, ns=((10.0,), (25.0,), (30.0,)))
    kernels = {"straight": straight, "bump": bump}
    left = residuals(replace(costs, fitted=replace(costs.fitted, kernels=kernels)), [], MODEL, SPEC).kernels
    assert left["straight"] == pytest.approx([0.0])
    assert left["bump"] == pytest.approx([log(20.0 / 25.0)])


def test_each_disagreement_stands_under_its_own_name_as_predicted_over_measured(costs: FittedCosts) -> None:
    found = found_in(costs, longer=1.25, slower=1.1, copied=0.8)
    assert found.layers == pytest.approx([-log(1.25)] * 2)
    for name in CLASSES:
        assert found.slowed[name] == pytest.approx([-log(1.1)] * 2)
        assert found.moved[name] == pytest.approx([-log(0.8)] * 2)


def test_a_batch_counts_once_for_its_layer_alone_however_many_copies_ran_beside_it(costs: FittedCosts) -> None:
    rows = list(layer_rows(costs, longer=1.25, ctas=(1, 2, 4, 8)))
    found = residuals(costs, rows, MODEL, SPEC)
    assert (len(rows), len(found.layers), len(found.slowed["few"]), len(found.slowed["some"])) == (8, 2, 6, 2)
    assert found.slowed["many"] == ()


def test_copies_are_told_apart_by_their_thread_blocks() -> None:
    assert [class_of(n) for n in (1, 4, 5, 16, 17, 1024)] == ["few", "few", "some", "some", "many", "many"]


def test_rows_of_single_kinds_beside_a_copy_are_no_residuals(costs: FittedCosts, store: Store) -> None:
    found = residuals(costs, store.latest("corun"), MODEL, SPEC)
    assert (found.layers, *found.slowed.values(), *found.moved.values()) == ((),) * 7
