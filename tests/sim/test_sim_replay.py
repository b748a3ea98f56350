"""A step played at durations that are given: a measured step's own times give the measured step again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.plan import MAIN, PREFETCH, Plan, PlanBuilder, Work
from sparda.sim.player import play
from sparda.sim.replay import own_times, replay
from tests.sim.sim_fakes import PLAYED, SMALL, FakeCosts, built, step_plan

POLICIES = st.sampled_from(PLAYED)


def plan_of(policy: str) -> Plan:
    return step_plan(Workload(), Config(policy=policy, score_layer=1), SMALL)


def two_streams() -> Plan:
    ops = PlanBuilder()
    first = ops.add("down", Work(), stream=MAIN)
    ops.add("prefetch", Work(h2d_bytes=100), stream=PREFETCH)
    ops.add("attention", Work(), stream=MAIN, after=[first + 1])
    return built(ops)


def test_an_operation_starts_when_its_stream_is_free_and_its_waits_are_over() -> None:
    spans = replay(two_streams(), [10, 70, 5], [0, 3, 2]).spans
    assert [(s.start_ns, s.end_ns) for s in spans] == [(0, 10), (3, 73), (75, 80)]


def test_a_steps_end_is_its_last_operations_and_what_it_pays_outside() -> None:
    timeline = replay(two_streams(), [10, 7, 5], outside_ns=9)
    assert (timeline.makespan_ns, timeline.link_bytes) == (15 + 9, 100)


@pytest.mark.parametrize("policy", [*PLAYED])
def test_a_simulated_step_is_reproduced_by_its_own_times(policy: str) -> None:
    timeline = play(plan_of(policy), FakeCosts())
    again = replay(timeline.plan, *own_times(timeline))
    assert again.spans == timeline.spans


@settings(max_examples=60, deadline=None)
@given(st.data(), POLICIES)
def test_any_step_is_reproduced_by_its_own_times(data: Any, policy: str) -> None:
    plan = plan_of(policy)
    numbers = st.lists(st.integers(0, 100_000), min_size=len(plan.ops), max_size=len(plan.ops))
    durations, latencies = data.draw(numbers), data.draw(numbers)
    measured = replay(plan, durations, latencies)
    assert own_times(measured) == (durations, latencies)
    assert replay(plan, *own_times(measured)) == measured


@settings(max_examples=40, deadline=None)
@given(st.data(), POLICIES, st.integers(0, 10_000))
def test_a_longer_operation_makes_no_step_shorter(data: Any, policy: str, more: int) -> None:
    plan = plan_of(policy)
    durations = data.draw(st.lists(st.integers(0, 9999), min_size=len(plan.ops), max_size=len(plan.ops)))
    index = data.draw(st.integers(0, len(plan.ops) - 1))
    longer = [*durations[:index], durations[index] + more, *durations[index + 1 :]]
    before, after = replay(plan, durations).makespan_ns, replay(plan, longer).makespan_ns
    assert before <= after <= before + more


@pytest.mark.parametrize(("durations", "latencies"), [([1, 2], None), ([1, 2, -3], None), ([1, 2, 3], [0, 0])])
def test_numbers_that_are_no_durations_are_refused(durations: list[int], latencies: list[int] | None) -> None:
    with pytest.raises(SpardaError, match="each of the plan's 3 operations"):
        replay(two_streams(), durations, latencies)
