"""A GPU with part of it taken away: what is left of it, and steps that were measured so beside their predictions."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.calibrate.costs import FittedCosts
from sparda.calibrate.handicap import Handicapped, handicapped, left_of
from sparda.calibrate.store import Row, Value
from sparda.calibrate.transfer import carried
from sparda.engine.config import Config, Workload
from sparda.engine.policies import make_plan
from sparda.sim.costs import Machine
from sparda.sim.player import play
from tests.calibrate.conftest import MODEL, SPEC, row

MACHINE = Machine("none", "NVIDIA None", 132, 4000.0, 50.0, 52.0, 1 << 37, 1 << 38, 55.0, 80.0)
FREE: dict[str, Value] = {"held_sms": 0, "hbm_ctas": 0, "link_rival": "none"}


def held_row(us: float, workload: Workload | None = None, config: Config | None = None, **taken: Value) -> Row:
    case = {**asdict(workload or Workload()), **(config or Config()).settings, **FREE, **taken}
    return row("handicap", "sparda", case, us)


def test_nothing_taken_away_leaves_the_machine() -> None:
    assert left_of(MACHINE, 0, 0, copied=False) == MACHINE


def test_held_multiprocessors_are_gone_and_nothing_else_is() -> None:
    assert left_of(MACHINE, 32, 0, copied=False) == replace(MACHINE, sms=100)


def test_readers_take_their_multiprocessors_and_memory_in_proportion_to_what_they_ask_for() -> None:
    # Ten ask for 800 GB/s and the step for 4000: of 4000 there are five sixths left.
    left = left_of(MACHINE, 0, 10, copied=False)
    assert (left.sms, left.link_h2d_gb_s) == (122, 50.0)
    assert left.hbm_gb_s == pytest.approx(4000.0 * 4000.0 / 4800.0)


def test_a_copy_engine_takes_its_fair_share_of_what_it_can_get() -> None:
    # Both ask for more than half of the engine's 55: each gets half.
    assert left_of(MACHINE, 0, 0, copied=True) == replace(MACHINE, link_h2d_gb_s=27.5)
    # Thread blocks that ask for less than half get all of it.
    slow = replace(MACHINE, link_h2d_gb_s=20.0)
    assert left_of(slow, 0, 0, copied=True) == slow


@given(st.integers(0, 60), st.integers(0, 60), st.booleans())
def test_whatever_is_taken_away_what_is_left_is_no_more_and_not_nothing(held: int, readers: int, copied: bool) -> None:
    left = left_of(MACHINE, held, readers, copied)
    assert left.sms == MACHINE.sms - held - readers
    assert 0 < left.hbm_gb_s <= MACHINE.hbm_gb_s
    assert MACHINE.link_h2d_gb_s / 2 <= left.link_h2d_gb_s <= MACHINE.link_h2d_gb_s
    more = left_of(MACHINE, held, readers + 1, copied)
    assert more.hbm_gb_s < left.hbm_gb_s


def test_rows_with_nothing_taken_away_are_not_judged(costs: FittedCosts) -> None:
    assert handicapped([held_row(100.0), held_row(200.0, config=Config("sparse"))], costs, MODEL, SPEC) == []


@pytest.mark.parametrize("policy", ["sparda", "sparse", "sparse-resident"])
def test_a_reader_that_takes_nothing_leaves_the_prediction_of_the_whole_gpu(costs: FittedCosts, policy: str) -> None:
    plan = make_plan(MODEL, SPEC, Workload(), Config(policy))
    left = carried(costs, left_of(costs.machine, 0, 0, copied=False), MODEL)
    assert play(plan, left).makespan_ns == pytest.approx(play(plan, costs).makespan_ns, abs=100)


@pytest.mark.parametrize(
    ("taken", "words"),
    [
        ({"held_sms": 64}, "64 multiprocessors"),
        ({"hbm_ctas": 16}, "GPU memory read by 16 multiprocessors"),
        ({"link_rival": "copy"}, "a copy engine on the link"),
    ],
)
def test_each_handicap_is_said_and_predicts_a_slower_step(
    costs: FittedCosts, taken: dict[str, Value], words: str
) -> None:
    workload, config = Workload(64, 131072, 0.12), Config(prefetch_ctas=4)
    # What a multiprocessor reads and an engine copies belongs to the machine; this one was not measured for either.
    known = replace(costs, machine=replace(costs.machine, engine_h2d_gb_s=55.0, sm_read_gb_s=80.0))
    whole = play(make_plan(MODEL, SPEC, workload, config), known).step_us
    (found,) = handicapped([held_row(whole, workload, config, **taken)], known, MODEL, SPEC)
    assert found.taken == words
    assert found.measured_us == whole
    assert found.error == pytest.approx(found.predicted_us / whole - 1)
    assert found.predicted_us > whole


def test_a_step_measured_as_predicted_has_no_error_and_a_slower_one_is_predicted_too_fast(costs: FittedCosts) -> None:
    (found,) = handicapped([held_row(1.0, held_sms=32)], costs, MODEL, SPEC)
    again = Handicapped(found.row, found.predicted_us, found.predicted_us)
    assert again.error == 0.0
    assert replace(again, measured_us=2 * found.predicted_us).error == -0.5
