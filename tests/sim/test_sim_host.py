"""A step that the host issues: action by action where it has work of its own, operation by operation in no graph."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.engine.actions import CALLED, cut
from sparda.engine.plan import COPY, HOST, MAIN, PREFETCH, SELECT, Op, Plan, PlanBuilder, Work
from sparda.sim.player import play
from tests.sim.sim_fakes import FakeCosts, built
from tests.sim.sim_random import least_ns, machines, plans

ALONE = {"a": 100.0, "b": 30.0, "c": 20.0, "gather": 500.0, "upload": 40.0}
FREE = FakeCosts(transfer_start=0.0, join=0.0, step=0.0, issue=10.0, share=1.0, slower=1.0, alone=ALONE)
"""The host takes 10 ns to issue an action and 500 to gather."""
HUGE_NS = 10_000_000
"""Longer than any operation of a small step: what is issued finds the GPU idle."""


def times(plan: Plan, costs: FakeCosts = FREE) -> list[tuple[int, int]]:
    return [(s.start_ns, s.end_ns) for s in play(plan, costs).spans]


def gathering() -> Plan:
    """The GPU tells the host what is missing, which gathers it, has it uploaded, and lets the GPU go on."""
    ops = PlanBuilder()
    chosen = ops.add("a", Work(), stream=MAIN)
    gathered = ops.add("gather", Work(), stream=HOST, after=[chosen])
    uploaded = ops.add("upload", Work(h2d_bytes=2000), stream=COPY, after=[gathered])
    ops.add("b", Work(), stream=MAIN, after=[uploaded])
    return built(ops)


def test_the_host_issues_then_waits_for_the_gpu_then_gathers_then_issues_the_upload() -> None:
    # Issued at 10, done at 110; gathered at 610, when the upload begins; issued at 630, by when the upload still runs.
    assert times(gathering()) == [(10, 110), (110, 610), (610, 650), (650, 680)]


def test_each_join_is_paid_by_the_host_as_by_the_gpu() -> None:
    assert times(gathering(), replace(FREE, join=7.0)) == [(10, 110), (117, 617), (624, 664), (671, 701)]


class Starting(FakeCosts):
    """A host that takes 300 ns to start copies."""

    def issue_ns(self, op: Op, plan: Plan) -> float:
        return 300.0 if op.stream == COPY else self.issue


def test_copies_begin_as_the_host_turns_to_them_and_what_comes_after_waits_until_all_are_started() -> None:
    costs = Starting(transfer_start=0.0, join=0.0, step=0.0, issue=10.0, alone=ALONE)
    assert times(gathering(), costs) == [(10, 110), (110, 610), (610, 650), (920, 950)]


def test_work_of_the_host_delays_what_is_issued_after_it_though_nothing_waits_for_it() -> None:
    ops = PlanBuilder()
    ops.add("a", Work(), stream=MAIN)
    ops.add("gather", Work(), stream=HOST)
    ops.add("b", Work(), stream=MAIN)
    assert times(built(ops)) == [(10, 110), (10, 510), (520, 550)]


def test_a_host_that_runs_ahead_leaves_no_gap_on_the_gpu() -> None:
    ops = PlanBuilder()
    ops.add("gather", Work(), stream=HOST)
    for stream in (MAIN, SELECT, MAIN, SELECT):
        ops.add("a", Work(), stream=stream)
    assert times(built(ops))[1:] == [(510, 610), (520, 620), (610, 710), (620, 720)]


def test_a_host_that_falls_behind_is_what_the_gpu_waits_for() -> None:
    ops = PlanBuilder()
    ops.add("gather", Work(), stream=HOST)
    for stream in (MAIN, SELECT, MAIN, SELECT):
        ops.add("a", Work(), stream=stream)
    assert [start for start, _ in times(built(ops), replace(FREE, issue=300.0))[1:]] == [800, 1100, 1400, 1700]


def test_operations_of_one_action_are_issued_together() -> None:
    ops = PlanBuilder()
    ops.add("gather", Work(), stream=HOST)
    for kind in ("b", "c", "b"):
        ops.add(kind, Work(), stream=MAIN)
    assert times(built(ops))[1:] == [(510, 540), (540, 560), (560, 590)]


def test_a_step_without_work_of_the_host_is_one_graph_and_issued_at_once() -> None:
    ops = PlanBuilder()
    ops.add("b", Work(), stream=MAIN)
    ops.add("c", Work(), stream=SELECT)
    assert times(built(ops), replace(FREE, issue=1e6)) == [(0, 30), (0, 20)]


def test_what_the_host_does_uses_neither_the_link_nor_hbm() -> None:
    ops = PlanBuilder()
    ops.add("gather", Work(host_bytes=1 << 20), stream=HOST)
    timeline = play(built(ops), replace(FREE, alone={}, floor_ns=0.0))
    assert timeline.makespan_ns == ceil((1 << 20) / FREE.host_gb_s)
    assert {(link, hbm) for _, link, hbm in timeline.samples} == {(0.0, 0.0)}


hosted = plans.filter(lambda plan: HOST in plan.streams)
graphs = plans.filter(lambda plan: HOST not in plan.streams)
examples = settings(max_examples=40, deadline=None)


@examples
@given(hosted, machines)
def test_the_host_does_one_thing_at_a_time_in_the_order_of_the_plan(plan: Plan, costs: FakeCosts) -> None:
    spans, free, issue = play(plan, costs).spans, 0, ceil(costs.issue - 1e-6)
    for action in cut(plan):
        first = spans[action.ops[0].index]
        issued = free + (0 if action.stream in CALLED else issue)
        assert first.start_ns >= issued
        free = first.end_ns if action.stream == HOST else free + issue


@examples
@given(hosted, machines)
def test_a_step_with_work_of_the_host_lasts_as_long_as_all_that_the_host_does(plan: Plan, costs: FakeCosts) -> None:
    alone = least_ns(plan, costs)
    does = [costs.issue if a.stream != HOST else alone[a.ops[0].index] for a in cut(plan)]
    assert play(plan, costs).makespan_ns >= sum(does) - 1e-3


@examples
@given(hosted, machines, st.integers(1, HUGE_NS))
def test_a_step_with_work_of_the_host_is_in_graphs_and_has_no_other_issue_time(
    plan: Plan, costs: FakeCosts, issue_ns: int
) -> None:
    assert play(plan, costs, issue_ns).spans == play(plan, costs).spans


@examples
@given(graphs, machines)
def test_with_a_huge_issue_time_a_step_is_its_launches_and_its_last_operation(plan: Plan, costs: FakeCosts) -> None:
    join = costs.join if plan.ops[-1].after else 0.0
    last = ceil(join - 1e-6) + ceil(least_ns(plan, costs)[-1] - 1e-6)
    launches = len(plan.ops) * HUGE_NS
    assert play(plan, costs, HUGE_NS).makespan_ns == launches + last + ceil(costs.step - 1e-6)


@examples
@given(graphs, machines)
def test_operations_issued_slowly_find_the_gpu_idle_and_take_as_long_as_alone(plan: Plan, costs: FakeCosts) -> None:
    spans = play(plan, costs, HUGE_NS).spans
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))
    # A copy's start and its bytes are rounded up each by itself.
    assert all(least <= s.ns + 1e-3 <= least + 2 for s, least in zip(spans, least_ns(plan, costs), strict=True))


@examples
@given(plans, machines)
def test_issued_in_no_time_a_step_is_the_graph_of_it(plan: Plan, costs: FakeCosts) -> None:
    assert play(plan, costs, issue_ns=0).to_json() == play(plan, costs).to_json()


@examples
@given(graphs, machines, st.integers(1, 20_000))
def test_every_operation_issued_one_by_one_begins_after_all_before_it_were_issued(
    plan: Plan, costs: FakeCosts, issue_ns: int
) -> None:
    starts = [s.start_ns for s in play(plan, costs, issue_ns).spans]
    assert all(start >= (place + 1) * issue_ns for place, start in enumerate(starts))


def test_a_prefetch_is_issued_like_any_other_operation() -> None:
    ops = PlanBuilder()
    ops.add("b", Work(), stream=MAIN)
    ops.add("prefetch", Work(h2d_bytes=45_000, ctas=2), stream=PREFETCH)
    assert [(s.start_ns, s.end_ns) for s in play(built(ops), FREE, 50).spans] == [(50, 80), (100, 1100)]
