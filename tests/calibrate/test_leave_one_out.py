"""Leaving out: what is exactly of a table's form costs nothing, what has no inner point gets no error."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.calibrate.costs import IN_ORDER, Beside, CtaCurve, KernelCost
from sparda.calibrate.fit import calibrate, fit
from sparda.calibrate.fit_copies import longest_copies
from sparda.calibrate.leave_one_out import (
    Duel,
    Errors,
    LeftOut,
    copy_errors,
    corun_errors,
    fit_law,
    fit_link,
    kernel_errors,
    leave_one_out,
)
from sparda.calibrate.profile import load_profile
from sparda.calibrate.store import Store
from sparda.engine.config import Config, Workload
from sparda.engine.loader import read, to_plain
from sparda.explore.cli.calibrate import run
from tests.calibrate.conftest import CONTEXTS, CTAS, MODEL, SHAPES, SPEC, row, step_row

NONE = LeftOut(0, None, None, None)
LAUNCH_NS, BYTES_PER_NS = 1500.0, 4000.0
SMALL = 1e-9
Grid = tuple[tuple[float, ...], ...]

times = st.floats(1.0, 1e6)


def cost_of(batches: tuple[float, ...], seconds: tuple[float, ...], ns: Grid, hbm_bytes: Grid) -> KernelCost:
    return KernelCost("context_tokens" if len(seconds) > 1 else "", batches, seconds, ns, hbm_bytes)


def by_law(batches: tuple[float, ...], seconds: tuple[float, ...] = (0.0,)) -> KernelCost:
    """A kernel whose time is launch + bytes / rate; its bytes grow unevenly from batch to batch."""
    moved = tuple(tuple(1e6 * b**1.7 * (1 + s) ** 0.5 for s in seconds) for b in batches)
    return cost_of(batches, seconds, tuple(tuple(LAUNCH_NS + m / BYTES_PER_NS for m in line) for line in moved), moved)


@st.composite
def kernel_costs(draw: st.DrawFn) -> KernelCost:
    batches = tuple(map(float, sorted(draw(st.sets(st.integers(1, 128), min_size=1, max_size=6)))))
    seconds = tuple(map(float, sorted(draw(st.sets(st.integers(0, 1 << 17), min_size=1, max_size=4)))))
    ns, moved = (tuple(tuple(draw(times) for _ in seconds) for _ in batches) for _ in range(2))
    return cost_of(batches, seconds, ns, moved)


@st.composite
def curves(draw: st.DrawFn) -> CtaCurve:
    ctas = tuple(sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=8))))
    return CtaCurve(8, ctas, tuple(draw(st.floats(1.0, 60.0)) for _ in ctas))


def test_the_law_of_rows_that_obey_it_is_found_again_and_has_no_error() -> None:
    cost = by_law((1.0, 4.0, 16.0, 64.0), (1.0, 3.0, 9.0))
    errors = kernel_errors(cost, 0.001)
    assert errors.duel.law == pytest.approx(0.0, abs=SMALL)
    assert errors.duel.winner == "law"
    assert (errors.batch.count, errors.second.count) == (2 * 3, 4 * 1)


@given(st.floats(0.0, 1e5), st.floats(100.0, 5000.0))
def test_a_law_is_found_again_whatever_its_launch_and_rate(launch: float, rate: float) -> None:
    moved = np.array([1e4, 1e6, 1e7, 1e8])
    found, per_byte = fit_law(moved, launch + moved / rate)
    assert found == pytest.approx(launch, rel=1e-6, abs=1e-3)
    assert per_byte == pytest.approx(1 / rate, rel=1e-6)


def test_a_linear_table_has_no_error_where_a_law_of_the_bytes_has() -> None:
    batches, seconds = (1.0, 2.0, 8.0, 32.0), (16.0, 64.0, 128.0)
    ns = tuple(tuple(100.0 + 7.0 * b + 3.0 * s for s in seconds) for b in batches)
    moved = tuple(tuple(1e3 * b for _ in seconds) for b in batches)
    errors = kernel_errors(cost_of(batches, seconds, ns, moved), 0.001)
    for found in (errors.batch.median, errors.batch.worst, errors.second.worst, errors.duel.table):
        assert found == pytest.approx(0.0, abs=SMALL)
    assert errors.duel.law is not None
    assert errors.duel.law > 0.1
    assert errors.duel.winner == "table"


def test_only_inner_points_are_left_out() -> None:
    """The middle of three batches lies a tenth above the line; the ends, however odd, are never predicted."""
    cost = cost_of((1.0, 2.0, 3.0), (0.0,), ((10.0,), (22.0,), (30.0,)), ((0.0,), (0.0,), (0.0,)))
    found = kernel_errors(cost, 0.002).batch
    assert (found.count, found.worst, found.spread) == (1, found.median, 0.002)
    assert found.worst == pytest.approx(1 / 11)
    curve = CtaCurve(8, (1, 2, 4), (10.0, 25.0, 30.0))
    found = copy_errors(curve, 0.003).ctas
    assert (found.count, found.worst, found.spread) == (1, found.median, 0.003)
    assert found.worst == pytest.approx(0.2)


@pytest.mark.parametrize("batches", [(1.0,), (1.0, 64.0)])
def test_a_kind_of_fewer_than_three_batches_has_no_points_and_no_invented_error(batches: tuple[float, ...]) -> None:
    errors = kernel_errors(by_law(batches), 0.01)
    assert (errors.batch, errors.second, errors.duel) == (NONE, NONE, Duel(None, None, "none"))
    beside = [Beside(int(b), (CtaCurve(8, (1, 2), (1.0, 1.1)),), (CtaCurve(8, (1,), (9.0,)),)) for b in batches]
    found = corun_errors(beside, 0.01)
    assert [found.slowdown_ctas, found.slowdown_batch, found.gb_s_ctas, found.gb_s_batch] == [NONE] * 4


@given(kernel_costs(), st.lists(curves(), min_size=1, max_size=5))
def test_the_worst_error_is_at_least_the_median_and_both_are_sizes(cost: KernelCost, lines: list[CtaCurve]) -> None:
    own = kernel_errors(cost, 0.01)
    beside = corun_errors([Beside(i, (c,), (c,)) for i, c in enumerate(lines)], 0.01)
    found = [own.batch, own.second, beside.slowdown_ctas, beside.slowdown_batch, beside.gb_s_ctas, beside.gb_s_batch]
    found += [copy_errors(c, 0.01).ctas for c in lines]
    assert own.batch.count == max(0, len(cost.batches) - 2) * len(cost.seconds)
    for e in found:
        if e.count:
            assert e.median is not None
            assert e.worst is not None
            assert 0.0 <= e.median <= e.worst
        else:
            assert e == NONE


@pytest.mark.parametrize(("spread", "winner"), [(1.0, "tie"), (1e-9, "table")])
def test_a_difference_below_the_spread_is_a_tie(spread: float, winner: str) -> None:
    cost = cost_of((1.0, 2.0, 3.0), (0.0,), ((10.0,), (20.0,), (30.0,)), ((5.0,), (5.0,), (5.0,)))
    assert kernel_errors(cost, spread).duel.winner == winner


def test_a_left_out_batch_beside_a_copy_is_predicted_at_every_depth_and_cta_count() -> None:
    def at(batch: int, bend: float) -> Beside:
        lines = tuple(CtaCurve(d, (1, 4, 16), tuple(1 + bend + 0.01 * batch * c for c in (1, 4, 16))) for d in (4, 8))
        return Beside(batch, lines, lines)

    errors = corun_errors([at(1, 0.0), at(4, 0.0), at(64, 0.0)], 0.02)
    assert (errors.slowdown_batch.count, errors.slowdown_batch.spread) == (6, 0.02)
    assert errors.slowdown_batch.worst == pytest.approx(0.0, abs=SMALL)
    assert (errors.slowdown_ctas.count, errors.gb_s_ctas.count) == (6, 6)
    # Rows keep no repeats of the copy's rate.
    assert (errors.gb_s_batch.count, errors.gb_s_batch.spread) == (6, None)
    bent = corun_errors([at(1, 0.0), at(4, 0.5), at(64, 0.0)], 0.02)
    assert bent.slowdown_batch.worst == pytest.approx(0.5 / (1.5 + 0.04))


@given(st.floats(1.0, 40.0), st.floats(1.0, 60.0))
def test_a_copy_that_is_the_lesser_of_link_and_ctas_is_found_again(per_cta: float, link: float) -> None:
    curve = CtaCurve(8, CTAS, tuple(min(link, per_cta * c) for c in CTAS))
    found_link, found = fit_link(curve)
    assert [min(found_link, found * c) for c in CTAS] == pytest.approx(curve.values)


def test_the_law_of_a_copy_beats_its_table_where_the_copy_obeys_it() -> None:
    ctas = (1, 2, 3, 4, 8, 16)
    errors = copy_errors(CtaCurve(8, ctas, tuple(min(50.0, 14.0 * c) for c in ctas)), 0.002)
    assert (errors.stages, errors.duel.winner) == (8, "law")
    assert errors.duel.law == pytest.approx(0.0, abs=SMALL)


def errors_of(store: Store) -> Errors:
    copies = longest_copies(store.latest("link"))
    return leave_one_out(fit("none", store, MODEL, SPEC).fitted, store.latest("kernel"), store.latest("corun"), copies)


def test_every_kind_and_depth_has_its_errors_beside_the_spread_of_its_rows(store: Store) -> None:
    errors, fitted = errors_of(store), fit("none", store, MODEL, SPEC).fitted
    assert (set(errors.kernels), set(errors.corun)) == (set(fitted.kernels), {*fitted.beside, IN_ORDER})
    assert [e.stages for e in errors.copies] == [c.stages for c in fitted.transfer]
    down, beside, score = errors.kernels["down"], errors.corun["down"], errors.kernels["score"]
    # The bytes of a projection grow in a straight line with the batch: so do its times, and table and law agree.
    assert (down.batch.count, down.duel.winner) == (1, "tie")
    assert down.batch.worst == pytest.approx(0.0, abs=1e-3)
    assert (score.batch.count, score.second) == (len(CONTEXTS), NONE)
    assert (beside.slowdown_ctas.count, beside.slowdown_batch) == (2 * len(SHAPES) * (len(CTAS) - 2), NONE)
    for found in (down.batch, score.batch, beside.slowdown_ctas, *(e.ctas for e in errors.copies)):
        assert found.spread == pytest.approx(0.015, abs=2e-4)


def test_a_slow_down_told_by_a_layer_is_as_unsure_as_the_time_it_is_longer_by(store: Store) -> None:
    """A layer of 1000 us that a copy of some 1670 us makes longer by 15: what 1.5 % of it are to the copy."""
    for batch in (1, 64):
        case = {"batch": batch, "ctas": 2, "warps": 1, "stages": 8, "chunk_bytes": 16384}
        values = {"alone_us": 1000.0, "copy_bytes": 45e6}
        store.append("corun", [row("corun", IN_ORDER, dict(case), 1015.0, values)])
    fitted = fit("none", store, MODEL, SPEC).fitted
    ordered = replace(fitted, in_order=tuple(_dense(b) for b in fitted.in_order))
    found = leave_one_out(ordered, [], store.latest("corun"), []).corun[IN_ORDER].slowdown_ctas
    copy_us = 3.0 + 45e6 / (0.9 * 30.0) / 1e3
    slowdown = copy_us / (copy_us - 15.0)
    assert found.spread == pytest.approx(slowdown * 0.015 * 1015.0 / copy_us, rel=1e-2)


def _dense(beside: Beside) -> Beside:
    """Its one measured slow-down at three CTA counts, so that one of them is an inner one."""
    (value,) = beside.slowdown[0].values
    return replace(beside, slowdown=(CtaCurve(8, (1, 2, 4), (value,) * 3),))


def test_errors_come_back_from_json_as_they_were(store: Store) -> None:
    errors = errors_of(store)
    assert read(Errors, json.loads(json.dumps(to_plain(errors))), where="errors") == errors


def test_a_profile_carries_its_errors(store: Store) -> None:
    store.append("step", [step_row(Workload(b, 32768, 0.06), Config(), 9000.0) for b in (1, 16)])
    profile = calibrate(store.folder, "none.measured")
    assert profile.errors == errors_of(store)
    assert load_profile(str(store.folder)).errors == profile.errors


def test_the_shipped_profile_carries_the_errors_of_its_own_rows() -> None:
    shipped = load_profile("h200-sxm.measured")
    store, kinds = shipped.store, shipped.costs.fitted
    again = leave_one_out(kinds, store.latest("kernel"), store.latest("corun"), longest_copies(store.latest("link")))
    assert set(again.kernels) == set(shipped.errors.kernels)
    for kind, e in again.kernels.items():
        assert e.batch.median == pytest.approx(shipped.errors.kernels[kind].batch.median, rel=1e-6)
    ordered = [e.stages for e in shipped.errors.copies]
    assert all(a < b for a, b in pairwise(ordered))


def test_the_command_shows_every_kind_in_80_columns_and_gives_all_of_it_as_json(store: Store) -> None:
    store.append("step", [step_row(Workload(16, 32768, 0.06), Config(), 9000.0)])
    shown = run(argparse.Namespace(folder=store.folder, name="none"))
    errors = errors_of(store)
    assert shown.data["errors"] == to_plain(errors)
    lines = shown.text.split("\n\n", 1)[1].splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(f"{kind} ") for line in lines) for kind in (*errors.kernels, *errors.corun))
