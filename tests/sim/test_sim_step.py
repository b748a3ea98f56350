"""Whole decode steps: what must hold of every policy, by every transfer path, on every machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.engine.config import FETCHING, TRANSFERS, Config, Workload
from sparda.engine.plan import COPY, HOST, MAIN, Op, Plan
from sparda.sim.player import play
from sparda.sim.timeline import Timeline
from tests.sim.sim_fakes import PLAYED, SMALL, FakeCosts, step_plan, transfers_of
from tests.sim.sim_random import (
    BLOCK_BYTES,
    LATENCIES,
    LINKS,
    blocks_moved,
    critical_ns,
    least_ns,
    machines,
    plans,
    workloads,
)

uncontended = st.builds(
    FakeCosts,
    **LINKS,
    **LATENCIES,
    # Rates of HBM and towards the host that no set of operations of a microsecond or more comes near.
    hbm_gb_s=st.floats(1e6, 1e7),
    up_gb_s=st.floats(1e6, 1e7),
    floor_ns=st.floats(1000.0, 5000.0),
    slower=st.floats(1.0, 2.0),
    share=st.floats(0.3, 1.0),
    room=st.one_of(st.none(), st.integers(0, 64)),
)
examples = settings(max_examples=60, deadline=None)
PATHS = [(policy, transfer) for policy in PLAYED for transfer in transfers_of(policy)]


def with_link(costs: FakeCosts, factor: float) -> FakeCosts:
    """The same machine, everything that a copy's rate depends on so many times as fast."""
    return replace(
        costs,
        link_gb_s=costs.link_gb_s * factor,
        copy_gb_s=costs.copy_gb_s * factor,
        per_cta_gb_s=costs.per_cta_gb_s * factor,
    )


@examples
@given(plans, machines)
def test_every_operation_runs_once_after_all_it_waits_for_in_stream_order(plan: Plan, costs: FakeCosts) -> None:
    spans = play(plan, costs).spans
    assert [span.op for span in spans] == list(plan)
    last_end: dict[str, int] = {}
    for span in spans:
        ready = max((spans[i].end_ns for i in span.op.after), default=0)
        assert 0 <= max(ready, last_end.get(span.stream, 0)) <= span.start_ns <= span.end_ns
        last_end[span.stream] = span.end_ns


@examples
@given(plans, machines)
def test_a_step_is_no_shorter_than_its_critical_path_or_any_resource_allows(plan: Plan, costs: FakeCosts) -> None:
    makespan = play(plan, costs).makespan_ns
    assert makespan >= critical_ns(plan, costs) - 1e-3
    assert makespan >= sum(op.work.h2d_bytes for op in plan) / costs.link_gb_s
    assert makespan >= sum(op.work.hbm_bytes for op in plan) / costs.hbm_gb_s
    assert makespan >= sum(op.work.d2h_bytes for op in plan) / costs.machine.link_d2h_gb_s - 1e-3
    assert makespan >= sum(op.work.host_bytes for op in plan) / costs.host_gb_s - 1e-3
    alone = least_ns(plan, costs)
    for stream in plan.streams:
        assert makespan >= sum(alone[op.index] for op in plan if op.stream == stream) - 1e-3


@examples
@given(plans, machines)
def test_no_resource_is_above_its_capacity_at_any_time(plan: Plan, costs: FakeCosts) -> None:
    samples = play(plan, costs).samples
    assert [at for at, _, _ in samples] == sorted({at for at, _, _ in samples})
    assert max(link for _, link, _ in samples) <= costs.link_gb_s * (1 + 1e-9)
    assert max(hbm for _, _, hbm in samples) <= costs.hbm_gb_s * (1 + 1e-9)


@examples
@given(plans, machines)
def test_bytes_moved_are_misses_times_block_bytes(plan: Plan, costs: FakeCosts) -> None:
    timeline = play(plan, costs)
    assert timeline.link_bytes == blocks_moved(plan) * BLOCK_BYTES
    carried = sum(link * (end - at) for (at, link, _), (end, _, _) in pairwise(timeline.samples))
    # The last nanosecond of a copy may be part-used; every copy has one, and one for each change of its rate.
    assert timeline.link_bytes - 1 <= carried <= timeline.link_bytes + costs.link_gb_s * len(timeline.samples) + 1


class Watched(FakeCosts):
    """Remembers with how many thread blocks copies were costed."""

    seen: ClassVar[set[int]] = set()

    def transfer_gb_s(self, plan: Plan, ctas: int) -> float:
        self.seen.add(ctas)
        return super().transfer_gb_s(plan, ctas)

    def slowdown(self, op: Op, plan: Plan, ctas: int) -> float:
        self.seen.add(ctas)
        return super().slowdown(op, plan, ctas)


@examples
@given(plans, st.integers(0, 64))
def test_no_copy_ever_runs_on_more_thread_blocks_than_it_has_blocks(plan: Plan, room: int) -> None:
    Watched.seen.clear()
    play(plan, Watched(room=room))
    blocks = [op.work.h2d_bytes // BLOCK_BYTES for op in plan.of_kind("prefetch")]
    # The copies of a plan are on one stream: never two at once.
    assert max(Watched.seen, default=0) <= min(plan.config.prefetch_ctas, max(blocks, default=0))
    assert 0 not in Watched.seen


@pytest.mark.parametrize(("policy", "transfer"), PATHS)
def test_with_no_misses_the_link_carries_nothing(policy: str, transfer: str) -> None:
    timeline = play(step_plan(Workload(miss_rate=0.0), Config(policy=policy, transfer=transfer)), FakeCosts())
    assert timeline.link_bytes == timeline.link_busy_ns == 0
    assert all(link == 0.0 for _, link, _ in timeline.samples)


@examples
@given(workloads, machines, st.sampled_from(TRANSFERS))
def test_a_prefetch_with_lookahead_zero_is_a_fetch_on_demand(
    workload: Workload, costs: FakeCosts, transfer: str
) -> None:
    ahead, demanded = (
        play(step_plan(workload, Config(policy=policy, lookahead=0, transfer=transfer), SMALL), costs)
        for policy in ("sparda", "sparda-on-demand")
    )
    assert ahead.spans == demanded.spans
    assert ahead.makespan_ns == demanded.makespan_ns


@examples
@given(workloads, machines)
def test_a_serial_step_is_the_sum_of_its_parts(workload: Workload, costs: FakeCosts) -> None:
    plan = step_plan(workload, Config(policy="sparse-resident"), SMALL)
    assert plan.streams == (MAIN,)
    parts = sum(ceil(costs.alone_ns(op, plan) - 1e-6) for op in plan)
    assert play(plan, costs).makespan_ns == parts + ceil(costs.step_ns(plan) - 1e-6)


# How much a copy slows compute beside it, and is slowed by it, does not depend on its rate in these costs. A machine on
# which it does may well lose by a wider link. Each operation ends at a whole nanosecond, hence one for each.


@examples
@given(plans, uncontended, st.floats(1.0, 8.0))
def test_where_nothing_contends_for_hbm_a_wider_link_is_never_slower(
    plan: Plan, costs: FakeCosts, wider: float
) -> None:
    assert play(plan, with_link(costs, wider)).makespan_ns <= play(plan, costs).makespan_ns + len(plan.ops)


@examples
@given(plans, machines, st.floats(1.0, 8.0))
def test_more_hbm_is_never_slower(plan: Plan, costs: FakeCosts, wider: float) -> None:
    faster = replace(costs, hbm_gb_s=costs.hbm_gb_s * wider)
    assert play(plan, faster).makespan_ns <= play(plan, costs).makespan_ns + len(plan.ops)


@examples
@given(plans, machines, st.floats(1.0, 8.0))
def test_where_copies_contend_for_hbm_a_wider_link_loses_at_most_the_time_of_what_runs_beside_the_main_stream(
    plan: Plan, costs: FakeCosts, wider: float
) -> None:
    # A faster copy writes the same bytes in less time: more of them, and of what waits for them, may take HBM from an
    # operation of the main stream that is bound by it, and fewer from those that leave HBM free.
    beside = sum(op.work.hbm_bytes for op in plan if op.stream != MAIN) / costs.hbm_gb_s
    most = play(plan, costs).makespan_ns + beside + len(plan.ops)
    assert play(plan, with_link(costs, wider)).makespan_ns <= most


@examples
@given(plans, machines)
def test_the_same_plan_and_costs_give_the_same_bytes(plan: Plan, costs: FakeCosts) -> None:
    one, two = play(plan, costs), play(plan, costs)
    assert one == two
    assert one.to_json().encode() == two.to_json().encode()


@pytest.mark.parametrize("lookahead", [1, 2])
@pytest.mark.parametrize(("policy", "transfer"), PATHS)
def test_every_policy_plays_by_every_transfer_path(policy: str, transfer: str, lookahead: int) -> None:
    config = Config(policy=policy, transfer=transfer, lookahead=1 if policy == "infinigen" else lookahead)
    plan = step_plan(Workload(), replace(config, score_layer=1), SMALL)
    timeline = play(plan, FakeCosts())
    assert timeline.link_bytes == blocks_moved(plan) * BLOCK_BYTES
    assert (timeline.link_bytes > 0) == (policy in FETCHING or policy == "infinigen")
    by_host = config.path not in ("", "uva")
    assert ({COPY, HOST} <= set(timeline.plan.streams)) == by_host
    assert bool(plan.of_kind("prefetch")) == (config.path == "uva")


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("policy", PLAYED)
def test_every_policy_plays_at_every_batch(policy: str, batch: int) -> None:
    timeline: Timeline = play(step_plan(Workload(batch=batch), Config(policy=policy)), FakeCosts())
    assert timeline.makespan_ns > 0
    assert timeline.tokens_per_s == pytest.approx(batch / (timeline.step_us * 1e-6))
