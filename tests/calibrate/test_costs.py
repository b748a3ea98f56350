"""Fitted costs: what was measured comes back exactly, and nothing between or beyond it is better."""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.calibrate.costs import (
    ALIASES,
    BY_HOST,
    Beside,
    BlockCurve,
    CtaCurve,
    Fitted,
    FittedCosts,
    KernelCost,
    PathCosts,
    at_depth,
    interpolate,
)
from sparda.calibrate.profile import load_profile
from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.plan import Op, Plan, Work
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, SparseSpec
from sparda.sim.costs import Machine

SHAPE = MODELS["minicpm4.1-8b"]
DENSE_KINDS = (
    "embed", "norm", "qkv", "append", "dense_attention", "oproj", "ffn_norm", "gateup", "silu", "down", "final_norm",
    "lm_head", "sample",
)  # fmt: skip
MACHINE = Machine("none.measured", "NVIDIA None", 132, 4000.0, 50.0, 52.0, 1 << 37, 1 << 38)

times = st.floats(0.1, 1e6)
lines = st.lists(st.integers(0, 1000), min_size=1, max_size=6, unique=True).flatmap(
    lambda xs: st.tuples(st.just(sorted(xs)), st.lists(times, min_size=len(xs), max_size=len(xs)))
)


@given(lines)
def test_a_line_passes_exactly_through_its_points(line: tuple[list[int], list[float]]) -> None:
    xs, ys = line
    assert [interpolate(xs, ys, x) for x in xs] == ys


@given(lines, st.floats(-100, 1100))
def test_a_line_stays_between_its_neighbours_and_holds_its_ends(line: tuple[list[int], list[float]], x: float) -> None:
    xs, ys = line
    right = min(bisect_right(xs, x), len(xs) - 1)
    near = (ys[max(0, bisect_right(xs, x) - 1)], ys[right])
    assert min(near) * (1 - 1e-12) <= interpolate(xs, ys, x) <= max(near) * (1 + 1e-12)


@given(lines, st.floats(0.01, 0.99))
def test_a_line_is_straight_between_two_points(line: tuple[list[int], list[float]], share: float) -> None:
    xs, ys = line
    for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True)):
        assert interpolate(xs, ys, x0 + share * (x1 - x0)) == pytest.approx(y0 + share * (y1 - y0))


@st.composite
def kernel_costs(draw: st.DrawFn) -> KernelCost:
    batches = sorted(draw(st.sets(st.integers(1, 128), min_size=1, max_size=4)))
    seconds = sorted(draw(st.sets(st.integers(0, 1 << 17), min_size=1, max_size=3)))

    def table() -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(draw(times) for _ in seconds) for _ in batches)

    return KernelCost("context_tokens", tuple(map(float, batches)), tuple(map(float, seconds)), table(), table())


@given(kernel_costs())
def test_a_kernel_takes_exactly_as_long_as_measured_where_it_was(cost: KernelCost) -> None:
    for i, batch in enumerate(cost.batches):
        for j, second in enumerate(cost.seconds):
            assert cost.at(batch, second, cost.hbm_bytes[i][j]) == cost.ns[i][j]


@given(kernel_costs(), st.floats(1, 200), st.floats(0, 1 << 18), st.floats(0, 1e7))
def test_a_kernel_is_as_fast_as_measured_at_the_best(
    cost: KernelCost, batch: float, second: float, hbm_bytes: float
) -> None:
    fastest, most = min(min(row) for row in cost.ns), max(max(row) for row in cost.hbm_bytes)
    took = cost.at(batch, second, hbm_bytes)
    assert took >= fastest * (1 - 1e-9)
    assert cost.at(batch, second, hbm_bytes * 2) >= took
    beyond = cost.at(batch, second, 2 * most)
    assert cost.at(batch, second, 6 * most) == pytest.approx(3 * beyond)


def test_a_kind_that_was_not_measured_is_an_error_that_says_what_was() -> None:
    kernels = {kind: KernelCost("", (1.0,), (0.0,), ((100.0,),), ((1e15,),)) for kind in DENSE_KINDS}
    costs = FittedCosts(MACHINE, Fitted(kernels, (), {}, (), 0.0, ((1, 0.0),), ((1, 0.0),), 0.0))
    plans = {p: make_plan(SHAPE, SparseSpec(), Workload(), Config(p)) for p in ("dense", "nosa")}
    assert all(costs.alone_ns(op, plans["dense"]) == 100.0 for op in plans["dense"])
    (bias, *_) = plans["nosa"].of_kind("bias")
    with pytest.raises(SpardaError) as error:
        costs.alone_ns(bias, plans["nosa"])
    for words in ("none.measured has no measured cost for 'bias'", "policy 'nosa'", ", ".join(DENSE_KINDS), "(dense)"):
        assert words in str(error.value)


def test_only_policies_whose_every_kind_was_measured_can_be_priced() -> None:
    shipped = load_profile("h200-sxm.measured").costs
    plan = make_plan(SHAPE, SparseSpec(), Workload(), Config())
    assert set(shipped.policies(plan)) >= {"sparse", "sparse-resident", "sparda", "sparda-on-demand", "sparda-resident"}
    for policy in POLICIES:
        kinds = {op.kind for op in make_plan(SHAPE, SparseSpec(), Workload(), Config(policy))} - {"prefetch"}
        by_host = BY_HOST if shipped.fitted.paths else ()
        assert (policy in shipped.policies(plan)) == (kinds <= {*shipped.fitted.kernels, *by_host})


def test_more_bytes_than_the_table_knows_take_longer_in_proportion_and_fewer_no_less() -> None:
    cost = KernelCost("", (1.0, 16.0), (0.0,), ((10.0,), (40.0,)), ((100.0,), (1600.0,)))
    assert cost.at(32, 0, 3200) == 80.0
    assert cost.at(16, 0, 2400) == 60.0
    assert cost.at(16, 0, 800) == 40.0
    assert cost.at(8.5, 0, 850) == 25.0


def test_a_kernel_of_no_known_bytes_keeps_its_time() -> None:
    assert KernelCost("", (1.0,), (0.0,), ((10.0,),), ((0.0,),)).at(4, 0, 100.0) == 10.0


def test_a_curve_over_ctas_is_straight_in_their_logarithm() -> None:
    curve = CtaCurve(8, (1, 2, 8), (10.0, 20.0, 40.0))
    assert [curve.at(c) for c in (1, 2, 8)] == [10.0, 20.0, 40.0]
    assert curve.at(4) == pytest.approx(30.0)
    assert (curve.at(0), curve.at(0.5), curve.at(64)) == (10.0, 10.0, 40.0)


def test_depths_between_curves_are_between_them_and_registers_count_as_the_shallowest() -> None:
    curves = (CtaCurve(2, (1,), (8.0,)), CtaCurve(4, (1,), (10.0,)), CtaCurve(8, (1,), (30.0,)))
    assert [at_depth(curves, stages, 1) for stages in (2, 4, 6, 8, 12)] == [8.0, 10.0, 20.0, 30.0, 30.0]
    assert at_depth(curves, 1, 1) == at_depth(curves, 2, 1)


ORDERED = 1.05
"""Slow-down of an attention beside thread blocks that found room beside it."""
PLACES = 4
"""Multiprocessors of 132 that attention over 96 blocks leaves free at batch 16: 32 heads, 4 thread blocks each."""
PATHS = PathCosts(
    listed={"blocks": BlockCurve((10,), (100.0,)), "batch": BlockCurve((10,), (50.0,))},
    started={"blocks": BlockCurve((10,), (900.0,)), "batch": BlockCurve((10,), (20.0,))},
    by_blocks={kind: BlockCurve((10, 20), (1000.0, 1500.0)) for kind in BY_HOST if kind != "enlist"},
    round_trip_ns=12000.0,
)


def beside_copies(slowdown: float, gb_s: float) -> Beside:
    return Beside(16, (CtaCurve(8, (1, 16), (slowdown, slowdown)),), (CtaCurve(8, (1, 16), (gb_s, gb_s)),))


def fitted_costs(
    slowdown: float = 1.2,
    gb_s: float = 40.0,
    transfer: float = 45.0,
    ordered: float = ORDERED,
    paths: PathCosts | None = None,
) -> FittedCosts:
    """Constants wherever a table is wanted; attention and norm alone were measured beside a copy."""
    plan = plan_of()
    kernels = {op.kind: KernelCost("", (1.0,), (0.0,), ((5000.0,),), ((1e12,),)) for op in plan}
    kernels["attention"] = KernelCost("top_k", (16.0,), (64.0, 128.0), ((1.0, 3.0),), ((1e12, 1e12),))
    kernels["select"] = KernelCost("context_tokens", (16.0,), (0.0, 1e6), ((0.0, 1e6),), ((1e12, 1e12),))
    beside = beside_copies(slowdown, gb_s)
    fitted = Fitted(
        kernels,
        transfer=(CtaCurve(8, (1, 16), (transfer, transfer)),),
        beside={"attention": (beside,), "norm": (beside,)},
        in_order=(beside_copies(ordered, gb_s),),
        start_ns=1.0,
        lanes=((1, 2.0), (31, 4.0)),
        launches=((1, 0.5),),
        step_ns=3.0,
        paths=paths,
    )
    return FittedCosts(MACHINE, fitted)


def plan_of(**config: Any) -> Plan:
    return make_plan(SHAPE, SparseSpec(), Workload(), Config(**config))


def op_of(kind: str, stream: str = "main") -> Op:
    return Op(0, kind, 0, stream, (), Work(hbm_bytes=1000))


def test_each_kind_is_looked_up_on_its_own_second_axis() -> None:
    costs, plan = fitted_costs(), plan_of()
    assert costs.alone_ns(op_of("attention"), plan) == 2.0
    assert costs.alone_ns(op_of("select", "select"), plan) == 131072.0
    assert costs.alone_ns(op_of("qkv"), plan) == 5000.5
    assert (costs.transfer_start_ns(plan), costs.step_ns(plan)) == (1.0, 3.0)


def test_a_graph_without_side_streams_launches_at_once() -> None:
    straight = make_plan(MODELS["minicpm4.1-8b"], SparseSpec(), Workload(), Config("sparse"))
    assert fitted_costs().alone_ns(op_of("qkv"), straight) == 5000.0


def test_only_an_attention_beside_a_choice_pays_for_waiting() -> None:
    costs, plan = fitted_costs(), plan_of()
    own, *later = plan.of_kind("attention")
    assert costs.join_ns(own, plan) == 0.0, "the first layer chooses on the main stream itself"
    assert {costs.join_ns(op, plan) for op in later[:-1]} == {3.0}
    assert costs.join_ns(later[-1], plan) == 0.0, "in the last layer nobody chooses"
    assert {costs.join_ns(op, plan) for op in plan if op.kind != "attention"} == {0.0}


def test_beside_thread_blocks_that_found_room_an_attention_is_slowed_as_in_a_steps_order() -> None:
    costs, plan = fitted_costs(), plan_of()
    (attention, *_) = plan.of_kind("attention")
    assert costs.places(attention, plan) == PLACES
    slowed = [costs.slowdown(attention, plan, ctas) for ctas in (0, 1, PLACES, PLACES + 1, 16)]
    assert slowed == [1.0, ORDERED, ORDERED, 1.2, 1.2]


def test_a_copy_through_registers_finds_room_beside_any_attention() -> None:
    costs, plan = fitted_costs(), plan_of(prefetch_stages=1, prefetch_warps=8)
    (attention, *_) = plan.of_kind("attention")
    assert costs.places(attention, plan) is None
    assert [costs.slowdown(attention, plan, ctas) for ctas in (1, 16, 64)] == [ORDERED] * 3


def test_no_other_kind_makes_thread_blocks_wait_or_is_slowed_as_in_order() -> None:
    costs, plan = fitted_costs(), plan_of()
    assert {costs.places(op, plan) for op in plan if op.kind != "attention"} == {None}
    assert [costs.slowdown(op_of("norm"), plan, ctas) for ctas in (1, PLACES, 16)] == [1.2] * 3


@settings(deadline=None, max_examples=30)
@given(st.floats(0.2, 3.0), st.floats(0.2, 3.0), st.integers(0, 64))
def test_nothing_runs_faster_beside_a_copy(measured: float, ordered: float, ctas: int) -> None:
    costs, plan = fitted_costs(slowdown=measured, ordered=ordered), plan_of()
    slower = max(1.0, measured if ctas > PLACES else ordered)
    assert costs.slowdown(op_of("attention"), plan, ctas) == (slower if ctas else 1.0)
    assert costs.slowdown(op_of("norm"), plan, ctas) == (max(1.0, measured) if ctas else 1.0)
    assert costs.slowdown(op_of("lm_head"), plan, ctas) == 1.0


@settings(deadline=None, max_examples=30)
@given(st.floats(1.0, 200.0), st.floats(1.0, 200.0), st.integers(1, 64))
def test_a_copy_is_never_faster_than_the_link_nor_faster_beside_compute_than_alone(
    alone: float, beside: float, ctas: int
) -> None:
    costs, plan = fitted_costs(gb_s=beside, transfer=alone), plan_of()
    assert costs.transfer_gb_s(plan, ctas) == min(alone, 50.0)
    share = costs.transfer_share(op_of("attention"), plan, ctas)
    assert share == pytest.approx(min(1.0, beside / min(alone, 50.0)))
    assert 0.0 < share <= 1.0
    assert costs.transfer_share(op_of("lm_head"), plan, ctas) == 1.0


@pytest.mark.parametrize(("kind", "like"), sorted(ALIASES.items()))
def test_a_kind_like_another_behaves_beside_a_copy_like_that_one(kind: str, like: str) -> None:
    costs, plan = fitted_costs(), plan_of()
    assert costs.slowdown(op_of(kind), plan, 4) == costs.slowdown(op_of(like), plan, 4)
    assert costs.transfer_share(op_of(kind), plan, 4) == costs.transfer_share(op_of(like), plan, 4)


def test_time_by_blocks_is_straight_between_points_in_proportion_beyond_and_none_for_none() -> None:
    curve = BlockCurve((10, 20), (1000.0, 1500.0))
    assert [curve.at(blocks) for blocks in (0, 5, 10, 15, 20, 40)] == [0.0, 1000.0, 1000.0, 1250.0, 1500.0, 3000.0]


@pytest.mark.parametrize("transfer", ["gather", "blocks", "batch"])
def test_what_goes_by_way_of_the_host_takes_what_its_blocks_take(transfer: str) -> None:
    costs, plan = fitted_costs(paths=PATHS), plan_of(transfer=transfer)
    blocks = round(plan.workload.miss_rate * plan.config.top_k * 16 * SHAPE.kv_heads)
    kinds = {"gather": ("gather", "upload", "scatter"), "blocks": ("blocks",), "batch": ("batch",)}[transfer]
    for kind in kinds:
        assert costs.alone_ns(plan.of_kind(kind)[0], plan) == PATHS.by_blocks[kind].at(blocks)
    if transfer != "gather":
        enlist, copies = plan.of_kind("enlist")[0], plan.of_kind(transfer)[0]
        assert costs.alone_ns(enlist, plan) == PATHS.listed[transfer].at(blocks)
        assert costs.issue_ns(copies, plan) == PATHS.started[transfer].at(blocks)
        assert costs.join_ns(enlist, plan) == PATHS.round_trip_ns
    assert costs.issue_ns(plan.of_kind("norm")[0], plan) == costs.fitted.step_ns


def test_without_rows_of_them_the_paths_of_the_host_are_not_made_up() -> None:
    costs, plan = fitted_costs(), plan_of(transfer="gather")
    with pytest.raises(SpardaError, match="no measured cost for 'gather'"):
        costs.alone_ns(plan.of_kind("gather")[0], plan)
    assert "infinigen" not in costs.policies(plan)


@pytest.mark.parametrize("paths", [None, PATHS])
def test_costs_come_back_from_json_as_they_were(paths: PathCosts | None) -> None:
    costs = fitted_costs(paths=paths)
    assert FittedCosts.from_plain(MACHINE, json.loads(json.dumps(costs.to_plain()))) == costs


def test_costs_with_an_unknown_or_missing_part_are_refused_by_name() -> None:
    plain = fitted_costs().to_plain()
    with pytest.raises(SpardaError, match=r"costs: unknown key 'lane'; did you mean 'lanes'"):
        FittedCosts.from_plain(MACHINE, {**plain, "lane": 1.0})
    del plain["transfer"]
    with pytest.raises(SpardaError, match="costs: key 'transfer' is missing"):
        FittedCosts.from_plain(MACHINE, plain)
