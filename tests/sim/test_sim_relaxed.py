"""A machine with one thing made better costs what it says, and otherwise what the machine costs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.engine.config import Config, Workload
from sparda.engine.plan import PREFETCH, PlanBuilder, Work
from sparda.sim.player import play
from sparda.sim.relaxed import Relaxed, at_hbm_ns, fixed_ns
from tests.sim.sim_fakes import PLAYED, SMALL, FakeCosts, built, step_plan

COSTS = FakeCosts()


@pytest.mark.parametrize("policy", PLAYED)
def test_with_nothing_relaxed_it_is_the_machine_itself(policy: str) -> None:
    plan = step_plan(Workload(), Config(policy=policy, score_layer=1), SMALL)
    assert play(plan, Relaxed(COSTS)).spans == play(plan, COSTS).spans


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(0, 1 << 40), st.floats(1.0, 8.0))
def test_faster_hbm_shortens_what_the_bytes_take_and_nothing_else(moved: int, flops: int, times: float) -> None:
    ops = PlanBuilder()
    ops.add("down", Work(hbm_bytes=moved, flops=flops))
    plan = built(ops)
    before, after = (c.alone_ns(plan.ops[0], plan) for c in (COSTS, Relaxed(COSTS, hbm=times)))
    assert before - after == pytest.approx(at_hbm_ns(COSTS, plan.ops[0], before) * (1 - 1 / times), abs=1e-6)
    assert after >= 0.0


def test_a_link_twice_as_fast_moves_copies_in_half_the_time() -> None:
    ops = PlanBuilder()
    ops.add("prefetch", Work(h2d_bytes=45_000_000, ctas=2), stream=PREFETCH)
    spans = [play(built(ops), costs).spans[0].ns for costs in (COSTS, Relaxed(COSTS, link=2.0))]
    assert (spans[0] - COSTS.transfer_start) == 2 * (spans[1] - COSTS.transfer_start)


def test_undisturbed_an_operation_beside_a_copy_takes_as_long_as_alone() -> None:
    ops = PlanBuilder()
    ops.add("prefetch", Work(h2d_bytes=1 << 30, ctas=2), stream=PREFETCH)
    ops.add("down", Work())
    plan, costs = built(ops), FakeCosts(transfer_start=0.0)
    assert play(plan, costs).spans[1].ns > play(plan, Relaxed(costs, disturbed=False)).spans[1].ns == 1500


def test_without_launches_neither_joins_nor_starts_nor_the_graph_cost_anything() -> None:
    plan = step_plan(shape=SMALL)
    free = Relaxed(COSTS, launched=False)
    op = plan.of_kind("attention")[1]
    assert (free.join_ns(op, plan), free.step_ns(plan), free.transfer_start_ns(plan)) == (0.0, 0.0, 0.0)


def test_the_fixed_cost_is_that_of_a_small_operation_and_never_makes_one_negative() -> None:
    ops = PlanBuilder()
    alone = {"norm": 10.0, "append": 1900.0, "ffn_norm": 2000.0, "down": 9000.0}
    for kind in alone:
        ops.add(kind, Work(hbm_bytes=1 << 30 if kind == "down" else 1000))
    plan, costs = built(ops), FakeCosts(alone=alone)
    assert fixed_ns(costs, plan) == 1900.0
    assert [Relaxed(costs, fixed_ns=1900.0).alone_ns(op, plan) for op in plan] == [0.0, 0.0, 100.0, 7100.0]
    assert fixed_ns(costs, built(PlanBuilder())) == 0.0
