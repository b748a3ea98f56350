"""Layers that repeat each other are simulated once, and nobody can tell from the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.plan import MAIN, PREFETCH, SELECT, Plan, PlanBuilder, Work
from sparda.sim.fluid import FluidMachine
from sparda.sim.player import play, play_whole
from tests.sim import sim_layers
from tests.sim.sim_fakes import MINICPM, FakeCosts, built, step_plan, transfers_of

COSTS = FakeCosts()

machines = st.builds(
    FakeCosts,
    hbm_gb_s=st.sampled_from([1000.0, 4000.0, 4123.7]),
    link_gb_s=st.sampled_from([5.0, 31.3, 50.0]),
    copy_gb_s=st.sampled_from([7.0, 45.0]),
    floor_ns=st.sampled_from([0.0, 1500.0, 1733.3]),
    slower=st.sampled_from([1.0, 1.1, 2.7]),
    share=st.sampled_from([0.3, 0.9, 1.0]),
    transfer_start=st.sampled_from([0.0, 3000.0]),
    join=st.sampled_from([0.0, 1200.0]),
    room=st.sampled_from([None, 0, 2, 4]),
)
workloads = st.builds(
    Workload,
    batch=st.sampled_from([1, 4, 16, 37, 64]),
    context_tokens=st.just(65536),
    miss_rate=st.sampled_from([0.0, 0.03, 0.06, 0.12, 0.4]),
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    policy = draw(st.sampled_from(POLICIES))
    return Config(
        policy=policy,
        lookahead=1 if policy == "infinigen" else draw(st.integers(0, 4)),
        prefetch_ctas=draw(st.sampled_from([1, 2, 3, 8, 16])),
        score_layer=draw(st.integers(0, 12)),
        # By way of the host every layer is simulated: a few of these are enough.
        transfer=draw(st.sampled_from(("uva", "uva", *transfers_of(policy)))) if policy != "infinigen" else "uva",
    )


@settings(max_examples=120, deadline=None)
@given(workloads, configs(), machines)
def test_the_shortcut_gives_the_whole_simulations_bytes(workload: Workload, config: Config, made: FakeCosts) -> None:
    plan = step_plan(workload, config)
    assert play(plan, made).to_json() == play_whole(plan, made).to_json()


@settings(max_examples=300, deadline=None)
@given(sim_layers.plans, sim_layers.machines)
def test_so_it_does_for_layers_of_any_kind_where_much_happens_at_once(plan: Plan, made: FakeCosts) -> None:
    assert play(plan, made) == play_whole(plan, made)


LeftOut = Callable[[Plan, FakeCosts], int]


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> LeftOut:
    """Plays a plan, asserts that it is the whole simulation's timeline, and says how many periods were left out."""
    counted: list[int] = []
    repeat = FluidMachine.repeat

    def count(self: FluidMachine, since: int, period_ns: int, times: int) -> None:
        counted.append(times)
        repeat(self, since, period_ns, times)

    monkeypatch.setattr(FluidMachine, "repeat", count)

    def played(plan: Plan, costs: FakeCosts) -> int:
        counted.clear()
        assert play(plan, costs) == play_whole(plan, costs)
        return sum(counted)

    return played


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in ("infinigen", "shallow")])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_settled_step_plays_few_of_its_layers(policy: str, lookahead: int, left_out: LeftOut) -> None:
    plan = step_plan(Workload(16, 65536, 0.06), Config(policy=policy, lookahead=lookahead))
    assert left_out(plan, COSTS) > 0.7 * MINICPM.layers


def test_of_copies_that_all_begin_early_layers_before_and_after_them_are_left_out(left_out: LeftOut) -> None:
    plan = step_plan(Workload(16, 65536, 0.003), Config(policy="shallow", score_layer=8))
    assert left_out(plan, COSTS) > 0.5 * MINICPM.layers


def test_a_step_with_work_of_the_host_is_played_whole(left_out: LeftOut) -> None:
    assert left_out(step_plan(Workload(16, 65536, 0.06), Config(transfer="gather")), COSTS) == 0


def test_a_step_issued_operation_by_operation_is_played_whole() -> None:
    plan = step_plan()
    assert play(plan, COSTS, issue_ns=5000) == play_whole(plan, COSTS, issue_ns=5000)


def test_a_model_of_two_layers_has_nothing_to_leave_out(left_out: LeftOut) -> None:
    assert left_out(step_plan(shape=replace(MINICPM, layers=2)), COSTS) == 0


def test_layers_that_differ_are_played_one_by_one(left_out: LeftOut) -> None:
    ops = PlanBuilder()
    for layer in range(20):
        ops.add("norm", Work(hbm_bytes=1000), layer=layer)
        ops.add("down", Work(hbm_bytes=1000 * layer), layer=layer)
    assert left_out(built(ops), COSTS) == 0


def test_one_layer_of_its_own_in_the_middle_is_played_between_those_left_out(left_out: LeftOut) -> None:
    ops = PlanBuilder()
    for layer in range(21):
        ops.add("norm", Work(hbm_bytes=1000), layer=layer)
        ops.add("down", Work(hbm_bytes=9000 if layer == 10 else 1000), layer=layer)
    assert 10 < left_out(built(ops), COSTS) < 20


def test_a_stream_that_waits_for_one_layer_starts_when_that_has_ended(left_out: LeftOut) -> None:
    ops = PlanBuilder()
    awaited = 0
    for layer in range(30):
        ops.add("norm", Work(hbm_bytes=1000), layer=layer)
        down = ops.add("down", Work(hbm_bytes=1000), layer=layer)
        awaited = down if layer == 17 else awaited
    late = ops.add("report", Work(d2h_bytes=1000), stream=PREFETCH, after=[awaited])
    plan = built(ops)
    assert left_out(plan, COSTS) > 20
    spans = play(plan, COSTS).spans
    assert spans[late].start_ns == spans[awaited].end_ns + COSTS.join


def test_a_wait_for_what_has_long_ended_holds_nothing_up(left_out: LeftOut) -> None:
    ops = PlanBuilder()
    first = ops.add("report", Work(), stream=PREFETCH)
    for layer in range(30):
        ops.add("norm", Work(hbm_bytes=1000), layer=layer, after=[first])
        ops.add("down", Work(hbm_bytes=1000), layer=layer)
    assert left_out(built(ops), COSTS) > 20


def test_a_layer_that_joins_beside_a_choice_is_not_like_one_that_does_not(left_out: LeftOut) -> None:
    ops = PlanBuilder()
    first = ops.add("report", Work(), stream=PREFETCH)
    for layer in range(30):
        ops.add("norm", Work(hbm_bytes=1000), layer=layer)
        if layer == 17:
            # It waits for nothing, so it has long run when the layer comes that it stands beside in the plan.
            ops.add("select", Work(), layer=layer, stream=SELECT)
        ops.add("attention", Work(hbm_bytes=1000), layer=layer, after=[first])
    plan, costs = built(ops), sim_layers.JoinsBesideChoices()
    assert left_out(plan, costs) > 20
    main = [s for s in play(plan, costs).spans if s.stream == MAIN]
    assert [b.name for a, b in pairwise(main) if b.start_ns > a.end_ns] == ["attention[17]"]


def test_a_choice_beside_every_second_layer_repeats_every_second_layer(left_out: LeftOut) -> None:
    ops = PlanBuilder()
    for layer in range(30):
        norm = ops.add("norm", Work(hbm_bytes=1000), layer=layer)
        chosen = [ops.add("select", Work(hbm_bytes=500), layer=layer, stream=SELECT, after=[norm])] * (layer % 2)
        ops.add("attention", Work(hbm_bytes=1000), layer=layer, stream=MAIN, after=chosen)
    assert left_out(built(ops), COSTS) in range(10, 15)
