"""Layers that repeat each other are simulated once, and nobody can tell from the result."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.engine.config import POLICIES, Config, Workload
from sparda.sim.player import play, play_whole
from sparda.sim.steady import TRIES, longest_run, shortened, without
from tests.sim.sim_fakes import MINICPM, FakeCosts, step_plan

COSTS = FakeCosts()

costs = st.builds(
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
configs = st.builds(
    Config,
    policy=st.sampled_from([policy for policy in POLICIES if policy != "infinigen"]),
    lookahead=st.integers(0, 4),
    prefetch_ctas=st.sampled_from([1, 2, 3, 8, 16]),
)


@settings(max_examples=120, deadline=None)
@given(workloads, configs, costs)
def test_the_shortcut_gives_the_whole_simulations_bytes(workload: Workload, config: Config, made: FakeCosts) -> None:
    plan = step_plan(workload, config)
    assert play(plan, made).to_json() == play_whole(plan, made).to_json()


@pytest.mark.parametrize("policy", ["sparda", "sparse", "dense", "sparda-on-demand", "nosa"])
def test_a_settled_step_takes_the_shortcut(policy: str) -> None:
    assert shortened(step_plan(Workload(16, 65536, 0.06), Config(policy=policy)), lambda p: play_whole(p, COSTS))


def test_layers_that_wait_for_ever_more_distant_ones_are_simulated_one_by_one() -> None:
    # All layers wait for copies that one early layer sets going.
    plan = step_plan(Workload(16, 65536, 0.06), Config(policy="shallow"))
    assert shortened(plan, lambda p: play_whole(p, COSTS)) is None


def test_a_model_of_few_layers_has_nothing_to_leave_out() -> None:
    plan = step_plan(shape=replace(MINICPM, layers=max(TRIES)))
    assert shortened(plan, lambda p: play_whole(p, COSTS)) is None


def test_the_run_of_equal_layers_is_the_step_without_its_ends() -> None:
    plan = step_plan()
    run = longest_run(plan)
    assert run is not None
    first, last = plan.ops[run.begin], plan.ops[run.begin + run.length * run.count - 1]
    assert (first.kind, first.layer, last.kind) == ("norm", 2, "down")
    assert last.layer == MINICPM.layers - 2
    assert run.reach == 2


def test_what_is_left_out_of_a_plan_leaves_it_a_plan() -> None:
    plan = step_plan()
    run = longest_run(plan)
    assert run is not None
    short = without(plan, run.begin + 5 * run.length, 3 * run.length)
    assert [op.index for op in short] == list(range(len(plan.ops) - 3 * run.length))
    assert all(a < op.index for op in short for a in op.after)
    assert short.ops[-1].kind == plan.ops[-1].kind
