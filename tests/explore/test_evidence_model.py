"""Figures of the model, on a small profile fitted to the rows of a machine that is not."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sparda.calibrate.costs import FittedCosts
from sparda.calibrate.fit import calibrate, fit
from sparda.calibrate.handicap import handicapped
from sparda.calibrate.profile import Profile, measured_names, profile_names
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload
from sparda.engine.policies import make_plan
from sparda.explore.evidence_model import WITHIN, ModelEvidence
from sparda.explore.figures import LIVE, Figure
from sparda.sim.player import play
from tests.calibrate.conftest import MODEL, SPEC, filled, row, step_row
from tests.calibrate.layers import layer_rows
from tests.calibrate.test_fit_paths import path_rows

CELL = Workload(16, 131072, 0.12)
CTAS = (1, 2, 4, 8, 32)
SLOWER = {1: 1.01, 2: 1.02, 4: 1.03, 8: 1.04, 32: 1.10}
"""Measured over predicted, by CTAs."""
BY_HOST = 1.25
"""The same of steps that the host works in."""


def predicted_us(costs: FittedCosts, workload: Workload, config: Config) -> float:
    return play(make_plan(MODEL, SPEC, workload, config), costs).step_us


def steps_of(costs: FittedCosts) -> list[Row]:
    configs = [Config(prefetch_ctas=n) for n in CTAS]
    rows = [step_row(CELL, c, SLOWER[c.prefetch_ctas] * predicted_us(costs, CELL, c)) for c in configs]
    host = Config(transfer="gather")
    return [*rows, step_row(CELL, host, BY_HOST * predicted_us(costs, CELL, host))]


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Five steps of the GPU by itself and one with the host's work, and layers beside copies."""
    store = filled(tmp_path_factory.mktemp("model"))
    store.append("link", path_rows())
    for batch in (1, 64):
        store.append("kernel", [row("kernel", "report", {"batch": batch}, 5.0)])
    costs = fit("none", store, MODEL, SPEC)
    store.append("corun", layer_rows(costs, longer=1.05, slower=1.02, copied=0.9))
    store.append("step", steps_of(costs))
    return calibrate(store.folder, "none.measured")


@pytest.fixture(scope="module")
def held(profile: Profile) -> dict[str, Figure]:
    return ModelEvidence(profile, 0.01).held_out()


def test_held_out_figures_are_errors_over_all_steps_of_the_gpu(held: dict[str, Figure]) -> None:
    errors = sorted(1 - 1 / slower for slower in SLOWER.values())
    assert held["heldout.steps.count"].value == len(CTAS)
    assert held["heldout.steps.median"].value == pytest.approx(errors[2], abs=1e-4)
    assert held["heldout.steps.p95"].value == pytest.approx(errors[-1], abs=1e-4)
    assert held["heldout.steps.max"].value == pytest.approx(errors[-1], abs=1e-4)
    assert "batch 16, sparda, 32 CTAs" in held["heldout.steps.max"].conditions
    assert {held[i].rows for i in ("heldout.steps.count", "heldout.steps.median", "heldout.steps.max")} == {len(CTAS)}


def test_few_ctas_are_judged_by_themselves(held: dict[str, Figure]) -> None:
    figure = held["heldout.steps.max.few_ctas"]
    assert figure.value == pytest.approx(1 - 1 / SLOWER[4], abs=1e-4)
    assert "3 of up to 4 CTAs" in figure.conditions


def test_steps_with_the_hosts_work_are_judged_by_themselves(held: dict[str, Figure]) -> None:
    figure = held["heldout.host_paths.median"]
    assert figure.value == pytest.approx(1 - 1 / BY_HOST, abs=1e-4)
    assert (figure.rows, figure.target) == (1, None)
    assert figure.conditions.startswith("1 step whose blocks the host")


def test_the_order_of_cta_counts_is_ranked_over_the_cells_of_steps(profile: Profile, held: dict[str, Figure]) -> None:
    figure = held["heldout.tau.min"]
    assert figure.unit == "Kendall's tau"
    assert figure.value == 1.0, "slower ones were slower yet"
    assert figure.rows == len(CTAS) + 1
    assert figure.conditions.startswith("1 cell, pairs of CTA counts")


def test_interleaved_rows_of_validation_are_ranked_first_where_there_are_any(profile: Profile, tmp_path: Path) -> None:
    store = filled(tmp_path)
    steps = profile.store.latest("step")
    store.append("step", steps)
    turned = [replace(r, kind="validation", samples_us=tuple(1e8 / s for s in r.samples_us)) for r in steps]
    store.append("validation", turned)
    figure = ModelEvidence(replace(profile, folder=store.folder), 0.01).held_out()["heldout.tau.min"]
    assert figure.value == pytest.approx(-1.0), "what is slower in the steps is faster there"


def test_coverage_is_what_the_profile_was_judged_to_have(profile: Profile, held: dict[str, Figure]) -> None:
    figure = held["interval90.coverage"]
    assert profile.judged.coverage is not None
    assert figure.value == profile.judged.coverage
    assert (figure.rows, figure.unit) == (len(CTAS), "share of steps")


def test_handicaps_count_steps_with_something_taken_away_and_say_the_worst(profile: Profile, tmp_path: Path) -> None:
    case = {**asdict(CELL), **Config().settings, "held_sms": 32, "hbm_ctas": 0, "link_rival": "none"}
    (found,) = handicapped([row("handicap", "sparda", case, 1.0)], profile.costs, MODEL, SPEC)
    store = filled(tmp_path)
    exact = row("handicap", "sparda", case, found.predicted_us)
    slower = row("handicap", "sparda", {**case, "prefetch_warps": 2}, 2 * found.predicted_us)
    whole = row("handicap", "sparda", {**case, "held_sms": 0}, 1.0)
    store.append("handicap", [whole, exact, slower])
    figures = ModelEvidence(replace(profile, folder=store.folder), 0.01).handicap()
    assert figures["handicap.count"].value == 2
    assert figures["handicap.median"].value == pytest.approx(0.25, abs=0.01)
    assert figures["handicap.max"].value == pytest.approx(0.5, abs=0.01)
    assert f"1 of 2 within {WITHIN:.0%}" in figures["handicap.max"].conditions
    assert "worst: sparda, batch 16, 2 CTAs, 32 multiprocessors" in figures["handicap.max"].conditions


def test_without_handicapped_rows_nothing_is_said_of_other_machines(profile: Profile) -> None:
    figures = ModelEvidence(profile, 0.01).handicap()
    assert [f.value for f in figures.values()] == [0, None, None]
    assert {f.conditions for f in figures.values()} == {"no rows"}


def test_speed_is_the_readers_own_and_its_figures_are_one_measurement(profile: Profile) -> None:
    figures = ModelEvidence(profile, 0.01).speed()
    steps, ms, configs = (figures[f"sim.{name}"] for name in ("steps_per_s", "ms_per_step", "configs_per_s"))
    assert {f.provenance for f in figures.values()} == {LIVE}
    assert (steps.value or 0) * (ms.value or 0) == pytest.approx(1e3)
    assert (configs.value or 0) > 0
    assert [f.unit for f in (steps, ms, configs)] == ["steps/s", "ms", "configurations/s"]


def test_machines_are_counted_by_tier(profile: Profile) -> None:
    figures = ModelEvidence(profile, 0.01).machines()
    counts = [figures[f"machines.{tier}"].value for tier in ("measured", "datasheet")]
    assert counts == [len(measured_names()), len(profile_names()) - len(measured_names())]
