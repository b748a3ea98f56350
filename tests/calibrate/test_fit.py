"""From rows to a profile: what the made-up machine is made of is found again, and what lacks is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sparda.calibrate.cases import config_of, workload_of
from sparda.calibrate.costs import IN_ORDER, LAYER
from sparda.calibrate.fit import calibrate, fit
from sparda.calibrate.holdout import HeldOut, error_band, held_out
from sparda.calibrate.profile import load_profile
from sparda.calibrate.store import Row, Store, Value
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.policies import make_plan
from sparda.sim.player import play
from tests.calibrate.conftest import (
    CTAS,
    GPU,
    GRAPH_US,
    MODEL,
    ONCE_A_STEP,
    SHAPES,
    SPEC,
    START_US,
    kernel_rows,
    rate,
    row,
    step_row,
)

CASES = [
    (Workload(batch, context, miss), config)
    for batch, context, miss in ((1, 32768, 0.0), (16, 131072, 0.06), (64, 65536, 0.12))
    for config in (Config(), Config(prefetch_ctas=8, lookahead=2), Config("sparda-on-demand"), Config("sparse"))
]


@pytest.fixture
def without(store: Store) -> Callable[[str, Callable[[Row], bool]], None]:
    """Takes rows out of one of the store's files."""

    def drop(name: str, unwanted: Callable[[Row], bool]) -> None:
        kept = [r for r in store.rows(name) if not unwanted(r)]
        (store.folder / "rows" / f"{name}.jsonl").unlink()
        store.append(name, kept)

    return drop


def test_every_kernel_takes_as_long_as_measured_at_every_measured_point(store: Store) -> None:
    fitted = fit("none", store, MODEL, SPEC).fitted
    measured = [r for r in kernel_rows() if r.op not in GRAPH_US]
    assert set(fitted.kernels) == {r.op for r in measured}
    for r in [r for r in measured if r.op not in ONCE_A_STEP or r.us > 1.5 * GRAPH_US["graph"]]:
        second = next((v for k, v in r.case.items() if k != "batch"), 0)
        assert fitted.kernels[r.op].at(float(r.case["batch"]), float(second), 0.0) == pytest.approx(r.us * 1e3)


def test_a_copys_start_and_its_rates_are_told_apart(store: Store) -> None:
    fitted = fit("none", store, MODEL, SPEC).fitted
    assert fitted.start_ns == pytest.approx(START_US * 1e3, rel=1e-3)
    assert [curve.ctas for curve in fitted.transfer] == [CTAS] * len(SHAPES)
    for curve, stages in zip(fitted.transfer, (1, 4, 8, 12), strict=True):
        assert curve.values == pytest.approx([rate(ctas, stages) for ctas in CTAS], rel=1e-3)


def test_slowing_and_sharing_are_those_measured_beside_a_copy(store: Store) -> None:
    costs = fit("none", store, MODEL, SPEC)
    for ctas in CTAS:
        plan = make_plan(MODEL, SPEC, Workload(64, 65536), Config(prefetch_ctas=ctas))
        (attention, *_), (embed,) = plan.of_kind("attention"), plan.of_kind("embed")
        assert costs.slowdown(attention, plan, ctas) == pytest.approx(1 + 0.005 * ctas, rel=1e-3)
        assert costs.transfer_share(attention, plan, ctas) == pytest.approx(0.9, rel=1e-2)
        assert (costs.slowdown(embed, plan, ctas), costs.transfer_share(embed, plan, ctas)) == (1.0, 1.0)


def test_beside_thread_blocks_that_found_room_attention_is_slowed_as_in_a_steps_order_where_that_was_measured(
    store: Store,
) -> None:
    for batch in (1, 64):
        case = {"batch": batch, "ctas": 2, "warps": 1, "stages": 8, "chunk_bytes": 16384}
        store.append("corun", [row("corun", IN_ORDER, dict(case), 1500.0, {"alone_us": 1000.0, "copy_bytes": 45e6})])
    costs = fit("none", store, MODEL, SPEC)
    # A layer longer by 500 us beside a copy of some 1670: the attention did in 1670 us what takes it 1170 alone.
    copy_us = START_US + 45e6 / (0.9 * rate(2, 8)) / 1e3
    plan = make_plan(MODEL, SPEC, Workload(1, 65536), Config())
    (attention, *_) = plan.of_kind("attention")
    places = costs.places(attention, plan)
    assert places is not None
    assert places > 16
    assert costs.slowdown(attention, plan, 2) == pytest.approx(copy_us / (copy_us - 500.0), rel=1e-2)
    assert costs.slowdown(attention, plan, places + 1) == pytest.approx(1 + 0.005 * CTAS[-1], rel=1e-3)


def test_rows_of_whole_layers_beside_a_copy_enter_no_fit(store: Store) -> None:
    before = fit("none", store, MODEL, SPEC)
    rows = [r for r in store.latest("corun") if r.op == "norm"]
    store.append("corun", [replace(r, op=LAYER, samples_us=(1.0,), values={**r.values, "slowdown": 9.0}) for r in rows])
    assert fit("none", store, MODEL, SPEC) == before


def test_an_attention_pays_for_the_selection_streams_and_a_step_for_its_graph(store: Store) -> None:
    fitted = fit("none", store, MODEL, SPEC).fitted
    assert [batch for batch, _ in fitted.lanes] == [1, 64]
    assert [ns for _, ns in fitted.lanes] == pytest.approx([1000.0, 4000.0])
    assert [ns for _, ns in fitted.launches] == pytest.approx([500.0, 500.0])
    assert fitted.step_ns == pytest.approx(19000.0)


def test_the_machine_is_the_best_that_was_measured_of_it(store: Store) -> None:
    machine = fit("none", store, MODEL, SPEC).machine
    assert (machine.name, machine.gpu, machine.sms) == ("none", "NVIDIA None", 132)
    assert 3000.0 < machine.hbm_gb_s <= 4000.0
    assert machine.link_h2d_gb_s == pytest.approx(50.0, rel=0.01)
    assert machine.link_d2h_gb_s == 52.0
    assert (machine.hbm_capacity_bytes, machine.host_pinned_bytes) == (141 << 30, 200 << 30)


def test_a_case_measured_again_counts_as_measured_last(store: Store) -> None:
    store.append("kernel", [row("kernel", "down", {"batch": 16}, 777.0, session="s2")])
    assert fit("none", store, MODEL, SPEC).fitted.kernels["down"].at(16, 0, 0) == 777_000.0


def test_a_grid_with_a_hole_is_refused_naming_the_hole(
    store: Store, without: Callable[[str, Callable[[Row], bool]], None]
) -> None:
    without("kernel", lambda r: r.op == "attention" and r.case == {"batch": 16, "top_k": 128})
    with pytest.raises(SpardaError, match=r"kernel rows of attention lack \(batch, top_k\) = \(16\.0, 128\.0\)"):
        fit("none", store, MODEL, SPEC)


@pytest.mark.parametrize(
    ("name", "unwanted", "message"),
    [
        ("kernel", lambda r: r.op == "graph", "lack the graph's own costs"),
        ("kernel", lambda r: r.op == "headscore", "no kernel rows of headscore"),
        ("link", lambda r: r.op == "prefetch", "no link rows with 16 KiB chunks"),
        ("link", lambda r: r.op == "prefetch" and r.case["case"] == "none", "lists of several lengths"),
        ("link", lambda r: r.case.get("case") == "all_miss", "lack copies of every block"),
        ("link", lambda r: r.op == "copy_engine", "no link rows of the copy engine"),
        ("corun", lambda r: r.op not in ("lanes", "launches"), "no co-run rows"),
        ("corun", lambda r: r.op == "lanes", "no co-run rows of the selection streams"),
    ],
)
def test_rows_that_lack_altogether_are_named_with_the_command_that_measures_them(
    store: Store,
    without: Callable[[str, Callable[[Row], bool]], None],
    name: str,
    unwanted: Callable[[Row], bool],
    message: str,
) -> None:
    without(name, unwanted)
    with pytest.raises(SpardaError, match=f"{message}.*sparda measure --parts {name}"):
        fit("none", store, MODEL, SPEC)


def add_steps(store: Store, too_slow: float) -> None:
    """Whole steps that take by ``too_slow`` less than the fit of the store's other rows predicts."""
    costs = fit("none", store, MODEL, SPEC)
    for workload, config in CASES:
        us = play(make_plan(MODEL, SPEC, workload, config), costs).step_us
        store.append("step", [step_row(workload, config, us / (1 + too_slow))])


def test_a_profile_is_written_and_read_back_the_same(store: Store) -> None:
    add_steps(store, 0.05)
    profile = calibrate(store.folder, "none.measured")
    assert load_profile(str(store.folder)) == profile
    assert (profile.label, profile.model, profile.sessions) == ("none.measured (measured)", MODEL.name, ("s1",))
    assert profile.costs == fit("none.measured", store, MODEL, SPEC)


def test_a_profile_is_judged_by_whole_steps_and_reaches_as_far_as_they(store: Store) -> None:
    add_steps(store, 0.05)
    profile = calibrate(store.folder, "none.measured")
    band = profile.band
    assert band.count == len(CASES)
    assert [band.median, band.p90, band.worst, band.bias] == pytest.approx([0.05] * 4, abs=1e-4)
    assert band.spread == pytest.approx(0.015, abs=1e-3)
    assert profile.envelope["batch"] == (1, 64)
    assert profile.envelope["context_tokens"] == (32768, 131072)
    assert profile.envelope["miss_rate"] == (0.0, 0.12)
    assert profile.envelope["top_k"] == (96, 96)
    assert profile.envelope["lookahead"] == (1, 2)
    assert profile.envelope["prefetch_ctas"] == (2, 8)


def test_whole_steps_change_no_cost(store: Store) -> None:
    before = fit("none", store, MODEL, SPEC)
    add_steps(store, 0.5)
    assert fit("none", store, MODEL, SPEC) == before


def test_a_store_without_whole_steps_makes_no_profile(store: Store) -> None:
    with pytest.raises(SpardaError, match="no whole steps to judge the fit by; run `sparda measure --parts steps`"):
        calibrate(store.folder, "none.measured")
    assert not (store.folder / "profile.json").exists()


def test_a_folder_must_hold_the_rows_of_one_model(store: Store, tmp_path: Path) -> None:
    with pytest.raises(SpardaError, match="must hold the rows of one model, found none"):
        calibrate(tmp_path / "empty", "none")
    store.add_session("s2", {**GPU, "model": "another"})
    store.append("parity", [replace(row("parity", "small", {"prompt": 0}, 1.0), session="s2")])
    # The rows of another model that no cost is fitted to are no hindrance; these have no steps to be judged by.
    with pytest.raises(SpardaError, match="no whole steps to judge the fit by"):
        calibrate(store.folder, "none")
    store.append("kernel", [replace(row("kernel", "norm", {"batch": 3}, 1.0), session="s2")])
    with pytest.raises(SpardaError, match=f"must hold the rows of one model, found another, {MODEL.name}"):
        calibrate(store.folder, "none")


@pytest.mark.parametrize(("workload", "config"), CASES)
def test_a_step_row_tells_what_it_was_measured_with(workload: Workload, config: Config) -> None:
    row_of = step_row(workload, config, 100.0)
    assert (workload_of(row_of), config_of(row_of)) == (workload, config)


def test_a_held_out_step_stands_beside_its_prediction(store: Store) -> None:
    costs = fit("none", store, MODEL, SPEC)
    workload, config = CASES[4]
    predicted = play(make_plan(MODEL, SPEC, workload, config), costs).step_us
    (found,) = held_out([step_row(workload, config, 2 * predicted)], costs, MODEL, SPEC)
    assert (found.workload, found.config, found.predicted_us) == (workload, config, predicted)
    assert found.measured_us == pytest.approx(2 * predicted)
    assert found.error == pytest.approx(-0.5)


def steps_with(errors: list[float]) -> list[HeldOut]:
    return [HeldOut(Workload(), Config(), 100.0, 100.0 * (1 + e), 0.001 * i) for i, e in enumerate(errors)]


def test_a_band_ranks_errors_whatever_their_sign_and_their_order() -> None:
    errors = [(-1) ** i * i / 100 for i in range(100)]
    band = error_band(steps_with(errors[::3] + errors[1::3] + errors[2::3]))
    assert band.count == 100
    assert band.median == pytest.approx(0.495)
    assert [band.p90, band.p95, band.worst] == pytest.approx([0.90, 0.95, 0.99])
    assert band.bias == pytest.approx(-0.005)
    assert band.spread == pytest.approx(0.0495)


def test_a_band_of_one_step_is_that_step() -> None:
    band = error_band(steps_with([-0.2]))
    assert [band.median, band.p90, band.p95, band.worst] == pytest.approx([0.2] * 4)
    assert band.bias == pytest.approx(-0.2)


def test_attention_is_slowed_as_the_rows_in_a_steps_order_tell(store: Store) -> None:
    """A copy of 45 MB at 27 GB/s and its start take 1670 us; a layer 835 us longer had half of its speed."""
    copy_us = START_US + 45e6 / (0.9 * rate(2, 8)) / 1e3
    case: dict[str, Value] = {"batch": 64, "ctas": 2, "warps": 1, "stages": 8, "chunk_bytes": 16384}
    values = {"alone_us": 100.0, "copy_bytes": 45e6}
    store.append("corun", [row("corun", "attention in order", case, 100.0 + copy_us / 2, values)])
    costs = fit("none", store, MODEL, SPEC)
    plan = make_plan(MODEL, SPEC, Workload(64, 65536), Config(prefetch_ctas=2))
    assert costs.slowdown(plan.of_kind("attention")[0], plan, 2) == pytest.approx(2.0, rel=1e-3)
