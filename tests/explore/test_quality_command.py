"""`sparda quality` as typed, and answers whose numbers follow from the rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.calibrate import quality as quality_module
from sparda.calibrate.quality import SELECTORS, Choice, Perplexity, QualityProfile
from sparda.engine.dynamics.curve import MissCurve
from sparda.engine.loader import read
from sparda.explore import cli
from sparda.explore.quality_answers import answers, halving_ratio
from sparda.explore.quality_compare import Difference, main_top_k, nats_difference, share_difference
from sparda.explore.quality_retrieval import nats_more
from sparda.explore.quality_text import text_of_quality
from sparda.explore.readme import quality_block
from tests.explore.quality_fakes import DOCUMENTS, NAME, PPL_TOP_KS, RECALL_TOP_KS, RECALLS, tiny, written

Capture = pytest.CaptureFixture[str]


def said(profile: QualityProfile) -> str:
    return " ".join(answers(profile))


def with_nats(profile: QualityProfile, choice: Choice, by_document: list[float]) -> QualityProfile:
    """The profile with other nats of one choice."""
    nats = sum(by_document) / len(by_document)
    own = Perplexity(choice, nats, 0.004, dict(zip(DOCUMENTS, by_document, strict=True)))
    return replace(profile, perplexities=(*(p for p in profile.perplexities if p.choice != choice), own))


def test_what_the_forecast_adds_is_told_against_every_rival() -> None:
    text = said(tiny())
    assert "catches 88.0 % of the free blocks that sparse chooses" in text
    assert "no difference against proxy d=1, +3.0 points against infinigen d=1" in text
    assert "+26.0 points against shared d=1, not measured against early, +19.0 points against recency" in text
    assert "catches 63.0 %" in text
    assert "costs 0.058 nats per token" in text
    assert "-0.010 against previous" in text


def test_each_further_layer_is_held_against_the_one_before() -> None:
    text = said(tiny())
    assert "88.0 % at 1, 86.0 % at 2 (-2.0 points), 85.0 % at 3 (no difference), 84.0 % at 4 (no difference)" in text
    assert "0.058 at 1, 0.062 at 2 (+0.004), not measured at 3, 0.090 at 4" in text


def test_more_heads_are_needed_only_where_they_do_better() -> None:
    assert "2 heads: no difference of recall, -0.001 in nats, one is not enough; 4 heads: not measured" in said(tiny())
    noisy = with_nats(tiny(), Choice("forecast", 16, 1, 2), [0.02, 0.10, 0.03, 0.078])
    assert "2 heads: no difference of recall, no difference in nats, one is enough" in said(noisy)


def test_sparse_is_held_to_the_oracle_and_to_recency_and_recall_is_not_called_quality() -> None:
    text = said(tiny())
    assert "holds 95.0 % of the attention: +20.0 points against oracle, +31.0 points against recency" in text
    assert "costs 0.050 nats per token: +0.037 against oracle, +0.002 against recency" in text
    assert "at top-k 16 shallow catches 60.0 % of it and costs fewer nats" in text
    worse = tiny()
    for name in ("oracle", "shallow", "recency"):
        worse = with_nats(worse, Choice(name, 16), [0.2] * 4)
    assert "every other measured choice costs more nats than sparse" in said(worse)


def test_what_an_answer_costs_is_told_beside_full_attention_and_beside_a_plain_window() -> None:
    text = said(tiny())
    assert "needle, 4096 tokens, top-k 16: a token of the answer costs 0.05 nats with full attention" in text
    assert "oracle +0.05, sparse +0.15, forecast d=1 +0.20, recency +0.75" in text
    assert "in 95 % of 40 trials, oracle 90 %, sparse 80 %, forecast d=1 75 %, recency 20 %" in text
    assert "Against a plain window of the newest blocks, needle: sparse -0.60, forecast d=1 -0.55" in text
    assert "multihop, 4096 tokens, top-k 16: a token of the answer costs 1.50 nats with full attention" in text


def test_differences_of_answers_are_paired_by_context_and_depth() -> None:
    rows = tuple(
        replace(r, nats=r.nats + shift, dense_nats=r.dense_nats + shift) if r.depth >= 0 else r
        for r, shift in zip(tiny().retrievals, [0.0, 3.0, 1.0, 2.0] * 4 + [0.0], strict=True)
    )
    sparse, recency = Choice("sparse", 16), Choice("recency", 16)
    apart = nats_more(replace(tiny(), retrievals=rows), "needle", sparse, recency)
    assert apart is not None
    assert apart.value == pytest.approx(-0.6)
    assert apart.told, "depths differ far more than the choices do, and the same for both"
    uneven = tuple(replace(r, nats=r.depth * 3) if r.choice == sparse else r for r in rows)
    apart = nats_more(replace(tiny(), retrievals=uneven), "needle", sparse)
    assert apart is not None
    assert not apart.told
    assert nats_more(tiny(), "needle", Choice("random", 16)) is None


def test_what_is_missing_is_said_to_be_not_measured() -> None:
    bare = replace(tiny(), recalls=(), perplexities=(), retrievals=(), dynamics=())
    told = answers(bare)
    assert len(told) == len(answers(tiny())) - 5
    assert all("not measured" in sentence for sentence in told)
    assert text_of_quality(bare)
    assert quality_block(bare) == "Measured on tiny-1b at 8192 tokens, 4 documents"


def test_differences_of_nats_are_paired_by_document() -> None:
    a, b = Choice("forecast", 16, 1, 1), Choice("sparse", 16)
    shifted = with_nats(with_nats(tiny(), b, [0.1, 0.5, 0.9, 0.3]), a, [0.11, 0.51, 0.91, 0.31])
    d = nats_difference(shifted, a, b)
    assert d is not None
    assert d.value == pytest.approx(0.01)
    assert d.told, "texts differ far more than the choices do, and the same on both"
    crossed = with_nats(shifted, a, [0.51, 0.11, 0.31, 0.91])
    d = nats_difference(crossed, a, b)
    assert d is not None
    assert not d.told
    assert nats_difference(tiny(), a, Choice("random", 16)) is None


def test_differences_of_shares_are_paired_by_document() -> None:
    a, b = Choice("forecast", 16, 1, 1), Choice("previous", 16)
    d = share_difference(tiny(), a, b)
    assert d is not None
    assert d.value == pytest.approx(0.07)
    assert d.told
    rows = tuple(
        replace(r, by_document={"mass": (0.1, 0.5, 0.9, 0.3) if r.choice == a else (0.11, 0.51, 0.91, 0.31)})
        if r.choice in (a, b)
        else r
        for r in tiny().recalls
    )
    d = share_difference(replace(tiny(), recalls=rows), a, b, "mass")
    assert d is not None
    assert d.error == pytest.approx(0.0, abs=1e-9), "texts differ far more than the choices do, and the same on both"
    assert share_difference(tiny(), a, Choice("forecast", 16, 1, 4)) is None
    assert not Difference(1.0, 1.019, 0.01).told
    assert Difference(1.0, 1.021, 0.01).told


def test_the_answers_are_about_16_blocks_or_the_middle_of_what_there_is() -> None:
    assert main_top_k(tiny()) == 16
    few = replace(tiny(), recalls=tuple(r for r in tiny().recalls if r.choice.top_k in (4, 8)), perplexities=())
    assert main_top_k(few) == 8
    assert "top-k 8, catches 86.0 %" in said(few)


def test_the_residents_that_halve_the_misses_lie_on_the_curve() -> None:
    curve = tiny().dynamics[1].curve
    ratio = halving_ratio(curve)
    assert ratio is not None
    assert curve.at(ratio) == pytest.approx(0.09)
    assert f"20 resident blocks halve that, slots for {ratio:.2f} times the free picks" in said(tiny())
    assert halving_ratio(MissCurve((1.0, 2.0), (0.2, 0.15))) is None


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6))
def test_fewer_residents_than_those_that_halve_the_misses_do_not(missed: list[float]) -> None:
    missed = sorted(missed, reverse=True)
    curve = MissCurve(tuple(1.0 + 0.5 * i for i in range(len(missed))), tuple(missed))
    ratio = halving_ratio(curve)
    if ratio is None:
        assert missed[-1] > missed[0] / 2
        return
    assert curve.at(ratio) <= missed[0] / 2 + 1e-9
    if ratio > 1.01:
        assert curve.at(ratio - 0.01) >= missed[0] / 2


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return written(tmp_path)


def _typed(capsys: Capture, *words: str) -> str:
    assert cli.main(["quality", *words]) == 0
    return str(capsys.readouterr().out)


def test_show_prints_tables_of_80_columns_and_the_answers(capsys: Capture, folder: str) -> None:
    text = _typed(capsys, "show", folder)
    assert max(map(len, text.splitlines())) <= 80
    lines = text.splitlines()
    header = lines.index("Recall of the free blocks that sparse chooses, %, by top-k") + 1
    assert lines[header].split()[1:] == [str(k) for k in RECALL_TOP_KS]
    rows = {line[:15].strip(): line[15:].split() for line in lines[header + 2 : header + 2 + len(RECALLS)]}
    assert rows["forecast d=1 x2"] == ["85.0", "87.0", "89.0", "91.0", "93.0"]
    assert rows["sparse"] == ["100.0"] * 5
    shown = [name.split()[0] for name in rows]
    assert shown == sorted(shown, key=list(SELECTORS).index)
    assert "0.058 ±0.004" in text
    assert lines.index("Nats per token over full attention's, with standard errors, by top-k")
    assert [str(k) for k in PPL_TOP_KS] == text.split("by top-k\ntop-k ")[-1].splitlines()[0].split()
    assert "18.0 [9.0-36.0]" in text
    assert all(" ".join(sentence.split()) in " ".join(text.split()) for sentence in answers(tiny()))


def test_show_as_json_holds_the_whole_profile(capsys: Capture, folder: str) -> None:
    data: dict[str, Any] = json.loads(_typed(capsys, "show", folder, "--json"))
    assert (data["command"], data["action"], data["quality"], data["top_k"]) == ("quality", "show", NAME, 16)
    assert data["answers"] == answers(tiny())
    names = QualityProfile.__dataclass_fields__
    assert read(QualityProfile, {n: data[n] for n in names}, where="json") == tiny()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], str]:
    """No quality profile comes with the package; called, the fake one does."""
    shipped = tmp_path / "qualities"
    shipped.mkdir()
    monkeypatch.setattr(quality_module, "SHIPPED", shipped)
    return lambda: written(shipped)


def test_list_names_what_comes_with_the_package(capsys: Capture, package: Callable[[], str]) -> None:
    assert "No quality profile comes with this package. Measure your model" in " ".join(_typed(capsys, "list").split())
    assert json.loads(_typed(capsys, "list", "--json"))["qualities"] == []
    package()
    (found,) = json.loads(_typed(capsys, "list", "--json"))["qualities"]
    assert (found["quality"], found["model"], found["documents"]) == (NAME, "tiny-1b", 4)
    assert NAME in _typed(capsys, "list")


def test_the_first_of_the_package_is_shown_where_none_is_named(capsys: Capture, package: Callable[[], str]) -> None:
    assert cli.main(["quality", "show"]) == 2
    assert "none is named" in capsys.readouterr().err
    package()
    assert _typed(capsys, "show").startswith(f"{NAME}: tiny-1b at 8192 tokens, 128 blocks of 64, 3 of them always")


def test_mistakes_are_one_sentence(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "quality.json").write_text('{"schema": 1, "name": "x"}')
    for words in (["show", "nobody"], ["show", str(tmp_path)], ["measur"], []):
        assert cli.main(["quality", *words]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
