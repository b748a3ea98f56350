"""How operations share the machine, in steps small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.engine.errors import SpardaError
from sparda.engine.plan import COPY, MAIN, PREFETCH, SELECT, PlanBuilder, Work
from sparda.sim.player import play
from sparda.sim.rates import Loads, share_rates
from tests.sim.sim_fakes import FakeCosts, built

FREE = FakeCosts(transfer_start=0.0, join=0.0, step=0.0)
MIB = 1 << 20


def test_two_equal_hbm_bound_operations_share_it_in_half() -> None:
    ops = PlanBuilder()
    ops.add("down", Work(hbm_bytes=4_000_000), stream=MAIN)
    ops.add("score", Work(hbm_bytes=4_000_000), stream=SELECT)
    costs = replace(FREE, floor_ns=0.0)
    assert costs.alone_ns(built(ops).ops[0], built(ops)) == 1000
    assert [(s.start_ns, s.end_ns) for s in play(built(ops), costs).spans] == [(0, 2000), (0, 2000)]


def test_operations_that_leave_hbm_free_do_not_slow_one_another() -> None:
    ops = PlanBuilder()
    ops.add("a", Work(hbm_bytes=1_000_000), stream=MAIN)
    ops.add("b", Work(hbm_bytes=3_000_000), stream=SELECT)
    assert [s.ns for s in play(built(ops), replace(FREE, alone={"a": 1000, "b": 1000})).spans] == [1000, 1000]


def test_an_operation_faster_than_hbm_runs_at_its_own_speed_when_alone() -> None:
    ops = PlanBuilder()
    ops.add("a", Work(hbm_bytes=9_000_000))
    timeline = play(built(ops), replace(FREE, alone={"a": 1000}))
    assert timeline.makespan_ns == 1000
    assert max(hbm for _, _, hbm in timeline.samples) <= FREE.hbm_gb_s


@given(st.floats(1.0, 4.0), st.integers(1, 1_000_000))
def test_an_operation_is_slower_beside_a_prefetch_exactly_by_the_factor(slower: float, alone: int) -> None:
    ops = PlanBuilder()
    ops.add("prefetch", Work(h2d_bytes=1 << 40, hbm_bytes=1 << 40, ctas=2), stream=PREFETCH)
    ops.add("down", Work(hbm_bytes=0))
    span = play(built(ops), replace(FREE, slower=slower, alone={"down": alone})).spans[1]
    assert span.ns == pytest.approx(alone * slower, abs=1)


def test_a_slowdown_ends_with_the_last_byte() -> None:
    ops = PlanBuilder()
    ops.add("prefetch", Work(h2d_bytes=45_000, ctas=2), stream=PREFETCH)
    ops.add("down", Work())
    costs = replace(FREE, slower=2.0, share=1.0, alone={"down": 3000.0})
    # 1000 ns of copying, in which 500 ns' worth gets done; the other 2500 ns go at full speed.
    assert [s.end_ns for s in play(built(ops), costs).spans] == [1000, 3500]


def test_nothing_is_slowed_before_the_first_byte() -> None:
    ops = PlanBuilder()
    ops.add("prefetch", Work(h2d_bytes=45_000, ctas=2), stream=PREFETCH)
    ops.add("down", Work())
    costs = replace(FREE, slower=2.0, share=1.0, transfer_start=3000.0, alone={"down": 3000.0})
    assert [s.end_ns for s in play(built(ops), costs).spans] == [4000, 3000]


def test_a_transfer_by_a_copy_engine_slows_nothing() -> None:
    ops = PlanBuilder()
    ops.add("upload", Work(h2d_bytes=1 << 30), stream=COPY)
    ops.add("down", Work())
    assert play(built(ops), replace(FREE, slower=3.0, alone={"down": 700.0})).spans[1].ns == 700


def test_a_prefetch_goes_at_its_share_beside_compute_and_at_full_rate_after() -> None:
    ops = PlanBuilder()
    ops.add("prefetch", Work(h2d_bytes=90_000, ctas=2), stream=PREFETCH)
    ops.add("down", Work())
    costs = replace(FREE, slower=1.0, share=0.5, alone={"down": 1000.0})
    # 22 500 bytes in the first 1000 ns at 22.5 B/ns, then 67 500 at 45.
    assert [s.end_ns for s in play(built(ops), costs).spans] == [2500, 1000]


def test_the_writes_of_a_prefetch_have_first_claim_on_hbm() -> None:
    ops = PlanBuilder()
    ops.add("prefetch", Work(h2d_bytes=1 << 30, hbm_bytes=1 << 30, ctas=2), stream=PREFETCH)
    ops.add("down", Work(hbm_bytes=100_000))
    costs = replace(FREE, hbm_gb_s=100.0, floor_ns=0.0, share=1.0, slower=1.0)
    assert play(built(ops), costs).spans[1].ns == ceil(1000 * 100 / 55)


def test_two_equal_prefetches_share_the_link_in_half() -> None:
    ops = PlanBuilder()
    ops.add("prefetch", Work(h2d_bytes=MIB, ctas=2), stream=PREFETCH)
    ops.add("prefetch", Work(h2d_bytes=MIB, ctas=2), stream=SELECT)
    timeline = play(built(ops), replace(FREE, copy_gb_s=50.0))
    assert [s.ns for s in timeline.spans] == [ceil(MIB / 25)] * 2
    assert max(link for _, link, _ in timeline.samples) == FREE.link_gb_s


def test_all_thread_blocks_that_copy_together_get_no_more_of_the_link_than_thread_blocks_get() -> None:
    ops = PlanBuilder()
    ops.add("prefetch", Work(h2d_bytes=MIB, ctas=2), stream=PREFETCH)
    ops.add("prefetch", Work(h2d_bytes=MIB, ctas=2), stream=SELECT)
    assert max(link for _, link, _ in play(built(ops), FREE).samples) == FREE.copy_gb_s < FREE.link_gb_s


def test_thread_blocks_of_all_copies_at_once_go_equally_fast() -> None:
    ops = PlanBuilder()
    ops.add("prefetch", Work(h2d_bytes=MIB, ctas=1), stream=PREFETCH)
    ops.add("prefetch", Work(h2d_bytes=3 * MIB, ctas=3), stream=SELECT)
    assert [s.ns for s in play(built(ops), FREE).spans] == [ceil(4 * MIB / 45)] * 2


def test_a_prefetch_with_nothing_to_move_takes_its_start_and_no_link() -> None:
    ops = PlanBuilder()
    ops.add("prefetch", Work(ctas=2), stream=PREFETCH)
    timeline = play(built(ops), replace(FREE, transfer_start=3000.0))
    assert (timeline.spans[0].ns, timeline.link_bytes, timeline.link_busy_ns) == (3000, 0, 0)


def test_a_join_is_paid_once_after_the_last_of_all_waits() -> None:
    ops = PlanBuilder()
    first = ops.add("a", Work(), stream=SELECT)
    second = ops.add("b", Work(), stream=PREFETCH)
    ops.add("c", Work(), after=[first, second])
    costs = replace(FREE, join=70.0, alone={"a": 100.0, "b": 300.0, "c": 10.0})
    timeline = play(built(ops), costs)
    assert (timeline.spans[2].start_ns, timeline.makespan_ns, timeline.exposed_ns) == (370, 380, 370)


def test_ends_are_whole_nanoseconds_rounded_up() -> None:
    ops = PlanBuilder()
    for _ in range(3):
        ops.add("a", Work())
    assert [s.end_ns for s in play(built(ops), replace(FREE, alone={"a": 0.3})).spans] == [1, 2, 3]


def test_operations_of_no_duration_take_none() -> None:
    ops = PlanBuilder()
    for _ in range(3):
        ops.add("a", Work())
    assert play(built(ops), replace(FREE, alone={"a": 0.0})).makespan_ns == 0


def test_a_plan_of_no_operations_costs_what_every_step_costs() -> None:
    assert play(built(PlanBuilder()), replace(FREE, step=8000.0)).makespan_ns == 8000


def test_a_link_of_no_bandwidth_is_refused_by_name() -> None:
    ops = PlanBuilder()
    ops.add("prefetch", Work(h2d_bytes=MIB), layer=3, stream=PREFETCH)
    with pytest.raises(SpardaError, match=r"prefetch\[3\] of stream prefetch never ends on fake"):
        play(built(ops), replace(FREE, link_gb_s=0.0))


at_once = st.lists(
    st.tuples(st.sampled_from(["prefetch", "upload", "report", "down"]), st.integers(0, 1 << 34), st.integers(1, 4)),
    max_size=5,
)
rates_gb_s = st.floats(1.0, 500.0)


@given(at_once, st.floats(1.0, 5000.0), rates_gb_s, rates_gb_s, rates_gb_s)
def test_whatever_runs_no_resource_is_above_its_capacity(
    works: list[tuple[str, int, int]], hbm: float, link: float, copy: float, up: float
) -> None:
    costs = FakeCosts(hbm_gb_s=hbm, link_gb_s=link, copy_gb_s=copy, up_gb_s=up)
    ops = PlanBuilder()
    for kind, moved, ctas in works:
        if kind == "prefetch":
            ops.add(kind, Work(h2d_bytes=moved, hbm_bytes=moved, ctas=ctas), stream=PREFETCH)
        elif kind == "upload":
            ops.add(kind, Work(h2d_bytes=moved, hbm_bytes=moved), stream=COPY)
        else:
            ops.add(kind, Work(hbm_bytes=moved, d2h_bytes=moved if kind == "report" else 0))
    plan = built(ops)
    known = Loads(plan, costs)
    loads = [known.of(op) for op in plan]
    rates = share_rates([(load, load.ctas) for load in loads], plan, costs)
    assert rates.link_gb_s <= link * (1 + 1e-9)
    assert rates.hbm_gb_s <= hbm * (1 + 1e-9)
    assert sum(rate * load.d2h for rate, load in zip(rates.each, loads, strict=True)) <= up * (1 + 1e-9)
    assert all(rate >= 0.0 for rate in rates.each)
