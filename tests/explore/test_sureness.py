"""How sure predictions are said to be: bands, intervals, and machines whose error nobody knows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparda.calibrate import profile as profile_module
from sparda.calibrate.judged import NO_BAND
from sparda.calibrate.profile import Profile
from sparda.engine.config import Config, Workload
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, SparseSpec
from sparda.explore import cli
from sparda.explore.predict import Predictor, interval90_us
from sparda.explore.scenario import Scenario
from sparda.explore.table import cta_table
from sparda.explore.table_text import table_markdown, table_text

SMALL = ["--set", "grid.batch=4,16", "--set", "grid.context_tokens=32768", "--set", "grid.miss_rate=0.06"]
FEW = ["--set", "grid.prefetch_ctas=1,2,4,16", "--set", "grid.prefetch_warps=1", "--set", "grid.prefetch_stages=8"]

Capture = pytest.CaptureFixture[str]


def one_object(capsys: Capture, *words: str) -> dict[str, Any]:
    assert cli.main([*words, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_without_a_held_out_step_a_prediction_has_no_bounds_rather_than_none_to_either_side(
    profile: Profile, small: Scenario
) -> None:
    unjudged = replace(profile, band=NO_BAND)
    p = Predictor.of(unjudged, small)(Workload(), Config())
    assert (p.low, p.high) == (None, None)
    table = cta_table(unjudged, small)
    assert table.band is None
    for text in (table_text(table), table_markdown(table)):
        assert "is not known, no step was held out" in " ".join(text.split())
        assert "0.0 %, the 90th percentile" not in text
    known = cta_table(profile, small)
    assert known.band == profile.band.p90
    assert all(r.low is not None and r.low < r.tokens_per_s for r in known.rows)


def test_a_profile_without_residuals_has_no_interval(profile: Profile) -> None:
    assert interval90_us(profile, make_plan(MODELS[profile.model], SparseSpec(), Workload(), Config())) is None


def test_simulate_gives_the_interval_of_its_step_where_calibration_left_something_to_judge_by(capsys: Capture) -> None:
    data = one_object(capsys, "simulate", "--profile", "h200-sxm.measured")
    low, high = data["interval90_us"]
    assert low < data["prediction"]["step_us"] < high
    assert one_object(capsys, "simulate", "--profile", "h200-sxm.measured")["interval90_us"] == [low, high]
    assert cli.main(["simulate", "--profile", "h200-sxm.measured"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"90 % interval {low / 1e3:.3f} to {high / 1e3:.3f} ms, from calibration residuals; " in text
    assert "of the held-out steps lie inside theirs." in text


@pytest.mark.parametrize("words", [["--set", "config.transfer=gather"], ["--profile", "h100-sxm.datasheet"]])
def test_simulate_gives_no_interval_where_nothing_tells_it(capsys: Capture, words: list[str]) -> None:
    assert one_object(capsys, "simulate", *words)["interval90_us"] is None
    assert cli.main(["simulate", *words]) == 0
    text = capsys.readouterr().out
    assert "interval" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_step_with_work_of_the_host_has_the_band_of_such_steps(capsys: Capture) -> None:
    by_gpu = one_object(capsys, "simulate")["prediction"]
    by_host = one_object(capsys, "simulate", "--set", "config.transfer=gather")["prediction"]
    widths = [p["high"] / p["tokens_per_s"] - 1 for p in (by_gpu, by_host)]
    judged = profile_module.load_profile("h200-sxm.measured")
    assert widths == [pytest.approx(judged.band.p90), pytest.approx(judged.judged.by_host.p90)]


@pytest.mark.parametrize("name", ["h100-sxm.datasheet", "b200.datasheet"])
def test_a_machine_by_datasheet_is_said_to_be_one_and_no_error_is_claimed_for_it(capsys: Capture, name: str) -> None:
    data = one_object(capsys, "simulate", "--profile", name)
    assert (data["profile"], data["tier"]) == (name, "datasheet")
    p = data["prediction"]
    assert (p["low"], p["high"], p["inside"]) == (None, None, False)
    assert p["outside_reasons"] == ["costs carried over from h200-sxm.measured by datasheet"]
    assert cli.main(["simulate", "--profile", name]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Profile {name} (datasheet)." in text
    assert "(error unknown, no step was held out)" in text
    assert "Outside the measured range: costs carried over" in text
    assert "-/+" not in text


def test_a_table_by_datasheet_claims_no_band_and_no_row_of_another_gpu_confirms_it(capsys: Capture) -> None:
    words = ["table", "--profile", "h100-sxm.datasheet", *FEW, "--set", "grid.batch=16"]
    data = one_object(capsys, *words)
    assert (data["tier"], data["band"]) == ("datasheet", None)
    assert {(r["low"], r["high"], r["confirmed"], r["inside"]) for r in data["rows"]} == {(None, None, "-", False)}
    assert cli.main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the error of these predictions is not known, no step was held out." in text
    assert "0 yes" in text
    for fmt in ("md", "csv", "toml", "sh"):
        assert cli.main([*words, "--format", fmt]) == 0
        assert "None" not in capsys.readouterr().out


def test_explore_and_report_by_datasheet_say_that_the_error_is_unknown(capsys: Capture, tmp_path: Path) -> None:
    assert cli.main(["explore", "--profile", "h100-sxm.datasheet", *FEW]) == 0
    assert "tokens/s (error unknown)." in capsys.readouterr().out
    path = tmp_path / "report.html"
    assert cli.main(["report", "--profile", "h100-sxm.datasheet", *SMALL, *FEW, "--out", str(path)]) == 0
    page = path.read_text()
    assert "error unknown" in page
    assert "their error is not known" in page
    assert "the p90 of held-out errors" not in page


def test_evidence_of_a_machine_by_datasheet_holds_nothing_of_another_gpu(capsys: Capture) -> None:
    figures = one_object(capsys, "evidence", "--profile", "h100-sxm.datasheet", "--seconds", "0.01")["figures"]
    # What choices cost a model is no GPU's.
    assert not any(f["rows"] for name, f in figures.items() if not name.startswith("quality."))
    assert figures["heldout.steps.median"]["value"] is None


def test_a_described_machine_has_no_runs_to_judge_and_says_what_to_give(capsys: Capture) -> None:
    assert cli.main(["validate", "--verdicts", "--profile", "h100-sxm.datasheet"]) != 0
    told = capsys.readouterr().err
    assert "nothing was run on it" in told
    assert "--cells and --out" in told
