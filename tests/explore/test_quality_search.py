"""Search with a quality axis: floors, fronts, misses by resident blocks; in the study, the table and as typed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import SparseSpec
from sparda.explore.front import SPEED, SPEED_AND_PPL, SPEED_AND_RECALL, considered, front_of, level_of
from sparda.explore.predict import Prediction, Predictor
from sparda.explore.quality import Quality, QualityLookup, broken_by
from sparda.explore.scenario import Grid, Limits
from sparda.explore.selection import Selection
from sparda.explore.space import Space, enumerate_space, pick
from sparda.explore.study import Finding, run_study
from tests.explore.quality_fakes import tiny

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
