from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.explore.evidence import evidence
from sparda.explore.predict import Predictor
from sparda.explore.scenario import Scenario
from sparda.explore.validate import FILE, winners

IDS = [
    "prefetch.share.2cta.all_miss",
    "prefetch.share.2cta.miss15_b16",
    "decode.step_ms.b4_m06",
    "decode.step_ms.b16_m06",
    "decode.step_ms.b64_m03",
    "heldout.steps.count",
    "heldout.steps.median",
    "heldout.steps.max",
    "regret.max",
    "gain.vs_public.max",
    "sim.steps_per_s",
]


def test_figures_come_from_the_rows(profile: Profile) -> None:
    figures = evidence(profile, seconds=0.01)
    assert list(figures) == IDS
    assert figures["prefetch.share.2cta.all_miss"].value == pytest.approx(48 / 50)
    assert figures["prefetch.share.2cta.all_miss"].met is True
    assert "2 warps" in figures["prefetch.share.2cta.all_miss"].conditions
    assert figures["prefetch.share.2cta.miss15_b16"].value == pytest.approx(44 / 50)
    assert figures["prefetch.share.2cta.miss15_b16"].met is False
    assert figures["heldout.steps.count"].value == 3
    assert figures["heldout.steps.median"].value == pytest.approx(1 - 1 / 1.02, abs=1e-4)
    assert figures["decode.step_ms.b16_m06"].rows == 1
    assert "NVIDIA Fake $1: s1" in figures["decode.step_ms.b16_m06"].provenance
    assert (figures["sim.steps_per_s"].value or 0) > 0
    assert figures["regret.max"].value is None
    assert figures["regret.max"].met is None


def test_the_smallest_median_counts_and_another_policy_does_not(profile: Profile, row: Callable[..., Row]) -> None:
    at = Workload(16, 131072, 0.06)
    profile.store.append(
        "more",
        [
            row("validation", at, Config(prefetch_ctas=3), 3000.0),
            row("step", at, Config(policy="sparse"), 1000.0),
            row("step", at, Config(top_k=64), 1000.0),
            row("step", at, Config(lookahead=2), 1000.0),
        ],
    )
    figure = evidence(profile, seconds=0.01)["decode.step_ms.b16_m06"]
    assert (figure.value, figure.rows) == (3.0, 2)


def test_regret_and_gain_come_from_validation(
    profile: Profile, predictor: Predictor, small: Scenario, row: Callable[..., Row]
) -> None:
    cells = winners(predictor, small, profile.folder / FILE)
    rows = [row("validation", c.workload, r.config, r.predicted_us) for c in cells.cells for r in c.runs]
    profile.store.append("v", rows)
    figures = evidence(profile, seconds=0.01)
    assert 0 <= (figures["regret.max"].value or 0.0) <= 0.01
    assert figures["regret.max"].met
    assert (figures["gain.vs_public.max"].value or 0.0) > 0


def test_without_rows_nothing_is_claimed(profile: Profile) -> None:
    for path in (profile.folder / "rows").glob("*"):
        path.unlink()
    figures = evidence(profile, seconds=0.01)
    assert list(figures) == IDS
    assert figures["heldout.steps.count"].value == 0
    assert all(figures[i].value is None for i in IDS if i not in ("heldout.steps.count", "sim.steps_per_s"))


def test_a_row_without_its_case_is_named(profile: Profile, row: Callable[..., Row]) -> None:
    bad = replace(row("step", Workload(), Config(), 1.0), case={"batch": 1})
    profile.store.append("bad", [bad])
    with pytest.raises(SpardaError, match="lacks"):
        evidence(profile, seconds=0.01)
