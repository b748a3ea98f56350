"""Figures of quality come from the quality profile, those of training from rows; what is missing has no value."""

from __future__ import annotations

from dataclasses import replace
from math import expm1
from pathlib import Path

import pytest

from sparda.calibrate import quality as quality_module
from sparda.calibrate.profile import Profile
from sparda.calibrate.quality import write_quality
from sparda.calibrate.store import Row
from sparda.explore.evidence_quality import SHIPPED, quality_figures, shipped_quality, training_figures
from sparda.explore.figures import Rows
from sparda.explore.readme import evidence_block
from tests.explore.quality_fakes import NATS, RECALLS, tiny


def test_figures_are_those_of_the_profile() -> None:
    figures = quality_figures(tiny())
    assert figures["quality.recall.forecast.d2.k16"].value == RECALLS["forecast", 2, 1]
    assert figures["quality.recall.shared.k16"].value == RECALLS["shared", 1, 0]
    assert figures["quality.ppl_increase.forecast.d1.k16"].value == expm1(NATS["forecast", 1, 1])
    assert "standard error 0.4%" in figures["quality.ppl_increase.forecast.d1.k16"].conditions
    assert [figures[f"quality.miss_rate.{n}x"].value for n in (1, 2, 4)] == [0.18, 0.02, 0.005]
    assert figures["quality.generator.max_gap"].value == 0.07
    missing = "quality.ppl_increase.proxy.d1.k16"
    assert [name for name, f in figures.items() if f.value is None] == [missing]
    for f in (f for name, f in figures.items() if name != missing):
        assert f.rows == 1
        assert f.conditions.endswith("; tiny-1b, blocks of 64, 8192 tokens, 4 documents")
        assert f.provenance == "NVIDIA Fake $1, 2020-01-01T00:00:00Z: tiny.measured"
        assert f.met is None


def test_what_was_not_measured_has_no_value() -> None:
    bare = replace(tiny(), recalls=(), perplexities=(), dynamics=(), conditions={})
    for figures in (quality_figures(bare), quality_figures(None)):
        assert list(figures) == list(quality_figures(tiny()))
        assert all((f.value, f.rows, f.provenance) == (None, 0, "no rows") for f in figures.values())
        assert evidence_block(figures).count("| not measured |") == len(figures)


def test_the_claimed_profile_is_the_shipped_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quality_module, "SHIPPED", tmp_path)
    assert shipped_quality() is None
    (tmp_path / SHIPPED).mkdir()
    write_quality(tmp_path / SHIPPED / "quality.json", tiny())
    assert shipped_quality() == tiny()


def _training(tokens: int, seconds: float, way: str) -> Row:
    case: dict[str, float | int | str | bool] = {"tokens": tokens, "way": way}
    values = {"seconds_per_step": seconds, "peak_gib": 10 * seconds}
    return Row("training", "forecast", "s1", "wall", case, (seconds * 1e6,), values)


def test_the_training_step_is_that_of_the_claimed_model_and_length(profile: Profile) -> None:
    missing = training_figures(Rows(profile))
    assert [f.value for f in missing.values()] == [None, None]
    profile.store.add_session("s1", {"gpu": "NVIDIA Fake $1", "model": "minicpm4.1-8b"})
    profile.store.append(
        "t", [_training(65536, 4.0, "plain"), _training(65536, 2.5, "kernel"), _training(8192, 0.1, "x")]
    )
    figures = training_figures(Rows(profile))
    seconds, peak = figures["train.seconds_per_step.8b_64k"], figures["train.peak_gib.8b_64k"]
    assert (seconds.value, peak.value, seconds.rows) == (2.5, 25.0, 1)
    assert "minicpm4.1-8b, 65536 tokens, way kernel" in seconds.conditions
    lines = evidence_block(figures).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["2.50 s", "25.0 GiB"]
