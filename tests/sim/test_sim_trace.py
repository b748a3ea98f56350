"""A step's trace: tracks of streams and resources, counters, and arrows from copies to what needs them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from sparda.engine.config import Config, Workload
from sparda.engine.plan import MAIN, PlanBuilder, Work
from sparda.sim.player import play
from sparda.sim.replay import replay
from sparda.sim.timeline import Timeline
from sparda.sim.trace import chrome_trace, joined, needed_by
from sparda.sim.usage import average_samples, rates, running
from tests.sim.sim_fakes import PLAYED, SMALL, FakeCosts, built, step_plan

Event = dict[str, Any]


def events_of(trace: Event, phase: str = "") -> list[Event]:
    events: list[Event] = json.loads(json.dumps(trace))["traceEvents"]
    return [e for e in events if not phase or e["ph"] == phase]


def played(policy: str = "sparda", **config: Any) -> Timeline:
    return play(step_plan(Workload(), Config(policy=policy, score_layer=1, **config), SMALL), FakeCosts())


@pytest.fixture(scope="module", params=PLAYED)
def timeline(request: pytest.FixtureRequest) -> Timeline:
    return played(request.param)


def named(events: list[Event], name: str) -> int:
    return next(int(e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == name)


def test_every_operation_is_on_its_streams_track(timeline: Timeline) -> None:
    events = events_of(chrome_trace(timeline))
    for stream in timeline.plan.streams:
        tid = named(events, f"stream {stream}")
        found = [(e["name"], round(e["ts"] * 1e3)) for e in events if e["ph"] == "X" and e["tid"] == tid]
        spans = [(s.name, s.start_ns) for s in timeline.spans if s.stream == stream]
        assert found == spans


def test_events_are_sorted_and_take_no_negative_time(timeline: Timeline) -> None:
    events = events_of(chrome_trace(timeline))
    times = [e["ts"] for e in events if "ts" in e]
    assert times == sorted(times)
    assert min(times) >= 0
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


def test_slices_of_one_track_never_overlap(timeline: Timeline) -> None:
    tracks = defaultdict(list)
    for e in events_of(chrome_trace(timeline), "X"):
        tracks[e["tid"]].append((round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)))
    assert all(a[1] <= b[0] for spans in tracks.values() for a, b in pairwise(spans))


def test_a_resource_has_a_track_where_the_plan_uses_it(timeline: Timeline) -> None:
    names = {e["args"]["name"] for e in events_of(chrome_trace(timeline), "M") if e["name"] == "thread_name"}
    plan = timeline.plan
    assert ("link host to device" in names) == any(op.work.h2d_bytes for op in plan)
    assert ("link device to host" in names) == any(op.work.d2h_bytes for op in plan)
    assert ("SMs: CTAs held by copies" in names) == any(op.work.ctas for op in plan)
    assert ("copy engine" in names) == ("host" in names) == (plan.config.policy == "infinigen")
    assert {"SMs: what else runs", "HBM", "step"} <= names


def test_the_link_track_covers_exactly_the_time_of_the_copies() -> None:
    timeline = played()
    events = events_of(chrome_trace(timeline))
    tid = named(events, "link host to device")
    shown = sum(e["dur"] for e in events if e["ph"] == "X" and e["tid"] == tid)
    assert shown == pytest.approx(sum(s.ns for s in timeline.spans if s.kind == "prefetch") / 1e3)


def test_each_arrow_begins_inside_a_copy_and_ends_at_the_attention_of_its_layer(timeline: Timeline) -> None:
    events = events_of(chrome_trace(timeline))
    begun, ended = ([e for e in events if e["ph"] == phase] for phase in "sf")
    assert [e["id"] for e in begun] == sorted({e["id"] for e in begun})
    assert {e["id"] for e in begun} == {e["id"] for e in ended}
    copies = [op for op in timeline.plan if op.work.h2d_bytes]
    assert len(begun) == len(copies)
    arrow = {e["id"]: e for e in ended}
    for first, copy in zip(begun, copies, strict=True):
        span = timeline.spans[copy.index]
        assert span.start_ns <= round(first["ts"] * 1e3) < span.end_ns
        attention = next(s for s in timeline.spans if "attention" in s.kind and s.layer == copy.layer)
        assert round(arrow[first["id"]]["ts"] * 1e3) == attention.start_ns


def test_an_arrow_goes_through_the_operation_that_hands_on_the_wait() -> None:
    gathered = played("infinigen")
    plan = gathered.plan
    chains = [[plan.ops[i].kind for i in chain] for chain in needed_by(plan).values()]
    assert chains == [["scatter", "attention"]] * (SMALL.layers - 1)
    assert len(events_of(chrome_trace(gathered), "t")) == SMALL.layers - 1


def test_a_fetch_on_the_main_stream_has_an_arrow_although_nothing_waits() -> None:
    assert len(events_of(chrome_trace(played("sparse")), "s")) == SMALL.layers - 1


def test_counters_end_at_zero_and_stay_below_the_machines_limits() -> None:
    counters = defaultdict(list)
    for e in events_of(chrome_trace(played(prefetch_ctas=3)), "C"):
        counters[e["name"]].append(e["args"]["value"])
    assert all(values[-1] == 0.0 for values in counters.values())
    assert max(counters["link host to device GB/s"]) <= 50.0
    assert max(counters["HBM GB/s"]) <= 4000.0
    assert max(counters["link device to host GB/s"]) > 0.0
    assert set(counters["CTAs held by copies"]) == {0.0, 3.0}


def test_joined_timelines_are_processes_whose_arrows_have_ids_of_their_own() -> None:
    one, two = played(), played("sparse")
    events = events_of(joined([("simulated", one), ("measured", two)]))
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [t.split(":")[0] for t in titles] == ["simulated", "measured"]
    ids = Counter(e["id"] for e in events if e["ph"] == "s")
    assert set(ids.values()) == {1}
    assert {e["pid"] for e in events} == {0, 1}


def test_the_same_timeline_gives_the_same_trace() -> None:
    assert json.dumps(chrome_trace(played())) == json.dumps(chrome_trace(played()))


def test_a_step_without_copies_has_no_arrows_and_no_counter_of_the_link() -> None:
    events = events_of(chrome_trace(played("dense")))
    assert not [e for e in events if e["ph"] in "stf"]
    assert all(e["args"]["value"] == 0 for e in events if e["ph"] == "C" and "HBM" not in e["name"])


def test_rates_spread_an_operations_bytes_over_its_time() -> None:
    ops = PlanBuilder()
    ops.add("a", Work(hbm_bytes=1000), stream=MAIN)
    ops.add("b", Work(hbm_bytes=900, h2d_bytes=300), stream="prefetch")
    ops.add("c", Work(), stream=MAIN)
    timeline = replay(built(ops), [100, 300, 50])
    assert rates(timeline.spans, lambda op: op.work.hbm_bytes) == [(0, 13.0), (100, 3.0), (300, 0.0)]
    assert average_samples(timeline.spans) == ((0, 1.0, 13.0), (100, 1.0, 3.0), (300, 0.0, 0.0))


def test_what_runs_is_known_between_every_start_and_end() -> None:
    timeline = played()
    total = sum((end - begin) * len(active) for begin, end, active in running(timeline.spans))
    assert total == sum(s.ns for s in timeline.spans)
    assert not list(running([replace(s, end_ns=s.start_ns) for s in timeline.spans]))
