"""Fitted costs: what was measured comes back exactly, and nothing between or beyond it is better."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.calibrate.costs import (
    BY_HOST,
    CtaCurve,
    Fitted,
    FittedCosts,
    KernelCost,
    at_depth,
    interpolate,
)
from sparda.calibrate.profile import load_profile
from sparda.engine.config import FETCHING, POLICIES, TRANSFERS, Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, SparseSpec
from sparda.sim.costs import Machine
from sparda.sim.player import play

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


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_shipped_profile_prices_every_policy_by_every_path(policy: str, transfer: str) -> None:
    config = Config(policy, transfer=transfer if policy in FETCHING else "uva")
    plan = make_plan(SHAPE, SparseSpec(), Workload(), config)
    shipped = load_profile("h200-sxm.measured").costs
    timeline = play(plan, shipped)
    assert all(span.ns > 0 for span in timeline.spans)
    assert timeline.makespan_ns >= sum(op.work.h2d_bytes for op in plan) / max(
        shipped.machine.link_h2d_gb_s, shipped.machine.engine_h2d_gb_s
    )


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
