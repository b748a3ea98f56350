"""The quality axis where a user meets it: the table and its exports, cells to validate, commands as typed."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparda.calibrate.profile import Profile
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import SparseSpec
from sparda.explore import cli
from sparda.explore.exports import export
from sparda.explore.predict import Predictor
from sparda.explore.scenario import Limits, Scenario
from sparda.explore.selection import Selection
from sparda.explore.table import CtaTable, cta_table
from sparda.explore.validate import winners
from tests.explore.quality_fakes import tiny, written

AT = Workload(16, 32768, 0.06)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def named(tmp_path: Path, small: Scenario) -> Scenario:
    """The small scenario with quality, misses and a floor from a folder on disk."""
    folder = written(tmp_path)
    grid = replace(small.grid, miss_rate=(0.03, 0.06), resident_blocks=(0, 160))
    return replace(small, quality=folder, selection=folder, limits=Limits(min_recall=0.885), grid=grid)


def test_a_table_shows_quality_and_takes_misses_from_the_selection(profile: Profile, named: Scenario) -> None:
    table = cta_table(profile, named)
    assert [(r.context_tokens, r.batch) for r in table.rows] == [(32768, 4), (32768, 16)]
    assert {r.miss_rate for r in table.rows} <= {
        Selection.of(tiny()).miss_rate(SparseSpec(), AT, Config(resident_blocks=n)) for n in (0, 160)
    }
    assert all(r.quality and not r.floor_reason for r in table.rows)
    text = export(table, "text")
    assert max(map(len, text.splitlines())) <= 80
    assert {"slots", "ppl"} <= set(text.splitlines()[0].split())
    said = " ".join(text.split())
    assert said.count("carried over from tiny-1b at 8192 tokens") == 2
    assert all(word in export(table, "md") for word in ("| recall |", "| resident |", "carried over from tiny-1b"))


def test_a_table_marks_cells_in_which_nothing_keeps_the_floor(profile: Profile, named: Scenario) -> None:
    table = cta_table(profile, replace(named, limits=Limits(min_recall=0.99), selection=""))
    assert all("points too little" in r.floor_reason for r in table.rows)
    text = export(table, "text")
    assert "!" in text.splitlines()[2]
    assert "no configuration of the cell keeps the floors" in " ".join(text.split())


def test_exports_of_a_rated_table_hold_the_same_quality(profile: Profile, named: Scenario) -> None:
    table: CtaTable = cta_table(profile, named)
    want = [r.quality.recall for r in table.rows if r.quality]
    assert [r["quality"]["recall"] for r in json.loads(export(table, "json"))["rows"]] == want
    assert [r["quality"]["recall"] for r in tomllib.loads(export(table, "toml"))["rows"]] == want
    assert [float(r["quality.recall"]) for r in csv.DictReader(io.StringIO(export(table, "csv")))] == want
    assert "resident blocks as the table has them" in export(table, "sh")


def test_an_unrated_table_has_no_column_of_quality(profile: Profile, small: Scenario) -> None:
    table = cta_table(profile, small)
    assert "ppl" not in export(table, "text")
    assert "quality" not in export(table, "csv")


def test_what_is_measured_to_validate_has_the_selections_misses(profile: Profile, named: Scenario) -> None:
    cells = winners(Predictor.of(profile, named), named)
    selection = Selection.of(tiny())
    assert len(cells.cells) == 2
    for cell in cells.cells:
        assert cell.workload.miss_rate == selection.miss_rate(SparseSpec(), cell.workload, cell.chosen)


def test_cells_in_which_nothing_keeps_a_floor_are_not_measured(profile: Profile, named: Scenario) -> None:
    floored = replace(named, limits=Limits(min_recall=0.99))
    with pytest.raises(SpardaError, match="keeps the floors of quality"):
        winners(Predictor.of(profile, floored), floored)


SMALL = ["--set", "workload.context_tokens=32768", "--set", "config.top_k=128"]
FEW = ["--set", "grid.prefetch_ctas=1,4", "--set", "grid.prefetch_stages=8", "--set", "grid.top_k=64,128"]


def _json(capsys: Capture, *words: str) -> dict[str, Any]:
    assert cli.main([*words, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_simulate_prints_quality_and_where_it_was_measured(shipped: Profile, capsys: Capture, tmp_path: Path) -> None:
    folder = written(tmp_path)
    sets = ["--set", f"quality={folder}", "--set", f"selection={folder}", *SMALL]
    data = _json(capsys, "simulate", *sets)
    assert data["prediction"]["quality"]["recall"] > 0.8
    assert data["prediction"]["feasible"] is True
    assert data["misses_from"].startswith("carried over from tiny-1b")
    for command in ("simulate", "explain"):
        assert cli.main([command, *sets, "--set", "limits.max_ppl_increase=0.001"]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        said = " ".join(text.split())
        assert "Quality of forecast d=1: recall of what sparse chooses" in said
        assert "not a measurement of minicpm4.1-8b" in said
        assert "Breaks a floor of quality: perplexity:" in said


@pytest.mark.parametrize("objective", ["speed", "speed-and-recall", "speed-and-perplexity"])
def test_explore_searches_top_k_under_a_floor(
    shipped: Profile, capsys: Capture, tmp_path: Path, objective: str
) -> None:
    sets = ["--set", f"quality={written(tmp_path)}", "--set", "limits.min_recall=0.85", *SMALL, *FEW]
    words = ["explore", *sets, "--objective", objective, "--trials", "12"]
    data = _json(capsys, *words)
    assert data["best"]["feasible"] is True
    assert data["best"]["config"]["top_k"] == 64
    assert bool(data["front"]) == bool(data["study"]["front"]) == (objective != "speed")
    assert data["study"]["objective"] == data["objective"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "keep the floors" in text
    assert "not a measurement of minicpm4.1-8b" in " ".join(text.split())
    assert ("Tokens/s for each" in text) == (objective != "speed")


def test_mistakes_of_quality_are_one_sentence(capsys: Capture, tmp_path: Path) -> None:
    for words, say in (
        (["simulate", "--set", "quality=nobody"], "no quality profile 'nobody'"),
        (["simulate", "--set", "selection=nobody"], "no quality profile 'nobody'"),
        (["table", "--set", "limits.min_recall=0.9"], "no quality profile says"),
        (["explore", "--objective", "speed-and-recall"], "needs a quality profile"),
    ):
        assert cli.main(words) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert say in err
