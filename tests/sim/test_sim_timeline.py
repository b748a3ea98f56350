"""What a timeline tells of a step, as numbers, JSON and a trace."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from sparda.engine.config import Config
from sparda.engine.plan import HOST, MAIN
from sparda.sim.player import play
from sparda.sim.speed import steps_per_second
from sparda.sim.timeline import Timeline
from tests.sim.sim_fakes import PLAYED, FakeCosts, step_plan


@pytest.fixture(scope="module", params=PLAYED)
def timeline(request: pytest.FixtureRequest) -> Timeline:
    return play(step_plan(config=Config(policy=request.param)), FakeCosts())


def test_main_is_either_busy_or_waiting_until_the_last_operation(timeline: Timeline) -> None:
    last = max(span.end_ns for span in timeline.spans if span.stream == MAIN)
    assert timeline.busy_ns[MAIN] + timeline.exposed_ns == last


def test_totals_by_kind_add_up_to_the_streams_busy_time(timeline: Timeline) -> None:
    totals = timeline.by_kind()
    assert sum(t.ns for t in totals.values()) == sum(timeline.busy_ns.values())
    assert sum(t.count for t in totals.values()) == len(timeline.plan.ops)
    assert sum(t.h2d_bytes for t in totals.values()) == timeline.link_bytes


def test_the_critical_path_runs_from_the_start_to_the_last_end_without_overlap(timeline: Timeline) -> None:
    path = timeline.critical_path()
    # A step with work of the host begins when the host has issued the first of it.
    assert path[0].start_ns == (FakeCosts().issue if HOST in timeline.plan.streams else 0)
    assert path[-1].end_ns == max(span.end_ns for span in timeline.spans)
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(path))


def test_the_json_is_json_and_complete(timeline: Timeline) -> None:
    data = json.loads(timeline.to_json())
    assert data == json.loads(json.dumps(timeline.to_dict()))
    assert data["makespan_ns"] == timeline.makespan_ns
    assert [span["name"] for span in data["spans"]] == [op.name for op in timeline.plan]


def test_the_simulators_speed_is_a_positive_number_of_steps() -> None:
    assert steps_per_second(step_plan(), FakeCosts(), seconds=0.01) > 0.0
