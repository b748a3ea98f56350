"""Costs carried over: nothing changes on the same machine, and every rule changes just what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.calibrate.costs import Beside, BlockCurve, CtaCurve, Fitted, FittedCosts, KernelCost, PathCosts
from sparda.calibrate.datasheet import Datasheet, datasheet_named, datasheets
from sparda.calibrate.judged import NO_BAND, UNJUDGED
from sparda.calibrate.leave_one_out import Errors
from sparda.calibrate.profile import BASE, DATASHEET, WHAT_IF, Profile, load_profile, profile_names
from sparda.calibrate.transfer import ENGINES, carried, hbm_of, on_link, transferred
from sparda.calibrate.waves import attention_turns
from sparda.engine.config import POLICIES, TRANSFERS, Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.plan import Op, Plan, Work
from sparda.engine.policies import make_plan
from sparda.engine.shapes import SparseSpec
from sparda.sim.costs import Machine
from sparda.sim.player import play
from tests.calibrate.conftest import MODEL

MACHINE = Machine("none.measured", "NVIDIA None", 132, 4000.0, 50.0, 52.0, 1 << 37, 1 << 38, 55.0, 80.0)
CTAS = (1, 2, 4, 16)
ALONE = {4: (10.0, 20.0, 35.0, 50.0), 8: (20.0, 40.0, 50.0, 50.0)}
"""GB/s of a copy alone by stages."""
SHARE = 0.8
BYTES, REST_NS = 8e6, 3000.0
"""Bytes that a kernel moves, in 2000 ns at 4000 GB/s, and what it takes besides."""
SMALL_NS = 1500.0
"""A kernel that is over before its bytes could be: they lie in a cache."""


def kernel(ns: float, second: str = "") -> KernelCost:
    seconds = (64.0, 96.0) if second else (0.0,)
    return KernelCost(second, (16.0,), seconds, ((ns,) * len(seconds),), ((BYTES,) * len(seconds),))


def costs_of(machine: Machine = MACHINE) -> FittedCosts:
    alone = tuple(CtaCurve(stages, CTAS, values) for stages, values in ALONE.items())
    beside = Beside(
        16,
        tuple(CtaCurve(stages, CTAS, (1.1, 1.2, 1.3, 1.4)) for stages in ALONE),
        tuple(replace(c, values=tuple(SHARE * v for v in c.values)) for c in alone),
    )
    kernels = {
        "norm": kernel(BYTES / 4000.0 + REST_NS),
        "sample": kernel(SMALL_NS),
        "attention": kernel(30_000.0, "top_k"),
        "score": kernel(BYTES / 4000.0 + REST_NS),
        "gateup": kernel(65_000.0),
    }
    fitted = Fitted(
        kernels, alone, {"norm": (beside,)}, (beside,), 500.0, ((1, 900.0), (64, 2000.0)), ((1, 300.0),), 7000.0
    )
    return FittedCosts(machine, fitted)


def over(target: Machine, clock: float = 1.0) -> FittedCosts:
    return carried(costs_of(), target, MODEL, clock)


def ns_of(costs: FittedCosts, kind: str) -> float:
    return costs.fitted.kernels[kind].ns[0][-1]


def plan_of(stages: int = 8) -> Plan:
    return make_plan(MODEL, SparseSpec(), Workload(), Config(prefetch_stages=stages))


NORM = Op(0, "norm", 0, "main", (), Work(hbm_bytes=1))
machines = st.builds(
    replace,
    st.just(MACHINE),
    sms=st.integers(20, 300),
    hbm_gb_s=st.floats(300.0, 9000.0),
    link_h2d_gb_s=st.floats(10.0, 400.0),
    sm_read_gb_s=st.floats(20.0, 200.0),
)


@pytest.fixture(scope="module")
def base() -> Profile:
    return load_profile(BASE)


def test_on_the_machine_itself_nothing_changes() -> None:
    costs, same = costs_of(), over(MACHINE)
    assert same.machine == MACHINE
    assert same.fitted == costs.fitted


def test_on_the_measured_gpu_itself_every_table_stays_as_it_is(base: Profile) -> None:
    same, own = carried(base.costs, base.machine, MODEL).fitted, base.costs.fitted
    for kind, cost in own.kernels.items():
        for line, known in zip(same.kernels[kind].ns, cost.ns, strict=True):
            assert line == pytest.approx(known, rel=1e-12)
    assert (same.lanes, same.launches, same.step_ns, same.start_ns, same.paths) == (
        own.lanes,
        own.launches,
        own.step_ns,
        own.start_ns,
        own.paths,
    )
    for ours, theirs in zip(same.transfer, own.transfer, strict=True):
        # The link's rate is known to two decimals, and no copy is faster than the link.
        assert ours.values == pytest.approx(theirs.values, abs=0.2)


@pytest.mark.parametrize("policy", POLICIES)
def test_on_the_measured_gpu_itself_every_step_takes_as_long(base: Profile, policy: str) -> None:
    plan = make_plan(MODEL, SparseSpec(), Workload(), Config(policy))
    again = play(plan, carried(base.costs, base.machine, MODEL))
    assert again.makespan_ns == pytest.approx(play(plan, base.costs).makespan_ns, abs=100)


def test_twice_the_hbm_halves_what_the_bytes_take_and_nothing_else() -> None:
    faster = over(replace(MACHINE, hbm_gb_s=8000.0))
    assert ns_of(faster, "norm") == pytest.approx(BYTES / 8000.0 + REST_NS)
    assert ns_of(faster, "score") == pytest.approx(BYTES / 8000.0 + REST_NS)
    # Shorter than its bytes would take: all of it is their part.
    assert ns_of(faster, "sample") == pytest.approx(SMALL_NS / 2)
    assert faster.fitted.lanes == costs_of().fitted.lanes
    assert faster.fitted.transfer == costs_of().fitted.transfer


def test_a_higher_clock_shortens_all_but_what_the_bytes_take() -> None:
    quicker = over(MACHINE, clock=1.5)
    assert ns_of(quicker, "norm") == pytest.approx(BYTES / 4000.0 + REST_NS / 1.5)
    assert ns_of(quicker, "sample") == pytest.approx(SMALL_NS)
    assert [ns for _, ns in quicker.fitted.lanes] == pytest.approx([600.0, 2000.0 / 1.5])
    assert [ns for _, ns in quicker.fitted.launches] == pytest.approx([200.0])
    assert (quicker.fitted.start_ns, quicker.fitted.step_ns) == (500.0, 7000.0), "the host's and the link's"


def test_scoring_beyond_its_bytes_is_shared_by_the_multiprocessors() -> None:
    half = over(replace(MACHINE, sms=66))
    assert ns_of(half, "score") == pytest.approx(BYTES / 4000.0 + 2 * REST_NS)
    assert ns_of(half, "norm") == pytest.approx(BYTES / 4000.0 + REST_NS)


def test_an_attention_takes_as_many_turns_as_the_targets_multiprocessors_make() -> None:
    # 16 sequences by 2 KV heads: 4 thread blocks each of 24 blocks fill 128 of 132, 3 each of 32 fit 116.
    fewer = over(replace(MACHINE, sms=116))
    assert ns_of(fewer, "attention") == pytest.approx(30_000.0 * 32 / 24)
    # Never below what its bytes take: more multiprocessors do not widen the memory.
    more = over(replace(MACHINE, sms=100_000))
    assert ns_of(more, "attention") == pytest.approx(30_000.0)


def test_a_linear_takes_the_turns_more_that_the_targets_multiprocessors_make() -> None:
    # 256 tiles of 1 MiB; 116 x 2 at once leave 24, which take longer at a multiprocessor's pace than at HBM's.
    last_ns = 2**20 / 80.0 - 24 * 2**20 / 4000.0
    assert ns_of(over(replace(MACHINE, sms=116)), "gateup") == pytest.approx(65_000.0 + last_ns)


@settings(deadline=None)
@given(st.integers(20, 300), st.integers(1, 64))
def test_fewer_multiprocessors_never_make_attention_or_scoring_faster_on_the_same_memory(sms: int, fewer: int) -> None:
    # So many that memory stays what all can read.
    wide = replace(MACHINE, sms=sms, sm_read_gb_s=0.0)
    less = replace(wide, sms=max(1, sms - fewer))
    for kind in ("norm", "attention", "score"):
        assert ns_of(over(less), kind) >= ns_of(over(wide), kind) * (1 - 1e-12)


@settings(deadline=None)
@given(machines)
def test_hbm_gives_no_more_than_the_multiprocessors_read(target: Machine) -> None:
    assert over(target).machine.hbm_gb_s == min(target.hbm_gb_s, target.sms * target.sm_read_gb_s)
    assert hbm_of(replace(target, sm_read_gb_s=0.0)) == target.hbm_gb_s


@settings(deadline=None)
@given(machines)
def test_slower_memory_or_clock_makes_no_kernel_faster(target: Machine) -> None:
    before = over(target)
    for slower in (over(replace(target, hbm_gb_s=target.hbm_gb_s / 2)), over(target, clock=0.5)):
        for kind in costs_of().fitted.kernels:
            assert ns_of(slower, kind) >= ns_of(before, kind) * (1 - 1e-12)


def test_a_wider_link_leaves_one_thread_blocks_rate_and_needs_more_of_them() -> None:
    wide = over(replace(MACHINE, link_h2d_gb_s=200.0))
    for curve, stages in zip(wide.fitted.transfer, ALONE, strict=True):
        per_cta = ALONE[stages][0]
        assert curve.values == tuple(min(200.0, per_cta * n) for n in CTAS)
    assert [wide.transfer_gb_s(plan_of(), n) for n in (1, 2, 16)] == [20.0, 40.0, 200.0]


def test_a_narrower_link_caps_every_copy_and_leaves_what_it_does_not_reach() -> None:
    narrow = over(replace(MACHINE, link_h2d_gb_s=25.0))
    assert [c.values for c in narrow.fitted.transfer] == [(10.0, 20.0, 25.0, 25.0), (20.0, 25.0, 25.0, 25.0)]


@settings(deadline=None)
@given(machines, st.sampled_from(CTAS), st.sampled_from(sorted(ALONE)))
def test_what_copies_and_compute_do_to_each_other_stays_as_it_is_in_shares(
    target: Machine, ctas: int, stages: int
) -> None:
    before, after, plan = costs_of(), over(target), plan_of(stages)
    assert after.transfer_share(NORM, plan, ctas) == pytest.approx(SHARE)
    assert after.slowdown(NORM, plan, ctas) == before.slowdown(NORM, plan, ctas)
    assert after.transfer_gb_s(plan, ctas) <= target.link_h2d_gb_s


def test_a_copy_that_was_measured_faster_beside_compute_than_alone_is_no_faster_there() -> None:
    costs = costs_of()
    (beside,) = costs.fitted.beside["norm"]
    lucky = replace(beside, gb_s=tuple(replace(c, values=tuple(1.1 * v for v in c.values)) for c in beside.gb_s))
    made = carried(replace(costs, fitted=replace(costs.fitted, beside={"norm": (lucky,)})), MACHINE, MODEL)
    assert made.transfer_share(NORM, plan_of(), 2) == pytest.approx(min(1.0, 1.1 * SHARE))


def test_a_wider_link_shortens_what_an_engines_bytes_take_and_not_the_start_of_its_copies() -> None:
    block_ns = MODEL.block_bytes(SparseSpec()) / 55.0
    curve = BlockCurve((1, 100), (9000.0, 20_000.0 + 100 * block_ns))
    paths = PathCosts({"blocks": curve}, {"blocks": curve}, dict.fromkeys((*ENGINES, "gather", "scatter"), curve), 8e3)
    costs = costs_of()
    costs = replace(costs, fitted=replace(costs.fitted, paths=paths))
    made = carried(costs, replace(MACHINE, engine_h2d_gb_s=110.0), MODEL).fitted.paths
    assert made
    for kind in ENGINES:
        assert made.by_blocks[kind].ns == pytest.approx((9000.0 - block_ns / 2, 20_000.0 + 50 * block_ns))
    unchanged = (made.by_blocks["gather"], made.by_blocks["scatter"], made.listed, made.started, made.round_trip_ns)
    assert unchanged == (curve, curve, paths.listed, paths.started, paths.round_trip_ns)
    unknown = carried(costs, replace(MACHINE, engine_h2d_gb_s=0.0), MODEL).fitted.paths
    assert unknown == paths


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_every_path_is_faster_on_a_wider_link_where_the_step_waits_for_it(base: Profile, transfer: str) -> None:
    plan = make_plan(MODEL, SparseSpec(), Workload(64, 131072, 0.12), Config(prefetch_ctas=16, transfer=transfer))
    wide = on_link(base, "nvlink-c2c")
    assert (wide.name, wide.tier, wide.band) == (f"{BASE}, nvlink-c2c", WHAT_IF, base.judged.by_machine)
    assert (wide.sessions, wide.store.rows()) == ((), [])
    assert play(plan, wide.costs).makespan_ns < 0.95 * play(plan, base.costs).makespan_ns


def test_the_profiles_own_link_changes_no_step(base: Profile) -> None:
    same, plan = on_link(base, datasheet_named("h200-sxm").link.name), plan_of()
    assert play(plan, same.costs).makespan_ns == pytest.approx(play(plan, base.costs).makespan_ns, abs=100)


def test_an_unknown_link_is_named_with_those_known(base: Profile) -> None:
    with pytest.raises(SpardaError, match=r"link is 'wire'; known links: .*nvlink-c2c"):
        on_link(base, "wire")
    with pytest.raises(SpardaError, match=r"mine has no datasheet in machines\.toml"):
        on_link(replace(base, name="mine"), "nvlink-c2c")


# Profiles of datasheets


def test_a_gpu_like_the_base_gets_the_base(base: Profile) -> None:
    sheet = replace(datasheet_named("h200-sxm"), name="twin", gpu="NVIDIA Twin")
    twin = transferred(base, sheet)
    assert (twin.name, twin.machine.gpu) == ("twin.datasheet", "NVIDIA Twin")
    capacity = base.machine.hbm_capacity_bytes
    named = replace(twin.machine, name=base.machine.name, gpu=base.machine.gpu, hbm_capacity_bytes=capacity)
    named = replace(named, shared_kib_per_sm=base.machine.shared_kib_per_sm)
    assert named == base.machine
    plan = plan_of()
    assert play(plan, twin.costs).makespan_ns == pytest.approx(play(plan, base.costs).makespan_ns, abs=100)


@pytest.mark.parametrize("name", list(datasheets()))
def test_every_described_machine_gives_a_profile_that_claims_no_error_and_simulates(name: str) -> None:
    profile, sheet = load_profile(f"{name}.datasheet"), datasheet_named(name)
    assert (profile.tier, profile.label) == (DATASHEET, f"{name}.datasheet (datasheet)")
    assert (profile.band, profile.judged, profile.intervals) == (NO_BAND, UNJUDGED, None)
    assert (profile.machine.sms, profile.machine.gpu) == (sheet.sms, sheet.gpu)
    assert profile.machine.hbm_gb_s < sheet.hbm_gb_s
    assert profile.machine.link_h2d_gb_s < sheet.link_gb_s
    for policy in POLICIES:
        plan = make_plan(MODEL, SparseSpec(), Workload(4), Config(policy))
        assert profile.outside(plan)[0] == f"costs carried over from {BASE} by datasheet"
        timeline = play(plan, profile.costs)
        moved_ns = sum(op.work.hbm_bytes for op in plan if op.stream == "main") / sheet.hbm_gb_s
        assert timeline.makespan_ns > moved_ns, "no step is faster than its bytes at the datasheet's rate"


def test_a_copy_that_does_not_fit_a_machines_shared_memory_is_told_how_deep_it_may_be() -> None:
    small, large = load_profile("rtx-4090.datasheet"), load_profile("h100-sxm.datasheet")
    plan = make_plan(MODEL, SparseSpec(), Workload(4), Config(prefetch_stages=8))
    told = [r for r in small.outside(plan) if "shared memory" in r]
    assert told == ["a copy of 8 stages needs 112 KiB of shared memory, a thread block there has 99: give at most 7"]
    fits = make_plan(MODEL, SparseSpec(), Workload(4), Config(prefetch_stages=7))
    assert not [r for p, plan in ((small, fits), (large, plan)) for r in p.outside(plan) if "shared memory" in r]


@pytest.mark.parametrize("name", list(datasheets()))
def test_no_carried_kernel_is_faster_than_its_bytes_unless_it_was_measured_so(name: str, base: Profile) -> None:
    profile, own = load_profile(f"{name}.datasheet"), base.costs.fitted.kernels
    for kind, cost in profile.costs.fitted.kernels.items():
        for ns, known, moved in zip(
            *(sum(t, ()) for t in (cost.ns, own[kind].ns, cost.hbm_bytes)),
            strict=True,
        ):
            cached = moved / base.machine.hbm_gb_s > known
            assert cached or ns >= moved / profile.machine.hbm_gb_s * (1 - 1e-9), kind


def test_rows_sessions_and_errors_of_the_base_are_not_those_of_a_datasheet(base: Profile) -> None:
    profile = load_profile("h100-sxm.datasheet")
    assert (profile.sessions, profile.store.rows(), profile.store.provenance) == ((), [], {})
    assert profile.errors == Errors({}, {}, ())
    assert base.store.rows()


def test_a_base_without_a_datasheet_of_its_own_cannot_be_carried_over(base: Profile) -> None:
    with pytest.raises(SpardaError, match=r"mine\.measured has no datasheet in machines\.toml"):
        transferred(replace(base, name="mine.measured"), datasheet_named("h100-sxm"))


def test_names_of_machines_and_profiles_are_the_same_set() -> None:
    sheets: list[Datasheet] = list(datasheets().values())
    assert [n for n in profile_names() if n.endswith(".datasheet")] == [s.profile_name for s in sheets]


def test_more_multiprocessors_give_attention_no_more_turns() -> None:
    turns = [attention_turns(16, 96, MODEL, sms) for sms in range(1, 400)]
    assert turns == sorted(turns, reverse=True)
