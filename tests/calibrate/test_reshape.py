from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.calibrate.changes import MachineChange, changed
from sparda.calibrate.judged import NO_BAND, ErrorBand
from sparda.calibrate.profile import BASE, WHAT_IF, Profile, load_profile
from sparda.calibrate.reshape import on_shape, reshaped
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.policies import make_plan
from sparda.engine.shapes import ModelShape, SparseSpec, model_named
from sparda.sim.player import play

MODEL = model_named("minicpm4.1-8b")
LLAMA = ModelShape("llama-8b", 32, 4096, 32, 8, 128, 14336, 128256)
BAND = ErrorBand(10, 0.02, 0.05, 0.06, 0.08, 0.0, 0.001)
PROFILE = load_profile(BASE)


def step_us(profile: Profile, shape: ModelShape, batch: int, config: Config | None = None, miss: float = 0.06) -> float:
    plan = make_plan(shape, SparseSpec(), Workload(batch, 131072, miss), config or Config(prefetch_ctas=4))
    return play(plan, profile.costs).step_us


@pytest.mark.parametrize("policy", ["sparda", "sparse", "sparda-resident", "dense", "infinigen", "nosa", "shallow"])
def test_the_measured_shape_carried_over_to_itself_costs_what_it_cost(policy: str) -> None:
    same = reshaped(PROFILE.costs, MODEL, MODEL)
    plan = make_plan(MODEL, SparseSpec(), Workload(16, 131072), Config(policy=policy))
    assert play(plan, same).makespan_ns == play(plan, PROFILE.costs).makespan_ns


def test_a_model_of_four_times_the_kv_heads_attends_at_a_quarter_of_the_batch_as_long() -> None:
    costs = reshaped(PROFILE.costs, MODEL, LLAMA)
    few, many = (
        make_plan(m, SparseSpec(), Workload(batch, 131072), Config()) for m, batch in ((LLAMA, 4), (MODEL, 16))
    )
    for kind in ("attention", "score", "select"):
        a, b = (next(op for op in plan if op.kind == kind) for plan in (few, many))
        assert costs.alone_ns(a, few) == pytest.approx(PROFILE.costs.alone_ns(b, many), rel=0.02)


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([2048, 4096, 8192]), st.sampled_from([2, 4, 8, 32, 64]))
def test_more_weights_are_never_read_faster(batch: int, width: int, layers: int) -> None:
    small = replace(LLAMA, name="small", d_model=width, layers=layers)
    large = replace(small, name="large", ffn=2 * small.ffn, vocab=2 * small.vocab)
    profile = on_shape(PROFILE, small), on_shape(PROFILE, large)
    assert step_us(profile[1], large, batch) > step_us(profile[0], small, batch)


def test_cached_values_of_one_byte_halve_what_the_link_carries_and_never_slow_a_step() -> None:
    fp8 = replace(MODEL, name="fp8", kv_bytes=1)
    plans = [make_plan(m, SparseSpec(), Workload(32, 131072, 0.12), Config()) for m in (MODEL, fp8)]
    moved = [sum(op.work.h2d_bytes for op in plan) for plan in plans]
    assert moved[0] == 2 * moved[1]
    assert step_us(on_shape(PROFILE, fp8), fp8, 32, miss=0.12) < step_us(PROFILE, MODEL, 32, miss=0.12)


def test_another_shape_is_a_what_if_whose_band_is_that_of_the_rules_and_no_measured_row_is_its_own() -> None:
    base = replace(PROFILE, judged=replace(PROFILE.judged, by_shape=BAND))
    other = on_shape(base, LLAMA, ("a bias is left out",))
    assert (other.tier, other.model, other.band) == (WHAT_IF, "llama-8b", BAND)
    assert other.carried == ("model llama-8b, measured minicpm4.1-8b; a bias is left out",)
    assert other.store.rows() == []
    plan = make_plan(LLAMA, SparseSpec(), Workload(32, 131072), Config())
    # 64 sequences of 2 KV heads were measured; of 8 KV heads that is 16.
    assert other.outside(plan)[1:] == ["batch 32, measured 1 to 16"]
    assert on_shape(base, MODEL) is base


def test_bands_of_several_changes_add_up_and_one_that_is_not_known_leaves_none() -> None:
    judged = replace(PROFILE.judged, by_shape=BAND, by_machine=BAND)
    both = on_shape(changed(replace(PROFILE, judged=judged), MachineChange(sms=100)), LLAMA)
    assert (both.band.p90, len(both.carried)) == (0.1, 2)
    judged = replace(judged, by_shape=NO_BAND)
    assert on_shape(changed(replace(PROFILE, judged=judged), MachineChange(sms=100)), LLAMA).band == NO_BAND


def test_nothing_changed_is_the_profile_itself() -> None:
    assert changed(PROFILE, MachineChange()) is PROFILE


@given(
    st.sampled_from(["sms", "hbm_gb_s", "link_h2d_gb_s", "clock"]), st.floats(1.05, 3.0), st.sampled_from([4, 16, 64])
)
def test_a_machine_with_more_of_one_thing_is_at_most_a_hair_slower(name: str, factor: float, batch: int) -> None:
    value = factor * (1.0 if name == "clock" else getattr(PROFILE.machine, name))
    change = {name: int(value) if name == "sms" else value}
    better = changed(PROFILE, MachineChange(**change))  # type: ignore[arg-type]
    # More multiprocessors cut kernels elsewhere, and turns come out even or not.
    assert step_us(better, MODEL, batch) <= step_us(PROFILE, MODEL, batch) * (1.03 if name == "sms" else 1.0001)


def test_a_changed_link_changes_copy_engines_and_the_way_back_in_proportion_unless_told_otherwise() -> None:
    machine = PROFILE.machine
    wide = changed(PROFILE, MachineChange(link_h2d_gb_s=2 * machine.link_h2d_gb_s))
    assert wide.machine.link_d2h_gb_s == pytest.approx(2 * machine.link_d2h_gb_s, rel=1e-3)
    assert wide.machine.engine_h2d_gb_s == pytest.approx(2 * machine.engine_h2d_gb_s, rel=1e-3)
    told = changed(PROFILE, MachineChange(link_h2d_gb_s=100.0, link_d2h_gb_s=7.0))
    assert told.machine.link_d2h_gb_s == 7.0
    assert told.name == f"{BASE}, link_h2d_gb_s=100, link_d2h_gb_s=7"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"link_h2d_gb_s": -1.0}, r"machine\.link_h2d_gb_s is -1; give a number above 0, or 0"),
        ({"clock": 1980.0}, r"clock is a ratio, not MHz"),
        ({"sms": 5000}, r"at most 1024 multiprocessors"),
    ],
)
def test_a_value_no_machine_has_is_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(SpardaError, match=said):
        MachineChange(**change)  # type: ignore[arg-type]


def test_a_link_faster_than_the_memory_behind_it_is_refused() -> None:
    with pytest.raises(SpardaError, match="a link is slower than the memory behind it"):
        changed(PROFILE, MachineChange(link_h2d_gb_s=9000.0))
