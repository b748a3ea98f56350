"""Copy engines, thread blocks that copy, and what goes to the host: who gets how much of the link."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.engine.plan import COPY, MAIN, PREFETCH, SELECT, Plan, PlanBuilder, Work
from sparda.sim.player import play
from tests.sim.sim_fakes import FakeCosts, built

FREE = FakeCosts(transfer_start=0.0, join=0.0, step=0.0, floor_ns=0.0, share=1.0, slower=1.0, up_gb_s=40.0)
"""A link of 50 GB/s to the GPU, of which thread blocks get 45, and of 40 to the host."""


def both(prefetched: int, uploaded: int) -> Plan:
    """A copy by a thread block and one by a copy engine that start at once."""
    ops = PlanBuilder()
    ops.add("prefetch", Work(h2d_bytes=prefetched, ctas=1), stream=PREFETCH)
    ops.add("upload", Work(h2d_bytes=uploaded), stream=COPY)
    return built(ops)


def reporting(*reports: tuple[str, int], uploaded: int = 0, prefetched: int = 0) -> Plan:
    """Reports of so many bytes, each on its stream, beside copies the other way."""
    ops = PlanBuilder()
    for stream, sent in reports:
        ops.add("report", Work(d2h_bytes=sent), stream=stream)
    if uploaded:
        ops.add("upload", Work(h2d_bytes=uploaded), stream=COPY)
    if prefetched:
        ops.add("prefetch", Work(h2d_bytes=prefetched, ctas=2), stream=PREFETCH)
    return built(ops)


def lengths(plan: Plan, costs: FakeCosts) -> list[int]:
    return [s.ns for s in play(plan, costs).spans]


def test_an_engine_and_thread_blocks_that_both_want_more_share_the_link_in_half() -> None:
    timeline = play(both(25_000, 25_000), FREE)
    assert [s.ns for s in timeline.spans] == [1000, 1000]
    assert timeline.samples[0] == (0, 50.0, 0.0)


def test_an_engine_gets_what_thread_blocks_leave_of_the_link() -> None:
    assert lengths(both(10_000, 40_000), replace(FREE, per_cta_gb_s=10.0)) == [1000, 1000]


def test_thread_blocks_get_what_a_slow_engine_leaves() -> None:
    assert lengths(both(42_000, 8_000), replace(FREE, alone={"upload": 1000.0})) == [1000, 1000]


def test_the_one_that_goes_on_gets_all_that_it_can_use() -> None:
    # 25 B/ns each for 1000 ns; then the engine at 50, or the thread blocks at 45.
    assert lengths(both(25_000, 75_000), FREE) == [1000, 2000]
    assert lengths(both(70_000, 25_000), FREE) == [2000, 1000]


@given(st.floats(1.0, 1e7), st.integers(1, 1 << 32))
def test_an_engine_by_itself_takes_the_time_it_was_measured_at(alone: float, moved: int) -> None:
    ops = PlanBuilder()
    ops.add("upload", Work(h2d_bytes=moved), stream=COPY)
    assert lengths(built(ops), replace(FREE, alone={"upload": alone})) == [ceil(alone - 1e-6)]


def test_an_engine_faster_than_thread_blocks_ever_get_the_link_widens_it_for_itself_alone() -> None:
    timeline = play(both(45_000, 60_000), replace(FREE, link_gb_s=45.0, alone={"upload": 1000.0}))
    assert timeline.samples[0][1] == 60.0
    assert [s.ns for s in timeline.spans] == [1500, 1750]


def test_an_engine_is_slowed_by_no_compute_beside_it() -> None:
    ops = PlanBuilder()
    ops.add("upload", Work(h2d_bytes=50_000), stream=COPY)
    ops.add("down", Work(), stream=MAIN)
    assert lengths(built(ops), replace(FREE, share=0.3, alone={"down": 5000.0})) == [1000, 5000]


def test_an_engine_with_nothing_to_carry_takes_no_time() -> None:
    ops = PlanBuilder()
    ops.add("upload", Work(), stream=COPY)
    timeline = play(built(ops), replace(FREE, floor_ns=1500.0))
    assert (timeline.makespan_ns, timeline.link_busy_ns) == (0, 0)


@pytest.mark.parametrize("kind", ["prefetch", "upload"])
def test_a_link_wider_than_hbm_is_as_wide_as_hbm(kind: str) -> None:
    ops = PlanBuilder()
    ops.add(kind, Work(h2d_bytes=30_000, hbm_bytes=30_000, ctas=2), stream=PREFETCH if kind == "prefetch" else COPY)
    timeline = play(built(ops), replace(FREE, hbm_gb_s=30.0))
    assert (timeline.spans[0].ns, timeline.samples[0]) == (1000, (0, 30.0, 30.0))


def test_what_an_engine_writes_has_first_claim_on_hbm() -> None:
    ops = PlanBuilder()
    ops.add("upload", Work(h2d_bytes=1 << 30, hbm_bytes=1 << 30), stream=COPY)
    ops.add("down", Work(hbm_bytes=50_000))
    assert lengths(built(ops), replace(FREE, hbm_gb_s=100.0))[1] == 1000


@pytest.mark.parametrize("copy", [{"prefetched": 45_000}, {"uploaded": 50_000}])
def test_what_goes_to_the_host_slows_no_copy_to_the_gpu_and_is_slowed_by_none(copy: dict[str, int]) -> None:
    assert lengths(reporting((MAIN, 40_000), **copy), FREE) == [1000, 1000]


def test_two_equal_reports_share_the_link_towards_the_host_in_half() -> None:
    plan = reporting((MAIN, 40_000), (SELECT, 40_000))
    assert lengths(plan, replace(FREE, alone={"report": 1000.0})) == [2000, 2000]


def test_reports_that_leave_the_link_free_do_not_slow_one_another() -> None:
    plan = reporting((MAIN, 20_000), (SELECT, 10_000))
    assert lengths(plan, replace(FREE, alone={"report": 1000.0})) == [1000, 1000]


def test_a_report_by_itself_takes_the_time_it_was_measured_at_however_many_its_bytes() -> None:
    plan = reporting((MAIN, 1 << 30))
    assert lengths(plan, replace(FREE, alone={"report": 1000.0})) == [1000]
