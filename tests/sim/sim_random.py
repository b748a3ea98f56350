"""Random steps and machines, and the least that a step must take whatever the simulator does."""

from __future__ import annotations

from math import inf

from hypothesis import strategies as st

from sparda.engine.actions import cut
from sparda.engine.config import Config, Workload
from sparda.engine.plan import COPY, HOST, Op, Plan
from sparda.engine.policies import resident_layers
from sparda.engine.shapes import SparseSpec
from tests.sim.sim_fakes import PLAYED, SMALL, FakeCosts, step_plan, transfers_of

BLOCK_BYTES = SMALL.block_bytes(SparseSpec())

MISS_RATES = st.sampled_from([0.0, 0.0005, 0.01, 0.06, 0.5])
"""The second misses at most a few blocks a layer: fewer than there are CTAs."""


@st.composite
def _configs(draw: st.DrawFn) -> Config:
    policy = draw(st.sampled_from(PLAYED))
    return Config(
        policy=policy,
        top_k=draw(st.sampled_from([64, 96])),
        lookahead=1 if policy == "infinigen" else draw(st.integers(0, 3)),
        prefetch_ctas=draw(st.integers(1, 64)),
        score_layer=draw(st.integers(0, 2)),
        transfer=draw(st.sampled_from(transfers_of(policy))),
    )


workloads = st.builds(Workload, batch=st.integers(1, 64), context_tokens=st.just(65536), miss_rate=MISS_RATES)
configs = _configs()
plans = st.builds(step_plan, workloads, configs, st.just(SMALL))

LATENCIES = {
    "transfer_start": st.floats(0.0, 9000.0),
    "join": st.floats(0.0, 3000.0),
    "issue": st.floats(0.0, 9000.0),
    "step": st.floats(0.0, 9000.0),
}
LINKS = {
    "link_gb_s": st.floats(5.0, 90.0),
    "copy_gb_s": st.floats(5.0, 90.0),
    "per_cta_gb_s": st.one_of(st.just(inf), st.floats(0.5, 30.0)),
    "host_gb_s": st.floats(5.0, 200.0),
}
machines = st.builds(
    FakeCosts,
    **LINKS,
    **LATENCIES,
    hbm_gb_s=st.floats(100.0, 5000.0),
    up_gb_s=st.floats(5.0, 90.0),
    floor_ns=st.floats(0.0, 5000.0),
    slower=st.floats(1.0, 2.0),
    share=st.floats(0.3, 1.0),
    room=st.one_of(st.none(), st.integers(0, 64)),
)


def blocks_moved(plan: Plan) -> int:
    """Missing blocks of a whole step, from what was stated and turned alone."""
    if not plan.config.path:
        return 0
    w, layers = plan.workload, SMALL.layers - resident_layers(plan.config, SMALL.layers)
    return layers * round(w.miss_rate * plan.config.top_k * w.batch * SMALL.kv_heads)


def least_ns(plan: Plan, costs: FakeCosts) -> list[float]:
    """Duration of each operation with the machine to itself and no thread block of a copy left waiting."""
    return [_least_ns(op, plan, costs) for op in plan]


def _least_ns(op: Op, plan: Plan, costs: FakeCosts) -> float:
    work = op.work
    if op.kind == "prefetch":
        ctas = max(1, min(work.ctas, work.h2d_bytes // BLOCK_BYTES))
        return costs.transfer_start_ns(plan) + work.h2d_bytes / costs.transfer_gb_s(plan, ctas)
    # Copy engines that have nothing to carry are not started.
    return 0.0 if op.stream == COPY and not work.h2d_bytes else costs.alone_ns(op, plan)


def critical_ns(plan: Plan, costs: FakeCosts) -> float:
    """The longest chain through the plan and what the host issues, nothing slowed by anything."""
    ends, free = [0.0] * len(plan.ops), dict.fromkeys(plan.streams, 0.0)
    least, host, by_host = least_ns(plan, costs), 0.0, HOST in plan.streams
    for action in cut(plan):
        begun = host
        if by_host and action.stream != HOST:
            host += costs.issue_ns(action.ops[0], plan)
        # A copy engine begins as the host turns to it, all else when it is issued.
        issued = begun if action.stream == COPY else host
        for op in action.ops:
            ready = max([issued, free[op.stream], *(ends[i] for i in op.after)])
            ends[op.index] = ready + (costs.join_ns(op, plan) if op.after else 0.0) + least[op.index]
            free[op.stream] = ends[op.index]
        if action.stream == HOST:
            host = ends[action.ops[0].index]
    return max(ends) + costs.step_ns(plan)
