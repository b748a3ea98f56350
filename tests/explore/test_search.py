"""Predictions, enumeration, the choice among ties, and studies held to the enumeration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparda.calibrate.profile import Profile
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.explore.front import SPEED_AND_BLOCKS
from sparda.explore.predict import Prediction, Predictor
from sparda.explore.scenario import Grid, Limits
from sparda.explore.space import LEAST_NOISE, Space, enumerate_space, noise_of, pick
from sparda.explore.study import Finding, run_study, wide_space

AT = Workload(16, 32768, 0.06)
SPACE = Space(prefetch_ctas=(1, 2, 4, 8, 16, 32), prefetch_warps=(1,), prefetch_stages=(8,), lookahead=(0, 1, 2))


def test_the_band_bounds_the_prediction(predictor: Predictor) -> None:
    p = predictor(AT, Config())
    assert p.low == pytest.approx(0.95 * p.tokens_per_s)
    assert p.high == pytest.approx(1.05 * p.tokens_per_s)
    assert p.tokens_per_s == pytest.approx(16 / p.step_us * 1e6)
    assert p.inside
    assert p.fits


def test_too_much_memory_is_reported_and_still_predicted(predictor: Predictor) -> None:
    p = predictor(Workload(64, 131072, 0.06), Config())
    assert not p.fits
    assert p.step_us > 0
    assert p.limit_reason.startswith("pinned memory: ")
    assert p.pinned_over_gib > 0 > p.gpu_over_gib
    resident = predictor(Workload(64, 131072, 0.06), Config(policy="sparse-resident"))
    assert resident.limit_reason.startswith("GPU memory: ")


def test_limits_of_the_scenario_replace_the_machines(predictor: Predictor) -> None:
    predictor.limits = Limits(gpu_gib=1.0, pinned_gib=1.0)
    assert predictor(AT, Config()).limit_reason.count("GiB too much") == 2


def test_what_lies_outside_the_measured_range_says_why(predictor: Predictor) -> None:
    p = predictor(replace(AT, batch=128), Config())
    assert not p.inside
    assert "batch 128" in p.outside_reasons[0]


def test_a_question_is_played_once(predictor: Predictor) -> None:
    predictor(AT, Config())
    predictor(AT, Config())
    assert predictor.played == 1


def test_enumeration_leaves_out_only_what_cannot_be(predictor: Predictor) -> None:
    space = replace(SPACE, prefetch_ctas=(2,), lookahead=(1,), top_k=(64, 600), resident_blocks=(0, 64, 100))
    found = enumerate_space(predictor, space, AT, Config())
    assert [(p.config.top_k, p.config.resident_blocks) for p in found] == [(64, 0), (64, 64), (64, 100)]
    with pytest.raises(SpardaError, match="512 blocks"):
        enumerate_space(predictor, replace(space, top_k=(600,)), AT, Config())


def _made(ctas: int, speed: float, fits: bool = True) -> Prediction:
    return Prediction(
        AT,
        Config(prefetch_ctas=ctas),
        16e6 / speed,
        speed,
        speed,
        speed,
        True,
        (),
        fits,
        "" if fits else "x",
        1,
        1,
        0,
        0,
    )


def test_ties_go_to_the_fewest_ctas() -> None:
    choice = pick([_made(16, 1000), _made(8, 996), _made(4, 992), _made(2, 900)], 0.01)
    assert choice.best.config.prefetch_ctas == 4
    assert choice.fastest.config.prefetch_ctas == 16
    assert [t.config.prefetch_ctas for t in choice.ties] == [4, 8, 16]


def test_what_does_not_fit_is_chosen_only_where_nothing_fits() -> None:
    assert pick([_made(1, 1000, fits=False), _made(2, 500)], 0.01).best.config.prefetch_ctas == 2
    alone = pick([_made(1, 1000, fits=False)], 0.01)
    assert not alone.best.fits
    assert alone.fitting == 0
    with pytest.raises(SpardaError):
        pick([], 0.01)


def test_noise_is_the_run_to_run_spread_but_never_nothing(profile: Profile) -> None:
    assert noise_of(profile) == 0.01
    assert noise_of(replace(profile, band=replace(profile.band, spread=0.0))) == LEAST_NOISE


def test_a_table_keeps_what_a_search_tries() -> None:
    grid = Grid(prefetch_ctas=(2,))
    assert Space.of_table(grid, Config(prefetch_stages=4)).prefetch_stages == (4,)
    assert Space.of_table(grid, Config()).lookahead == (1, 2)
    assert Space.of_search(grid, Config()).size == 9
    assert Space.of_search(Grid(prefetch_ctas=(2,), lookahead=(1,)), Config()).size == 3


def _study(predictor: Predictor, trials: int, storage: str | None = None, **more: object) -> Finding:
    space = more.pop("space", SPACE)
    assert isinstance(space, Space)
    oracle = enumerate_space(predictor, space, AT, Config())
    return run_study(
        predictor,
        space,
        AT,
        Config(),
        trials=trials,
        noise=0.01,
        storage=storage,
        oracle=oracle,
        **more,  # type: ignore[arg-type]
    )


def test_a_study_finds_the_oracles_speed(predictor: Predictor) -> None:
    found = _study(predictor, 40)
    assert found.trials == found.new_trials == 40
    assert found.regret is not None
    assert 0 <= found.regret <= 0.01


def test_the_same_seed_finds_the_same(profile: Profile, small: object, predictor: Predictor) -> None:
    a, b = _study(predictor, 8, seed=3), _study(predictor, 8, seed=3)
    assert a == b


def test_a_journal_is_resumed(predictor: Predictor, tmp_path: Path) -> None:
    path = str(tmp_path / "study.journal")
    first = _study(predictor, 5, path)
    second = _study(predictor, 4, path)
    assert (first.trials, second.trials, second.new_trials) == (5, 9, 4)
    looked = _study(predictor, 0, path)
    assert looked.trials == 9
    assert looked.choice.fastest.tokens_per_s >= first.choice.fastest.tokens_per_s


def test_a_journal_of_something_else_is_refused(predictor: Predictor, tmp_path: Path) -> None:
    path = str(tmp_path / "study.journal")
    _study(predictor, 1, path)
    with pytest.raises(SpardaError, match="another scenario"):
        _study(predictor, 1, path, space=replace(SPACE, lookahead=(1,)))
    (tmp_path / "broken").write_text("not a journal\nnor this\n")
    for wrong in ("broken", "missing/study", "."):
        with pytest.raises(SpardaError):
            _study(predictor, 1, str(tmp_path / wrong))
    with pytest.raises(SpardaError):
        _study(predictor, 1, "nosuch://storage")


def test_memory_is_a_constraint(predictor: Predictor) -> None:
    predictor.limits = Limits(gpu_gib=21.0)
    space = replace(SPACE, lookahead=(1,), resident_blocks=(0, 400))
    found = _study(predictor, 30, space=space)
    assert found.infeasible > 0
    assert found.choice.best.fits
    assert found.choice.best.config.resident_blocks == 0


def test_two_objectives_give_a_front(predictor: Predictor) -> None:
    found = _study(predictor, 60, objective=SPEED_AND_BLOCKS, space=replace(SPACE, top_k=(64, 96, 128)))
    counts = [p.config.top_k for p in found.front]
    speeds = [p.tokens_per_s for p in found.front]
    assert counts == sorted(counts)
    assert speeds == sorted(speeds, reverse=True)
    assert found.choice.best.config.top_k == 96
    assert found.regret is not None
    assert found.regret >= 0


def test_the_wide_space_is_larger_and_holds_the_other() -> None:
    wide = wide_space(SPACE)
    assert wide.size > 10 * SPACE.size
    assert set(SPACE.prefetch_ctas) <= set(wide.prefetch_ctas)


def test_a_study_without_a_trial_or_of_an_unknown_objective_is_refused(predictor: Predictor) -> None:
    with pytest.raises(SpardaError, match="give more trials"):
        _study(predictor, 0)
    with pytest.raises(SpardaError, match="allowed are"):
        _study(predictor, 1, objective="cost")
