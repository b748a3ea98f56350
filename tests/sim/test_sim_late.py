"""Thread blocks of a copy that find no place beside an attention, in steps small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.engine.plan import MAIN, PREFETCH, SELECT, Op, Plan, PlanBuilder, Work
from sparda.sim.player import play
from sparda.sim.rates import Loads
from sparda.sim.timeline import Timeline
from tests.sim.sim_fakes import FakeCosts, built
from tests.sim.sim_random import BLOCK_BYTES

COSTS = FakeCosts(
    transfer_start=0.0, join=0.0, step=0.0, per_cta_gb_s=2.5, share=1.0, slower=1.0, room=4, alone={"attention": 2000.0}
)
"""Every thread block of a copy moves 2.5 bytes a nanosecond, up to 45 in all; four find room beside an attention."""


class ByCtas(FakeCosts):
    """Costs that grow by a tenth with each thread block that copies beside."""

    def slowdown(self, op: Op, plan: Plan, ctas: int) -> float:
        return 1 + ctas / 10


def copying(ctas: int, blocks: int, first: str = "attention") -> Plan:
    """A copy that starts while an operation that began with it runs."""
    ops = PlanBuilder()
    ops.add(first, Work(), stream=MAIN)
    moved = blocks * BLOCK_BYTES
    ops.add("prefetch", Work(h2d_bytes=moved, hbm_bytes=moved, ctas=ctas), stream=PREFETCH)
    return built(ops)


def ends(plan: Plan, costs: FakeCosts) -> list[int]:
    return [s.end_ns for s in play(plan, costs).spans]


def link_rates(timeline: Timeline) -> list[tuple[int, float]]:
    return [(at, link) for at, link, _ in timeline.samples]


def carried(timeline: Timeline) -> float:
    return sum(link * (end - at) for (at, link, _), (end, _, _) in pairwise(timeline.samples))


def test_those_that_find_no_place_start_when_the_attention_ends_and_carry_their_own_share() -> None:
    costs = replace(COSTS, transfer_start=100.0, share=0.5, slower=1.25)
    timeline = play(copying(ctas=8, blocks=8), costs)
    # From 100 ns on 4 of 8 thread blocks move half the list, 65 536 bytes, at half their 10 B/ns. The attention's
    # other 1900 ns take 1.25 times as long: it ends at 2475, with 11 875 bytes through. The 53 661 left of this half
    # take until 2475 + 5366.1. The late half, 65 536 bytes at 10 B/ns, has 11 866 left then: 1186.6 ns more.
    assert [(s.start_ns, s.end_ns) for s in timeline.spans] == [(0, 2475), (0, 7842 + 1187)]
    assert link_rates(timeline) == [(0, 0.0), (100, 5.0), (2475, 20.0), (7842, 10.0), (9029, 0.0)]


def test_thread_blocks_that_all_find_a_place_start_together() -> None:
    timeline = play(copying(ctas=4, blocks=8), COSTS)
    assert [s.end_ns for s in timeline.spans] == [2000, ceil(8 * BLOCK_BYTES / 10)]


def test_where_there_is_no_place_at_all_the_whole_copy_waits_and_hinders_nothing() -> None:
    costs = replace(COSTS, room=0, slower=3.0)
    timeline = play(copying(ctas=8, blocks=8), costs)
    assert [s.end_ns for s in timeline.spans] == [2000, 2000 + ceil(8 * BLOCK_BYTES / 20)]
    assert link_rates(timeline)[0] == (0, 0.0)


def test_an_operation_that_leaves_room_for_all_makes_none_wait() -> None:
    costs = replace(COSTS, room=0, alone={"down": 2000.0})
    assert ends(copying(ctas=8, blocks=8, first="down"), costs)[1] == ceil(8 * BLOCK_BYTES / 20)


def test_a_copy_that_was_there_first_keeps_its_places() -> None:
    ops = PlanBuilder()
    ops.add("prefetch", Work(h2d_bytes=8 * BLOCK_BYTES, ctas=8), stream=PREFETCH)
    ops.add("norm", Work(), stream=MAIN)
    ops.add("attention", Work(), stream=MAIN)
    costs = replace(COSTS, room=0, alone={"norm": 1.0, "attention": 2000.0})
    assert ends(built(ops), costs)[0] == ceil(8 * BLOCK_BYTES / 20)


def test_those_that_wait_do_not_slow_the_attention_they_wait_for() -> None:
    costs = ByCtas(transfer_start=0.0, join=0.0, step=0.0, room=4, alone={"attention": 2000.0})
    assert ends(copying(ctas=16, blocks=64), costs)[0] == 2800


def test_places_that_one_copy_has_taken_are_gone_for_the_next() -> None:
    ops = PlanBuilder()
    ops.add("attention", Work(), stream=MAIN)
    ops.add("prefetch", Work(h2d_bytes=3 * BLOCK_BYTES, ctas=3), stream=PREFETCH)
    ops.add("prefetch", Work(h2d_bytes=2 * BLOCK_BYTES, ctas=2), stream=SELECT)
    timeline = play(built(ops), COSTS)
    # Three find room, then one of two: four times 2.5 B/ns until the attention ends, then five.
    assert link_rates(timeline)[:2] == [(0, 10.0), (2000, 12.5)]
    assert [s.end_ns for s in timeline.spans[1:]] == [ceil(BLOCK_BYTES / 2.5), 2000 + ceil(BLOCK_BYTES / 2.5)]


def test_late_thread_blocks_wait_for_no_second_attention() -> None:
    ops = PlanBuilder()
    ops.add("attention", Work(), stream=MAIN)
    ops.add("attention", Work(), stream=MAIN)
    ops.add("prefetch", Work(h2d_bytes=8 * BLOCK_BYTES, ctas=8), stream=PREFETCH)
    assert link_rates(play(built(ops), COSTS))[:2] == [(0, 10.0), (2000, 20.0)]


@pytest.mark.parametrize(("blocks", "ctas", "used"), [(3, 8, 3), (8, 3, 3), (8, 8, 8), (1, 64, 1), (0, 8, 1)])
def test_a_copy_uses_no_more_thread_blocks_than_its_list_has_blocks(blocks: int, ctas: int, used: int) -> None:
    plan = copying(ctas, blocks)
    assert Loads(plan, COSTS).of(plan.ops[1]).ctas == used


def test_thread_blocks_without_a_block_take_no_place_and_add_no_rate() -> None:
    timeline = play(copying(ctas=8, blocks=3), COSTS)
    assert timeline.spans[1].end_ns == ceil(BLOCK_BYTES / 2.5)
    assert link_rates(timeline)[0] == (0, 7.5)


copies = st.builds(copying, ctas=st.integers(1, 64), blocks=st.integers(1, 200))
attentions = st.builds(
    lambda room, ns, share: replace(COSTS, room=room, share=share, alone={"attention": ns}),
    st.integers(0, 70),
    st.floats(0.0, 1e6),
    st.floats(0.1, 1.0),
)


@settings(max_examples=100, deadline=None)
@given(copies, attentions)
def test_early_and_late_ones_together_move_exactly_the_list(plan: Plan, costs: FakeCosts) -> None:
    timeline = play(plan, costs)
    # An end is rounded up to a whole nanosecond, and there are three: of the early, of the attention, of the late.
    assert timeline.link_bytes - 1 <= carried(timeline) <= timeline.link_bytes + 3 * costs.copy_gb_s


@settings(max_examples=100, deadline=None)
@given(copies, attentions, st.integers(0, 64))
def test_where_copies_disturb_nothing_more_room_never_ends_one_later(plan: Plan, costs: FakeCosts, more: int) -> None:
    costs = replace(costs, share=1.0)
    roomy = replace(costs, room=(costs.room or 0) + more)
    assert ends(plan, roomy)[1] <= ends(plan, costs)[1] + 1


@settings(max_examples=100, deadline=None)
@given(copies, attentions)
def test_a_late_copy_ends_after_the_attention_and_no_later_than_one_that_waits_as_a_whole(
    plan: Plan, costs: FakeCosts
) -> None:
    costs = replace(costs, share=1.0)
    attention, copy = ends(plan, costs)
    late = Loads(plan, costs).of(plan.ops[1]).ctas > (costs.room or 0)
    assert copy <= ends(plan, replace(costs, room=0))[1] + 1
    assert copy > attention or not late
