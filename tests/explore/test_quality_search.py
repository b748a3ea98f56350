"""Search with a quality axis: floors, fronts, misses by resident blocks; in the study, the table and as typed."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.calibrate.profile import Profile
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import SparseSpec
from sparda.explore import cli
from sparda.explore.exports import export
from sparda.explore.front import SPEED, SPEED_AND_PPL, SPEED_AND_RECALL, considered, front_of, level_of
from sparda.explore.predict import Prediction, Predictor
from sparda.explore.quality import Quality, QualityLookup, broken_by
from sparda.explore.scenario import Grid, Limits, Scenario
from sparda.explore.selection import Selection
from sparda.explore.space import Space, enumerate_space, pick
from sparda.explore.study import Finding, run_study
from sparda.explore.table import CtaTable, cta_table
from sparda.explore.validate import winners
from tests.explore.quality_fakes import tiny, written

AT = Workload(16, 32768, 0.06)
SPACE = Space(
    prefetch_ctas=(1, 2, 8), prefetch_stages=(8,), lookahead=(0, 1, 2), top_k=(64, 96, 128), resident_blocks=(0,)
)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def rated(predictor: Predictor) -> Predictor:
    predictor.quality = QualityLookup(tiny(), predictor.shape.name, predictor.spec)
    return predictor


@pytest.fixture
def moving(predictor: Predictor) -> Predictor:
    predictor.selection = Selection.of(tiny())
    return predictor


def test_a_prediction_without_a_quality_profile_has_none(predictor: Predictor) -> None:
    p = predictor(AT, Config())
    assert p.quality is None
    assert p.feasible
    assert predictor.top_k_axis(AT, Config()) == ()
    assert predictor.resident_times == ()


def test_a_configuration_below_a_floor_is_infeasible_though_it_fits(rated: Predictor) -> None:
    rated.limits = Limits(min_recall=0.87)
    below, above = rated(AT, Config(lookahead=2, top_k=64)), rated(AT, Config(top_k=64))
    assert below.fits
    assert not below.feasible
    assert "1.0 points too little" in below.broken.reason
    assert above.feasible
    assert rated(AT, Config(top_k=64, lookahead=0)).broken.reason.startswith("recall not known")


def _made(speed: float, recall: float, limits: Limits, ctas: int = 1) -> Prediction:
    quality = Quality("forecast d=1", recall, None, 1 - recall, "measured")
    config = Config(prefetch_ctas=ctas)
    return Prediction(
        AT, config, 16e6 / speed, speed, None, None, True, (), True, "", 1, 1, 0, 0, quality, broken_by(quality, limits)
    )


POINTS = st.lists(st.tuples(st.floats(1, 1e4), st.floats(0.01, 1), st.integers(1, 32)), min_size=1, max_size=12)


@given(POINTS, st.floats(0.01, 1), st.floats(0.01, 1))
def test_a_higher_floor_never_gives_a_faster_answer(points: list[tuple[float, float, int]], a: float, b: float) -> None:
    low, high = sorted((a, b))
    loose, tight = (pick([_made(*p[:2], Limits(min_recall=f), p[2]) for p in points], 0.01) for f in (low, high))
    if tight.best.feasible:
        assert loose.best.feasible
        assert tight.fastest.tokens_per_s <= loose.fastest.tokens_per_s
        assert tight.best.quality is not None
        assert (tight.best.quality.recall or 0) >= high


@given(POINTS, st.floats(0.01, 1))
def test_where_no_configuration_keeps_the_floor_the_nearest_to_it_is_chosen(
    points: list[tuple[float, float, int]], floor: float
) -> None:
    choice = pick([_made(*p[:2], Limits(min_recall=floor), p[2]) for p in points], 0.01)
    best = max(recall for _, recall, _ in points)
    assert choice.best.feasible == (best >= floor)
    if not choice.best.feasible:
        assert choice.best.quality is not None
        assert choice.best.quality.recall == pytest.approx(best)


@given(POINTS, st.sampled_from([SPEED_AND_RECALL, SPEED_AND_PPL]))
def test_no_point_of_a_front_is_outrun_at_its_level_and_none_is_missing(
    points: list[tuple[float, float, int]], objective: str
) -> None:
    found = [_made(*p[:2], Limits(), p[2]) for p in points]
    front = front_of(found, 0.0, objective)
    levels = [level_of(p, objective) or 0.0 for p in front]
    speeds = [p.tokens_per_s for p in front]
    assert levels == sorted(levels)
    assert speeds == sorted(speeds, reverse=True)
    for p in found:
        level = level_of(p, objective) or 0.0
        assert any(at >= level and speed >= p.tokens_per_s for at, speed in zip(levels, speeds, strict=True))


def test_without_a_floor_one_choice_is_made_at_one_top_k(rated: Predictor) -> None:
    found = enumerate_space(rated, SPACE, AT, Config())
    assert {p.config.top_k for p in considered(found, Config(), Limits())} == {96}
    assert {p.config.top_k for p in considered(found, Config(), Limits(min_recall=0.5))} == {64, 96, 128}


def test_top_k_is_searched_only_where_its_cost_is_known(predictor: Predictor) -> None:
    space = Space.of_predictor(Grid(), predictor, AT, Config())
    assert (space.top_k, space.resident_blocks, space.resident_times) == ((96,), (0,), ())
    predictor.quality = QualityLookup(tiny(), predictor.shape.name, predictor.spec)
    predictor.selection = Selection.of(tiny())
    space = Space.of_predictor(Grid(), predictor, AT, Config())
    assert space.top_k == (64, 96, 128, 256)
    assert space.lookahead == (0, 1, 2, 3, 4)
    configs = list(replace(space, prefetch_ctas=(1,)).configs(predictor.shape, predictor.spec, AT, Config()))
    assert {(c.top_k, c.resident_blocks) for c in configs} >= {(64, 0), (64, 79), (64, 154), (256, 367), (256, 512)}
    assert len(set(configs)) == len(configs)
    beyond = [why for c in configs for why in predictor.selection.outside(predictor.spec, AT, c)]
    assert not any("free picks" in why for why in beyond)
    resident = Space.of_predictor(Grid(), predictor, AT, Config(policy="sparse-resident"))
    assert resident.resident_times == (), "nothing is fetched, so that more residents spare nothing"
    assert Space.of_predictor(Grid(resident_blocks=(300,)), predictor, AT, Config()).resident_times == ()
    assert Space.of_predictor(Grid(top_k=(80,)), predictor, AT, Config()).top_k == (80,)


def test_more_residents_miss_less_take_more_memory_and_are_not_slower(moving: Predictor) -> None:
    few, many = (moving(AT, Config(resident_blocks=n)) for n in (0, 288))
    assert few.workload.miss_rate > many.workload.miss_rate
    assert few.gpu_gib < many.gpu_gib
    assert few.tokens_per_s <= many.tokens_per_s
    assert moving(replace(AT, miss_rate=0.9), Config()) == few
    beyond = moving(AT, Config(top_k=64, resident_blocks=400))
    assert not beyond.inside
    assert "misses measured up to 4 times" in beyond.outside_reasons[-1]


def _study(predictor: Predictor, objective: str, trials: int = 60, storage: str | None = None) -> Finding:
    oracle = enumerate_space(predictor, SPACE, AT, Config())
    return run_study(
        predictor, SPACE, AT, Config(), trials=trials, noise=0.01, objective=objective, oracle=oracle, storage=storage
    )


def test_a_study_under_a_floor_keeps_it_and_finds_the_oracles_speed(rated: Predictor) -> None:
    rated.limits = Limits(min_recall=0.875)
    found = _study(rated, SPEED)
    assert found.choice.best.feasible
    assert found.infeasible > 0
    assert found.regret is not None
    assert 0 <= found.regret <= 0.01
    assert found.choice.best.config.lookahead == 1


@pytest.mark.parametrize("objective", [SPEED_AND_RECALL, SPEED_AND_PPL])
def test_a_study_of_two_objectives_gives_a_front_of_known_qualities(rated: Predictor, objective: str) -> None:
    found = _study(rated, objective)
    levels = [level_of(p, objective) for p in found.front]
    assert None not in levels
    assert levels == sorted(v for v in levels if v is not None)
    assert all(p.config.lookahead > 0 for p in found.front)
    assert found.regret is not None
    assert found.regret >= 0


def test_an_objective_of_quality_without_a_profile_is_refused(predictor: Predictor) -> None:
    with pytest.raises(SpardaError, match="needs a quality profile"):
        _study(predictor, SPEED_AND_RECALL, 1)


def test_a_study_of_a_policy_that_was_not_measured_says_so(rated: Predictor) -> None:
    with pytest.raises(SpardaError, match="of known quality; give more trials, or an objective"):
        run_study(rated, SPACE, AT, Config(policy="nosa"), trials=3, noise=0.01, objective=SPEED_AND_PPL)


def test_a_journal_is_not_resumed_with_another_quality(rated: Predictor, tmp_path: Path) -> None:
    path = str(tmp_path / "study.journal")
    _study(rated, SPEED, 2, path)
    rated.quality = QualityLookup(replace(tiny(), recalls=()), rated.shape.name, SparseSpec())
    with pytest.raises(SpardaError, match="another scenario"):
        _study(rated, SPEED, 1, path)


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
