"""A measurement goes on where it stopped, keeps to its budget, and says what it cannot do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="measuring quality needs torch")


from sparda.calibrate.measure.quality import session as sessions
from sparda.calibrate.measure.quality.run import measure_quality
from sparda.calibrate.measure.quality.scope import Scope
from sparda.calibrate.quality import Choice, QualityProfile, load_quality, write_quality
from sparda.engine.dynamics.choices_file import read_choices
from sparda.engine.errors import SpardaError
from sparda.engine.forecast_file import forecast_of
from tests.calibrate.quality_models import SPEC, TOKENS, FakeCase, ids, texts, weights, wide_forecast

SCOPE = Scope(
    context_tokens=TOKENS,
    recall_tokens=40,
    loss_tokens=30,
    question_tokens=20,
    skip_steps=8,
    top_ks=(4, 6),
    loss_top_ks=(5, 6),
    retrieval_top_ks=(6,),
    dynamics_top_ks=(6,),
    trace_top_k=5,
    sharing_layer=1,
    refresh_steps=4,
)


CASES = [FakeCase(ids(seed), ((TOKENS - 3, TOKENS),)) for seed in (7, 8)]


def measured(out: Path, **given: Any) -> tuple[QualityProfile, list[str]]:
    said: list[str] = []
    arguments: dict[str, Any] = {
        "documents": texts(2),
        "forecasts": {(1, 1): forecast_of(weights()), (1, 2): wide_forecast(2)},
        "scorer": weights().scorer,
        "cases": CASES,
        "spec": SPEC,
        "scope": SCOPE,
        **given,
    }
    return measure_quality(weights(), out=out, say=said.append, **arguments), said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, QualityProfile, list[str]]:
    out = tmp_path_factory.mktemp("quality")
    return out, *measured(out)


def test_a_profile_has_every_part_and_survives_its_file(whole: tuple[Path, QualityProfile, list[str]]) -> None:
    _, profile, said = whole
    assert len(said) == 1
    assert "of recall" in said[0]
    assert said[0].endswith(" s.")
    path = whole[0] / "quality.json"
    write_quality(path, profile)
    assert load_quality(str(path)) == profile
    assert [d.kind for d in profile.documents] == ["code", "novel"]
    assert {r.choice.selector for r in profile.recalls} == set(SCOPE.selectors)
    assert {p.choice.selector for p in profile.perplexities} == set(SCOPE.selectors)
    assert {r.choice.label for r in profile.retrievals} >= {"oracle", "forecast d=1", "recency", "shallow"}
    assert [d.top_k for d in profile.dynamics] == [6]
    assert profile.recall_of(Choice("sparse", 6)) is not None
    assert profile.perplexity_of(Choice("forecast", 5, 1, 2)) is not None
    forced = [profile.perplexity_of(Choice("forced", k)) for k in (5, 6)]
    assert forced[0]
    assert forced[1]
    assert forced[0].nats == forced[1].nats


def test_recorded_traces_lie_beside_the_profile(whole: tuple[Path, QualityProfile, list[str]]) -> None:
    out, profile, _ = whole
    assert len(profile.traces) == 2
    for name in profile.traces:
        choices = read_choices(out / name)
        assert choices.facts.top_k == 5
        assert choices.facts.context_tokens == (TOKENS - SCOPE.recall_tokens,)
        assert choices.steps == SCOPE.recall_tokens


def test_what_is_there_is_not_measured_again(
    whole: tuple[Path, QualityProfile, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, profile, _ = whole

    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("measured again")

    for name in ("run_means", "tallies", "sparse_sets", "trial", "read_prefix"):
        monkeypatch.setattr(sessions, name, refuse)
    again, said = measured(out)
    assert again == profile
    assert said == []


def test_a_measurement_that_stops_between_any_two_jobs_ends_with_the_same_profile(
    whole: tuple[Path, QualityProfile, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"scope": replace(SCOPE, selectors=("sparse", "distance", "random"), loss_top_ks=(6,)), "cases": CASES[:1]}
    at_once, _ = measured(tmp_path / "whole", **given)
    clock = iter(range(100_000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    stops, said = 0, ["left"]
    while said and stops < 50:
        profile, said = measured(tmp_path / "pieces", budget_seconds=3.5, **given)
        stops += 1
    assert 3 < stops < 50
    assert profile == at_once


def test_a_budget_that_runs_out_says_what_is_left(tmp_path: Path) -> None:
    profile, said = measured(tmp_path, budget_seconds=0.0)
    assert profile.recalls == ()
    assert profile.documents == ()
    assert "the budget of 0 s is spent" in said[-1]
    assert "2 of recall" in said[-1]
    assert said[-1].endswith("to go on.")


def test_a_choice_that_was_added_is_measured_alone(tmp_path: Path) -> None:
    few = {"scope": replace(SCOPE, selectors=("sparse",)), "cases": (), "parts": ("recall", "perplexity")}
    measured(tmp_path, **few)
    few["scope"] = replace(SCOPE, selectors=("sparse", "recency"))
    profile, said = measured(tmp_path, **few)
    assert said[0].startswith("2 of recall, 4 of perplexity to measure")
    assert {r.choice.selector for r in profile.recalls} == {"sparse", "recency"}


def test_one_document_without_scorer_or_forecast_leaves_out_what_needs_them(tmp_path: Path) -> None:
    profile, _ = measured(tmp_path, documents=texts(1), forecasts={}, scorer=None, parts=("recall",))
    left_out = set(SCOPE.selectors) - {r.choice.selector for r in profile.recalls}
    assert left_out == {"forecast", "shallow", "distance"}
    assert profile.perplexities == ()
    assert profile.retrievals == ()
    assert profile.dynamics == ()
    assert len(profile.documents) == 1


def test_the_distances_of_a_document_are_counted_on_the_others(tmp_path: Path) -> None:
    only = {"scope": replace(SCOPE, selectors=("distance",)), "cases": (), "parts": ("recall",)}
    first, _ = measured(tmp_path / "a", documents=texts(2), **only)
    second, _ = measured(tmp_path / "b", documents=texts(3), **only)
    assert [r.documents.low for r in first.recalls] != [r.documents.low for r in second.recalls]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"parts": ("recal",)}, "part 'recal' is not known"),
        ({"documents": ()}, "no documents were given"),
        ({"forecasts": {(1, 2): wide_forecast(1)}}, r"2 heads per KV head: tensors 8 that are not \[64, 48\]"),
        ({"documents": texts(1, 90)}, "has 90 tokens and 150 are measured on"),
        ({"documents": [*texts(1), *texts(1)]}, "two documents have the same name"),
        ({"scope": replace(SCOPE, top_ks=(3,))}, "top_k 3: 3 blocks are always chosen"),
        ({"scope": replace(SCOPE, loss_top_ks=(20,))}, "give 4 to 19"),
        ({"scope": replace(SCOPE, loss_tokens=149)}, "loss_tokens is 149"),
        ({"scope": replace(SCOPE, context_tokens=1 << 20)}, "context_tokens is 1048576"),
        ({"scope": replace(SCOPE, selectors=("spars",))}, "selector 'spars' is not known"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(SpardaError, match=words):
        measured(tmp_path, **given)
    assert not list(tmp_path.rglob("*.npz"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"scope": replace(SCOPE, loss_tokens=31)}, "another windows"),
        ({"forecasts": {(1, 1): wide_forecast(1)}}, "another forecast d=1 x1"),
    ],
)
def test_parts_of_another_measurement_are_refused(
    whole: tuple[Path, QualityProfile, list[str]], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpardaError, match=words):
        measured(whole[0], **given)


def test_damaged_sets_are_named(tmp_path: Path) -> None:
    only: dict[str, Any] = {"cases": (), "parts": ("dynamics",)}
    measured(tmp_path, **only)
    broken: Sequence[Path] = sorted((tmp_path / "parts").glob("*.npz"))
    broken[0].write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(SpardaError, match="delete it to measure it again"):
        measured(tmp_path, **only)
