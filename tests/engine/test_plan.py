"""What every plan holds to, and what sets the policies apart."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.plan import COPY, HOST, MAIN, PREFETCH, SELECT, STREAMS, Op, Plan, PlanBuilder, Work
from sparda.engine.policies import REGISTRY, make_plan, projections, resident_layers, side_data
from sparda.engine.policies.nosa import by_query
from sparda.engine.shapes import MODELS, SparseSpec

SHAPE = MODELS["minicpm4.1-8b"]
SPEC = SparseSpec()
BLOCK = 32 * 1024

policies = st.sampled_from(POLICIES)
lookaheads = st.integers(0, 4)
workloads = st.builds(
    Workload, batch=st.integers(1, 64), context_tokens=st.integers(8192, 131072), miss_rate=st.floats(0, 1)
)


def plan_of(policy: str, lookahead: int = 1, workload: Workload | None = None, top_k: int = 96) -> Plan:
    """InfiniGen takes no other lookahead than 1, and gets that."""
    config = Config(policy=policy, lookahead=1 if policy == "infinigen" else lookahead, top_k=top_k)
    return make_plan(SHAPE, SPEC, workload or Workload(), config)


def history(plan: Plan) -> list[set[int]]:
    """For each operation the indices of all that finish before it begins: waits and the order of each stream."""
    earlier: list[set[int]] = []
    last: dict[str, int] = {}
    for op in plan:
        direct = [*op.after, *([last[op.stream]] if op.stream in last else [])]
        earlier.append(set(direct).union(*(earlier[d] for d in direct)))
        last[op.stream] = op.index
    return earlier


def only(plan: Plan, kind: str, layer: int) -> Op:
    (op,) = [op for op in plan.of_kind(kind) if op.layer == layer]
    return op


def attention_of(plan: Plan, layer: int) -> Op:
    (op,) = [op for op in plan if op.kind.endswith("attention") and op.layer == layer]
    return op


@settings(deadline=None)
@given(policies, lookaheads, workloads)
def test_waits_point_backwards_and_cross_streams(policy: str, lookahead: int, workload: Workload) -> None:
    plan = plan_of(policy, lookahead, workload)
    for index, op in enumerate(plan):
        assert op.index == index
        assert op.stream in STREAMS
        assert list(op.after) == sorted(set(op.after))
        for wait in op.after:
            assert wait < index
            assert plan.ops[wait].stream != op.stream


@settings(deadline=None)
@given(policies, lookaheads, workloads)
def test_every_operation_has_work_and_none_is_negative(policy: str, lookahead: int, workload: Workload) -> None:
    for op in plan_of(policy, lookahead, workload):
        w = op.work
        work = (w.flops, w.hbm_bytes, w.h2d_bytes, w.d2h_bytes, w.host_bytes, w.copies)
        assert min(work) >= 0
        assert any(work) or op.kind in ("prefetch", "gather", "upload", "scatter")


@settings(deadline=None)
@given(policies, lookaheads)
def test_the_last_operation_waits_for_all_others(policy: str, lookahead: int) -> None:
    plan = plan_of(policy, lookahead)
    assert plan.ops[-1].kind == "sample"
    assert history(plan)[-1] == set(range(len(plan.ops) - 1))


@settings(deadline=None)
@given(policies, lookaheads)
def test_every_layer_attends_once_after_its_own_choice_or_to_all_blocks(policy: str, lookahead: int) -> None:
    plan = plan_of(policy, lookahead)
    earlier = history(plan)
    for layer in range(SHAPE.layers):
        attention = attention_of(plan, layer)
        chosen = [op.index for op in plan.of_kind("select") if op.layer == layer]
        assert len(chosen) == (attention.kind != "dense_attention")
        assert {*chosen, only(plan, "append", layer).index} <= earlier[attention.index]
    assert (policy in ("dense", "shallow")) == bool(plan.of_kind("dense_attention"))


@settings(deadline=None)
@given(st.sampled_from(["sparda", "sparda-on-demand"]), lookaheads)
def test_one_prefetch_for_every_layer_from_lookahead_on_and_never_for_layer_0(policy: str, lookahead: int) -> None:
    layers = [op.layer for op in plan_of(policy, lookahead).of_kind("prefetch")]
    assert layers == list(range(max(1, lookahead), SHAPE.layers))


@pytest.mark.parametrize("policy", ["sparse", "nosa"])
def test_fetching_on_demand_fetches_for_every_layer_but_the_first(policy: str) -> None:
    assert [op.layer for op in plan_of(policy).of_kind("prefetch")] == list(range(1, SHAPE.layers))


def test_nosa_joins_the_querys_scores_with_the_biases_before_it_chooses() -> None:
    plan = plan_of("nosa")
    kinds = [op.kind for op in plan if op.layer == 5]
    first = kinds.index("append")
    assert kinds[first : first + 7] == [
        "append", "bias", "headscore", "shortlist", "select", "prefetch", "biased_attention",
    ]  # fmt: skip
    assert {op.kind for op in plan if op.stream != MAIN} == {"writeback"}
    assert side_data(plan.config) == ("bias",)


def test_the_published_split_of_nosas_blocks_is_met_and_kept_for_others() -> None:
    published = SparseSpec(local_blocks=16)
    assert published.forced == 18
    assert by_query(Config("nosa", top_k=96), published) == 41
    for top_k in (18, 40, 200):
        free = by_query(Config("nosa", top_k=top_k), published) - 18
        assert free == pytest.approx((top_k - 18) * 23 / 78, abs=0.5)


@settings(deadline=None)
@given(st.integers(0, 30))
def test_shallow_scores_once_and_every_later_layer_chooses_from_that_at_once(score_layer: int) -> None:
    config = Config("shallow", score_layer=score_layer)
    plan = make_plan(SHAPE, SPEC, Workload(), config)
    earlier = history(plan)
    (score,) = plan.of_kind("shallow_score")
    later = list(range(score_layer + 1, SHAPE.layers))
    assert (score.layer, score.stream) == (score_layer, MAIN)
    assert score.index == only(plan, "append", score_layer).index + 1
    assert [op.layer for op in plan.of_kind("dense_attention")] == list(range(score_layer + 1))
    assert [op.layer for op in plan.of_kind("attention")] == later
    for kind, stream in (("select", SELECT), ("prefetch", PREFETCH)):
        assert [(op.layer, op.stream) for op in plan.of_kind(kind)] == [(layer, stream) for layer in later]
    for layer in later:
        fetch = only(plan, "prefetch", layer)
        assert only(plan, "select", layer).index in earlier[fetch.index]
        assert attention_of(plan, score_layer).index not in earlier[fetch.index]


def test_a_shallow_score_costs_its_mean_over_the_steps_until_the_next() -> None:
    often, seldom, never = (
        make_plan(SHAPE, SPEC, Workload(), Config("shallow", refresh_steps=n)).of_kind("shallow_score")[0].work
        for n in (1, 16, 0)
    )
    assert seldom.flops == often.flops // 16
    assert seldom.hbm_bytes == pytest.approx(often.hbm_bytes / 16, rel=0.01)
    assert (never.flops, never.hbm_bytes) == (0, 4)


@settings(deadline=None)
@given(policies, lookaheads)
def test_layers_without_a_fetch_are_those_that_stay_resident(policy: str, lookahead: int) -> None:
    plan = plan_of(policy, lookahead)
    fetched = plan.of_kind("prefetch") + plan.of_kind("upload")
    assert len(fetched) == SHAPE.layers - resident_layers(plan.config, SHAPE.layers)


@pytest.mark.parametrize("policy", ["dense", "sparse-resident", "sparda-resident"])
def test_a_resident_cache_moves_nothing_over_the_link(policy: str) -> None:
    plan = plan_of(policy)
    assert not plan.of_kind("prefetch")
    assert not plan.of_kind("writeback")
    assert sum(op.work.h2d_bytes + op.work.d2h_bytes for op in plan) == 0


@settings(deadline=None)
@given(st.sampled_from(["sparda", "sparda-on-demand", "sparse", "nosa", "shallow"]), lookaheads, workloads)
def test_a_prefetch_moves_its_misses_of_32_kib(policy: str, lookahead: int, workload: Workload) -> None:
    misses = round(workload.miss_rate * 96 * workload.batch * SHAPE.kv_heads)
    for op in plan_of(policy, lookahead, workload).of_kind("prefetch"):
        assert op.work.h2d_bytes == op.work.hbm_bytes == misses * BLOCK
        assert op.work.d2h_bytes == 0
        assert op.work.ctas == 2


@settings(deadline=None)
@given(policies, lookaheads)
def test_an_attention_waits_for_the_prefetch_of_its_own_layer(policy: str, lookahead: int) -> None:
    plan = plan_of(policy, lookahead)
    earlier = history(plan)
    for fetch in plan.of_kind("prefetch"):
        assert fetch.layer is not None
        attention = attention_of(plan, fetch.layer)
        assert fetch.index in earlier[attention.index]
        if fetch.stream != MAIN:
            assert attention.after == (fetch.index,)


@settings(deadline=None)
@given(st.integers(1, 4))
def test_a_choice_is_made_lookahead_layers_ahead_and_the_copy_beside_the_main_stream(lookahead: int) -> None:
    plan = plan_of("sparda", lookahead)
    earlier = history(plan)
    for layer in range(lookahead, SHAPE.layers):
        score, fetched = only(plan, "score", layer), [op for op in plan.of_kind("prefetch") if op.layer == layer]
        select = only(plan, "select", layer)
        assert (score.stream, select.stream) == (MAIN, SELECT)
        assert score.index == only(plan, "append", layer - lookahead).index + 1
        assert select.after == (score.index,)
        assert [op.stream for op in fetched] == [PREFETCH]
        assert only(plan, "attention", layer - 1).index not in earlier[fetched[0].index]


@settings(deadline=None)
@given(st.sampled_from(["sparda", "sparda-on-demand"]), lookaheads)
def test_without_lookahead_or_prefetch_all_runs_on_the_main_stream_but_the_writeback(policy: str, ahead: int) -> None:
    if policy == "sparda":
        ahead = 0
    assert {op.kind for op in plan_of(policy, ahead) if op.stream != MAIN} == {"writeback"}


def test_without_lookahead_sparda_is_sparda_on_demand() -> None:
    assert plan_of("sparda", 0).ops == plan_of("sparda-on-demand", 0).ops


@settings(deadline=None)
@given(st.sampled_from(["sparda", "sparda-on-demand", "sparse", "nosa", "shallow"]), lookaheads)
def test_the_writeback_carries_one_token_of_every_offloaded_layer(policy: str, lookahead: int) -> None:
    plan = plan_of(policy, lookahead)
    (op,) = plan.of_kind("writeback")
    offloaded = SHAPE.layers - resident_layers(plan.config, SHAPE.layers)
    assert op.work.d2h_bytes == offloaded * 16 * 2 * 2 * 128 * 2
    assert only(plan, "append", SHAPE.layers - 1).index in history(plan)[op.index]


@settings(deadline=None)
@given(policies, lookaheads)
def test_the_projection_is_as_wide_as_its_selection_queries_ask(policy: str, lookahead: int) -> None:
    plan = plan_of(policy, lookahead)
    for layer in range(SHAPE.layers):
        queries = len(projections(plan.config, layer, SHAPE.layers))
        width = SHAPE.q_width + (2 + queries) * SHAPE.kv_width
        assert only(plan, "qkv", layer).work.flops == 2 * 16 * width * SHAPE.d_model


@settings(deadline=None)
@given(st.sampled_from(["sparda", "sparda-on-demand"]), lookaheads)
def test_every_layer_is_scored_by_exactly_one_projected_query(policy: str, lookahead: int) -> None:
    config = Config(policy=policy, lookahead=lookahead)
    scored = []
    for layer in range(SHAPE.layers):
        for query in projections(config, layer, SHAPE.layers):
            scored.append(layer + lookahead if query == "forecast" else layer)
    assert sorted(scored) == list(range(SHAPE.layers))


@pytest.mark.parametrize("layer", range(1, SHAPE.layers))
def test_the_host_gathers_while_the_gpu_has_the_rest_of_a_layer_and_the_next_ones_beginning_to_do(layer: int) -> None:
    plan = plan_of("infinigen")
    gather, earlier = only(plan, "gather", layer), history(plan)
    beside = [only(plan, kind, layer - 1) for kind in ("attention", "oproj", "gateup", "down")]
    beside += [only(plan, kind, layer) for kind in ("norm", "qkv", "append")]
    beside += [only(plan, "select", layer + 1)] if layer + 1 < SHAPE.layers else []
    for op in beside:
        assert op.index < gather.index
        assert op.index not in earlier[gather.index]


def test_infinigen_fetches_by_way_of_the_host_and_each_part_waits_for_the_one_before() -> None:
    plan = plan_of("infinigen")
    for layer in range(1, SHAPE.layers):
        way = [only(plan, kind, layer) for kind in ("select", "report", "gather", "upload", "scatter", "attention")]
        assert [op.stream for op in way] == [SELECT, SELECT, HOST, COPY, PREFETCH, MAIN]
        assert way[1].index == way[0].index + 1
        assert all(after.after == (before.index,) for before, after in pairwise(way[1:]))
        assert only(plan, "partial_score", layer).index < only(plan, "append", layer).index


def test_a_staging_buffer_is_free_when_the_host_gathers_into_it_two_layers_later() -> None:
    plan = plan_of("infinigen")
    earlier = history(plan)
    for layer in range(3, SHAPE.layers):
        before = only(plan, "gather", layer).index
        assert {only(plan, kind, layer - 2).index for kind in ("upload", "scatter")} <= earlier[before]


@settings(deadline=None)
@given(workloads)
def test_the_host_reads_and_writes_every_missing_block_and_the_gpu_moves_it_once_more(workload: Workload) -> None:
    plan = plan_of("infinigen", workload=workload)
    missing = round(workload.miss_rate * 96 * workload.batch * SHAPE.kv_heads) * BLOCK
    for layer in range(1, SHAPE.layers):
        assert only(plan, "gather", layer).work == Work(host_bytes=2 * missing)
        assert only(plan, "upload", layer).work == Work(hbm_bytes=missing, h2d_bytes=missing)
        assert only(plan, "scatter", layer).work == Work(hbm_bytes=2 * missing)


@pytest.mark.parametrize("lookahead", [0, 2])
def test_infinigen_looks_one_layer_ahead_and_says_so(lookahead: int) -> None:
    with pytest.raises(SpardaError, match=f"lookahead is {lookahead}; infinigen guesses .* of the next layer"):
        make_plan(SHAPE, SPEC, Workload(), Config("infinigen", lookahead=lookahead))


def test_every_policy_that_may_be_named_has_a_planner() -> None:
    assert set(REGISTRY) == set(POLICIES)


def test_names_tell_the_layer_where_there_is_one() -> None:
    plan = plan_of("sparda")
    assert plan.ops[0].name == "embed"
    assert only(plan, "attention", 3).name == "attention[3]"


def test_a_builder_drops_waits_within_a_stream() -> None:
    builder = PlanBuilder()
    first = builder.add("a", Work())
    beside = builder.add("b", Work(), stream=SELECT, after=[first])
    builder.add("c", Work(), after=[first, beside, beside])
    plan = builder.plan(SHAPE, SPEC, Workload(), Config())
    assert [op.after for op in plan] == [(), (first,), (beside,)]


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_are_values(policy: str) -> None:
    assert plan_of(policy) == plan_of(policy)
    assert plan_of(policy) != plan_of(policy, top_k=64)
