"""A profiler's kernel records become the timeline that they were recorded from, or an error that says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.calibrate.launched import FUNCTIONS, IGNORED, KERNELS, function_of
from sparda.calibrate.step_trace import (
    KernelEvent,
    MeasuredStep,
    load_step,
    median_replay,
    save_step,
    timeline_from_events,
)
from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, SparseSpec
from sparda.sim.player import play
from sparda.sim.replay import own_times, replay
from sparda.sim.timeline import Timeline
from sparda.sim.trace import joined
from tests.calibrate.step_events import plan_of, recorded
from tests.sim.sim_fakes import FakeCosts

ON_THE_GPU = tuple(policy for policy in POLICIES if policy != "infinigen")
CASES = [(policy, ahead) for policy in ON_THE_GPU for ahead in ((1, 2, 3) if policy == "sparda" else (1,))]


def simulated(policy: str = "sparda", lookahead: int = 1, **costs: Any) -> Timeline:
    return play(plan_of(policy, lookahead), FakeCosts(**costs))


@pytest.mark.parametrize(("policy", "lookahead"), CASES)
@pytest.mark.parametrize("merged", [True, False])
def test_every_policys_records_give_its_timeline_again(policy: str, lookahead: int, merged: bool) -> None:
    timeline = simulated(policy, lookahead)
    again = timeline_from_events(timeline.plan, recorded(timeline, merged=merged, suffix="_0d1d2c"), "GPU")
    assert again.spans == timeline.spans
    assert again.machine == "GPU"
    assert again.link_bytes == timeline.link_bytes


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(ON_THE_GPU))
def test_a_measured_step_replayed_with_its_own_kernel_times_is_reproduced(data: Any, policy: str) -> None:
    plan = plan_of(policy)
    # An operation of three kernels has three durations: at least a nanosecond each, so that none is in doubt.
    durations = data.draw(st.lists(st.integers(3, 90_000), min_size=len(plan.ops), max_size=len(plan.ops)))
    gaps = data.draw(st.lists(st.integers(0, 5_000), min_size=len(plan.ops), max_size=len(plan.ops)))
    try:
        measured = timeline_from_events(plan, recorded(replay(plan, durations, [0, *gaps[1:]])), "GPU")
    except SpardaError:
        # Two streams choose at once in the first layer; at absurd durations their kernels cannot be told apart.
        assert len({op.stream for op in plan.of_kind("select")}) > 1
        return
    again = replay(plan, *own_times(measured))
    assert again.spans == measured.spans
    assert again.makespan_ns == measured.makespan_ns


def test_an_operation_launched_early_starts_when_what_it_waits_for_has_ended() -> None:
    timeline = simulated()
    assert timeline_from_events(timeline.plan, recorded(timeline, early_ns=700), "GPU").spans == timeline.spans


def test_choices_of_two_streams_are_told_apart_by_what_they_wait_for() -> None:
    # The main stream's own choice in the first layer comes first or last, as the other stream's latency has it.
    for latency in (0.0, 500.0, 4_000.0, 30_000.0):
        timeline = simulated(join=latency, floor_ns=2000.0)
        assert timeline_from_events(timeline.plan, recorded(timeline), "GPU").spans == timeline.spans


def test_the_choice_that_would_come_too_late_for_the_main_stream_is_not_its_own() -> None:
    plan = plan_of()
    own, other = (next(op for op in plan.of_kind("select") if op.layer == layer) for layer in (0, 1))
    latencies = [0] * len(plan.ops)
    # The side stream begins long after the main stream's own choice has been made.
    latencies[other.index] = 5_000
    timeline = replay(plan, [1000] * len(plan.ops), latencies)
    assert timeline.spans[own.index].start_ns < timeline.spans[other.index].start_ns
    assert timeline_from_events(plan, recorded(timeline), "GPU").spans == timeline.spans


def test_zero_is_the_start_of_the_first_kernel() -> None:
    timeline = simulated()
    shifted = timeline_from_events(timeline.plan, recorded(timeline, zero_ns=10**15), "GPU")
    assert (shifted.spans[0].start_ns, shifted.makespan_ns) == (0, max(s.end_ns for s in timeline.spans))


def test_the_bytes_of_the_copies_are_spread_over_their_time() -> None:
    timeline = simulated()
    measured = timeline_from_events(timeline.plan, recorded(timeline), "GPU")
    ends = [at for at, _, _ in measured.samples[1:]]
    carried = sum(link * (end - at) for (at, link, _), end in zip(measured.samples, ends, strict=False))
    assert carried == pytest.approx(measured.link_bytes)
    assert measured.link_busy_ns == sum(s.ns for s in measured.spans if s.kind == "prefetch")


def test_a_kernel_too_many_or_too_few_is_named_with_both_counts() -> None:
    timeline = simulated()
    events = recorded(timeline)
    linear = next(e for e in events if e.name == "_linear_kernel")
    with pytest.raises(SpardaError, match=r"_linear_kernel was recorded 22 times but this step of sparda .* 21 times"):
        timeline_from_events(timeline.plan, [*events, linear], "GPU")
    events.remove(next(e for e in events if e.name == "_merge_kernel"))
    with pytest.raises(SpardaError, match=r"_merge_kernel was recorded 4 times .* launches it 5 times"):
        timeline_from_events(timeline.plan, events, "GPU")


def test_a_kernel_that_belongs_to_nothing_is_named() -> None:
    timeline = simulated()
    events = [*recorded(timeline), KernelEvent("void at::native::fill_kernel", 0, 1)]
    with pytest.raises(SpardaError, match="'void at::native::fill_kernel' belongs to no operation"):
        timeline_from_events(timeline.plan, events, "GPU")


def test_what_is_known_to_belong_to_no_operation_is_passed_over() -> None:
    timeline = simulated()
    noise = [KernelEvent(f"{name} (Device)", 0, 5) for name in IGNORED]
    assert timeline_from_events(timeline.plan, [*recorded(timeline), *noise], "GPU").spans == timeline.spans


def test_a_step_with_work_of_the_host_is_refused() -> None:
    with pytest.raises(SpardaError, match="'infinigen' has work of the host"):
        timeline_from_events(plan_of("infinigen"), [], "GPU")


def test_kernels_in_an_impossible_order_are_refused() -> None:
    timeline = simulated()
    events = recorded(timeline)
    last = next(e for e in events if e.name == "_forecast_kernel")
    events.remove(last)
    events.append(last._replace(start_ns=0, end_ns=1))
    with pytest.raises(SpardaError, match="which it waits for"):
        timeline_from_events(timeline.plan, events, "GPU")


def test_a_name_is_a_function_or_a_function_with_a_suffix() -> None:
    for function in FUNCTIONS:
        assert function_of(function) == function_of(f"{function}_0d1d2de") == function
    for name in ("_linear_kernel2", "x_linear_kernel", "_linear_kernel_<1>", ""):
        with pytest.raises(SpardaError, match="belongs to no operation"):
            function_of(name)


def test_every_kind_that_a_policy_of_the_gpu_plans_is_in_the_table() -> None:
    assert {op.kind for policy in ON_THE_GPU for op in plan_of(policy)} <= set(KERNELS)


def test_of_several_replays_the_one_of_median_length_is_kept_from_zero_on() -> None:
    events = []
    for number, length in enumerate((900, 100, 300)):
        zero = 10_000 * number
        events += [
            KernelEvent("_embed_kernel", zero, zero + 10),
            KernelEvent("_linear_kernel", zero + 5, zero + length),
        ]
    before = [KernelEvent("Memset (Device)", -5, -1)]
    assert median_replay([*before, *reversed(events)]) == (("_embed_kernel", 0, 10), ("_linear_kernel", 5, 300))
    with pytest.raises(SpardaError, match="at least one whole replay"):
        median_replay(before)


@pytest.fixture
def step() -> MeasuredStep:
    workload, config = Workload(batch=4), Config()
    timeline = play(make_plan(MODELS["minicpm4.1-8b"], SparseSpec(), workload, config), FakeCosts())
    events = median_replay(recorded(timeline))
    return MeasuredStep("minicpm4.1-8b", "NVIDIA Fake", workload, config, "made up", "s1", (7.0, 9.0, 8.0), events)


def test_a_file_gives_the_step_again_and_its_trace_without_a_gpu(step: MeasuredStep, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    save_step(path, step)
    known = load_step(path)
    assert known == step
    assert known.step_us == 8.0
    trace = joined([("measured", known.timeline())])
    assert len([e for e in trace["traceEvents"] if e["ph"] == "s"]) == 31
    assert path.stat().st_size < 20_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 9}, "schema 9"),
        ({"events": [[99, 0, 1]]}, "names no kernel"),
        ({"events": [[0, 5, 1]]}, "ends before it starts"),
        ({"samples_us": []}, "samples_us is empty"),
        ({"workload": {"batch": 0}}, "1 to 1024"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_a_damaged_file_is_named(step: MeasuredStep, tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "step.json"
    save_step(path, step)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(SpardaError, match=said) as error:
        load_step(path)
    assert str(path) in str(error.value)
