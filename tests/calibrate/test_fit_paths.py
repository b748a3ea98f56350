"""Transfers by way of the host: what rows of each part tell, and steps that are played with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from sparda.calibrate.costs import FittedCosts, PathCosts
from sparda.calibrate.fit import fit
from sparda.calibrate.fit_paths import BY_BLOCKS, COPIES, fit_paths
from sparda.calibrate.store import Row, Store
from sparda.engine.config import TRANSFERS, Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.plan import HOST
from sparda.engine.policies import make_plan
from sparda.sim.player import play
from tests.calibrate.conftest import MODEL, SPEC, row

BLOCKS = (1, 100, 1000)
PER_BLOCK_US = {"gather": 0.4, "upload": 0.7, "scatter": 0.03, "blocks": 3.5, "batch": 1.2}
LIST_US = 20.0
START_US = {"blocks": 2.0, "batch": 0.4}
"""Of each copy, until it is started: its end comes later."""
REPORT_US, ROUND_TRIP_US = 8.0, 17.0


def path_rows() -> Iterator[Row]:
    for op in BY_BLOCKS:
        for blocks in BLOCKS:
            us = 5.0 + PER_BLOCK_US[op] * blocks
            if op == "gather":
                yield row("link", op, {"blocks": blocks, "threads": 1}, 4 * us)
                yield row("link", op, {"blocks": blocks, "threads": 0}, us)
            elif op in COPIES:
                host = LIST_US + START_US[op] * blocks
                yield row("link", op, {"blocks": blocks}, LIST_US + us, {"enlist_us": LIST_US, "host_us": host})
            else:
                yield row("link", op, {"blocks": blocks}, us)
    for batch, more in ((1, -1.0), (16, 0.0), (64, 2.0)):
        yield row("link", "report", {"batch": batch}, REPORT_US, {"round_trip_us": ROUND_TRIP_US + more})


@pytest.fixture(scope="module")
def paths() -> PathCosts:
    found = fit_paths(list(path_rows()))
    assert found
    return found


@pytest.fixture
def whole(store: Store) -> FittedCosts:
    store.append("link", path_rows())
    for batch in (1, 64):
        store.append("kernel", [row("kernel", "report", {"batch": batch}, 5.0)])
    return fit("none", store, MODEL, SPEC)


@pytest.mark.parametrize("op", BY_BLOCKS)
def test_every_measured_number_of_blocks_takes_what_it_took(paths: PathCosts, op: str) -> None:
    curve = paths.by_blocks[op]
    assert curve.blocks == BLOCKS
    assert [curve.at(n) for n in BLOCKS] == pytest.approx([1e3 * (5.0 + PER_BLOCK_US[op] * n) for n in BLOCKS])


def test_a_gather_takes_what_it_takes_with_the_usual_threads(paths: PathCosts) -> None:
    assert paths.by_blocks["gather"].at(100) == pytest.approx(45_000.0)


@pytest.mark.parametrize("op", COPIES)
def test_making_the_list_starting_the_copies_and_the_copies_themselves_are_told_apart(
    paths: PathCosts, op: str
) -> None:
    assert [paths.listed[op].at(n) for n in BLOCKS] == pytest.approx([1e3 * LIST_US] * 3)
    assert [paths.started[op].at(n) for n in BLOCKS] == pytest.approx([1e3 * START_US[op] * n for n in BLOCKS])
    assert set(paths.listed) == set(paths.started) == set(COPIES)


def test_a_round_trip_begins_when_the_report_ends(paths: PathCosts) -> None:
    assert paths.round_trip_ns == pytest.approx(1e3 * (ROUND_TRIP_US - REPORT_US))


@pytest.mark.parametrize("missing", [*BY_BLOCKS, "report"])
def test_where_a_part_was_not_measured_no_path_is_made_up(missing: str) -> None:
    assert fit_paths([r for r in path_rows() if r.op != missing]) is None


def test_a_gather_that_was_only_measured_with_other_threads_was_not_measured() -> None:
    assert fit_paths([r for r in path_rows() if r.op != "gather" or r.number("threads")]) is None
    assert fit_paths([]) is None


def test_a_case_that_was_measured_again_counts_as_measured_last(store: Store) -> None:
    store.append("link", path_rows())
    store.append("link", [replace(row("link", "upload", {"blocks": 100}, 1.0), session="s2")])
    fitted = fit("none", store, MODEL, SPEC).fitted
    assert fitted.paths
    assert fitted.paths.by_blocks["upload"].at(100) == pytest.approx(1e3)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_step_by_every_path_plays_and_takes_longer_the_more_is_missing(whole: FittedCosts, transfer: str) -> None:
    config = Config(transfer=transfer)
    steps = [play(make_plan(MODEL, SPEC, Workload(16, 131072, rate), config), whole) for rate in (0.03, 0.12, 0.5)]
    times = [s.makespan_ns for s in steps]
    assert times == sorted(times)
    assert times[0] < times[-1]
    blocks = [s.link_bytes / MODEL.block_bytes(SPEC) for s in steps]
    assert blocks[0] < blocks[1] < blocks[2]


def test_copies_one_by_one_are_slower_than_in_one_call_and_gathered_ones_faster(whole: FittedCosts) -> None:
    workload = Workload(64, 131072, 0.12)
    times = {
        t: play(make_plan(MODEL, SPEC, workload, Config(transfer=t)), whole).makespan_ns
        for t in ("blocks", "batch", "gather")
    }
    assert times["blocks"] > times["batch"] > times["gather"]


@pytest.mark.parametrize("transfer", ["gather", "blocks", "batch"])
def test_the_host_sees_a_report_only_a_round_trip_after_its_end(whole: FittedCosts, transfer: str) -> None:
    plan = make_plan(MODEL, SPEC, Workload(16, 131072, 0.06), Config(transfer=transfer))
    timeline = play(plan, whole)
    seen = [op for op in plan if op.stream == HOST]
    assert seen
    for op in seen:
        told = max(timeline.spans[earlier].end_ns for earlier in op.after)
        assert timeline.spans[op.index].start_ns >= told + 1e3 * (ROUND_TRIP_US - REPORT_US)


def test_without_rows_of_the_paths_a_step_by_one_says_what_was_not_measured(costs: FittedCosts) -> None:
    plan = make_plan(MODEL, SPEC, Workload(), Config(transfer="batch"))
    with pytest.raises(SpardaError, match="no measured cost for"):
        play(plan, costs)
