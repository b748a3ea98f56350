"""Retrieval tasks: where facts and answers stand in a case, its length, and cases kept in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="text is tokenized with the tokenizers package")

from sparda.calibrate.measure.quality import retrieval
from sparda.calibrate.measure.quality.documents import (
    Document,
    Documents,
    encode,
    read_arrays,
    vocabulary_sha256,
    write_arrays,
)
from sparda.calibrate.measure.quality.retrieval import DISTRACTORS, Case, Maker, planned, read, write
from sparda.calibrate.measure.quality.wordings import WORDINGS, wording
from sparda.engine.errors import SpardaError
from tests.calibrate.small_tokenizer import small_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER: Tokenizer = small_tokenizer()
CONTEXT = 3000
NAMES = [w.name for w in WORDINGS]


def document(name: str, lines: int = 300, role: str = "eval") -> Document:
    return Document(name, role, "novel", encode(f"the {name} sat on a cat\n" * lines, TOKENIZER, np.uint16))


def documents(*found: Document) -> Documents:
    return Documents(found or (document("one"), document("two")), vocabulary_sha256(TOKENIZER))


MAKER = Maker(documents(), TOKENIZER)


def text(case: Case, span: tuple[int, int]) -> str:
    return str(TOKENIZER.decode(case.ids[slice(*span)].tolist()))


@given(name=st.sampled_from(NAMES), depth=st.floats(0, 1), seed=st.integers(0, 99), context=st.integers(2500, 3500))
def test_a_case_is_as_long_as_asked_and_ends_in_its_answer(name: str, depth: float, seed: int, context: int) -> None:
    case = MAKER.case(wording(name), context, depth, seed)
    assert len(case.ids) == case.context == context
    assert case.answers[-1][1] == context
    value = text(case, case.answers[-1])
    assert value.isdigit()
    assert len(value) == 5
    assert case.scored.tolist() == [p for a, b in case.answers for p in range(a, b)]


@given(name=st.sampled_from(NAMES), depth=st.floats(0, 1), seed=st.integers(0, 99))
def test_the_facts_stand_where_the_case_says_and_hold_the_answers(name: str, depth: float, seed: int) -> None:
    case = MAKER.case(wording(name), CONTEXT, depth, seed)
    facts = [text(case, span) for span in case.facts]
    assert len(facts) == len(wording(name).links)
    assert text(case, case.answers[-1]) in facts[-1]
    assert text(case, case.answers[0]).strip() in facts[0 if len(case.answers) > 1 else -1]
    assert all(fact.startswith("\n") and fact.endswith("\n") for fact in facts)


def test_what_is_asked_for_is_what_the_chain_leads_to() -> None:
    case = MAKER.case(wording("variable"), CONTEXT, 0.1, 3)
    first, second = (text(case, span).strip() for span in case.facts)
    key, middle = first.split(" = ")
    assert second == f"{middle} = {text(case, case.answers[1])}"
    ending = text(case, (case.answers[0][0] - 20, CONTEXT))
    assert ending.endswith(f"\n{key} = {middle}\n{second}")


@pytest.mark.parametrize("name", NAMES)
def test_facts_of_the_same_form_with_other_answers_stand_elsewhere(name: str) -> None:
    case = MAKER.case(wording(name), CONTEXT, 0.5, 0)
    whole, lead = text(case, (0, CONTEXT)), {"passkey": "\nThe pass key of ", "variable": " = "}
    form = lead.get(name.removesuffix("-plain"), "\nThe pilot of the ")
    body = whole[: whole.rindex("\n" if name != "pilot" else "\nWhat is")]
    assert body.count(form) >= (1 + DISTRACTORS) * (2 if name == "variable" else 1)


@given(depth=st.floats(0, 1), seed=st.integers(0, 20))
def test_a_fact_is_put_at_its_depth_to_within_a_line(depth: float, seed: int) -> None:
    case = MAKER.case(wording("passkey"), CONTEXT, depth, seed)
    line, rest = 30, 900
    # The question and what other facts there may be before this one take tokens that are not of the text around.
    assert depth * (CONTEXT - rest) - line <= case.facts[0][0] <= depth * CONTEXT + rest


def test_depths_from_beginning_to_end_move_the_fact_from_beginning_to_end() -> None:
    places = [MAKER.case(wording("passkey"), CONTEXT, d, 0).facts[0][0] for d in (0, 0.25, 0.5, 0.75, 1)]
    assert places == sorted(places)
    assert places[-1] > CONTEXT / 2


def test_the_second_of_two_links_stands_far_from_the_first_on_either_side() -> None:
    for depth in (0.1, 0.5, 0.9):
        first, second = MAKER.case(wording("variable"), CONTEXT, depth, 1).facts
        assert abs(first[0] - second[0]) > CONTEXT / 4
        assert (second > first) == (depth < 0.5)


def test_the_same_arguments_make_the_same_case_and_another_seed_another() -> None:
    one, two = (Maker(documents(), TOKENIZER).case(wording("pilot"), CONTEXT, 0.5, 7) for _ in range(2))
    assert one.ids.tolist() == two.ids.tolist()
    assert one.ids.tolist() != MAKER.case(wording("pilot"), CONTEXT, 0.5, 8).ids.tolist()


@given(name=st.sampled_from(NAMES), seed=st.integers(0, 999))
def test_no_two_chains_share_a_key_a_middle_or_a_value(name: str, seed: int) -> None:
    chains = wording(name).chains(4, np.random.default_rng(seed))
    for field in ("key", "value", *(["middle"] if wording(name).middles else [])):
        assert len({c[field] for c in chains}) == 4


def test_cases_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    cases = [MAKER.case(w, context, 0.5, 0) for w in WORDINGS for context in (2500, CONTEXT)]
    write(tmp_path / "cases.npz", cases, MAKER.tokenizer_sha256)
    found, sha256 = read(tmp_path / "cases.npz")
    assert sha256 == vocabulary_sha256(TOKENIZER)
    for before, after in zip(cases, found, strict=True):
        assert before.ids.tolist() == after.ids.tolist()
        for name in ("task", "wording", "context", "depth", "seed", "filler", "answers", "facts"):
            assert getattr(before, name) == getattr(after, name)


def test_a_file_of_cases_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cases.npz"
    write(path, [MAKER.case(wording("passkey"), CONTEXT, 0.5, 0)], "abc")
    header, arrays = read_arrays(path, ("ids",), retrieval.SCHEMA)
    write_arrays(path, header, {"ids": arrays["ids"] + np.uint32(1)})
    with pytest.raises(SpardaError, match="do not have the hash"):
        read(path)
    header["cases"][0].pop("seed")
    write_arrays(path, header, arrays)
    with pytest.raises(SpardaError, match="damaged"):
        read(path)


@pytest.mark.parametrize("depth", [-0.1, 1.1, float("nan")])
def test_a_depth_outside_the_text_is_refused(depth: float) -> None:
    with pytest.raises(SpardaError, match="a depth of"):
        MAKER.case(wording("passkey"), CONTEXT, depth, 0)


@pytest.mark.parametrize("context", [10, 1_000_000])
def test_a_context_that_cannot_be_filled_is_refused(context: int) -> None:
    with pytest.raises(SpardaError, match="tokens of text are wanted around the facts"):
        MAKER.case(wording("passkey"), context, 0.5, 0)


def test_a_maker_wants_documents_of_its_role_and_its_own_tokenizer() -> None:
    with pytest.raises(SpardaError, match="no document of role 'train'"):
        Maker(documents(), TOKENIZER, "train")
    other = small_tokenizer()
    other.add_tokens(["zebra"])
    with pytest.raises(SpardaError, match="another tokenizer"):
        Maker(documents(), other)


def test_an_unknown_wording_is_told_the_known_ones() -> None:
    with pytest.raises(SpardaError, match="wording 'riddle'; there are passkey"):
        wording("riddle")


def test_the_plan_has_every_context_and_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "PLAN", {"needle": ((2500, 2600), (0.0, 1.0)), "multihop": ((2700,), (0.5,))})
    cases = planned(MAKER, [wording("passkey"), wording("pilot")], trials=2)
    assert [(c.context, c.depth, c.seed) for c in cases] == [
        (2500, 0.0, 0), (2500, 0.0, 1), (2500, 1.0, 0), (2500, 1.0, 1),
        (2600, 0.0, 0), (2600, 0.0, 1), (2600, 1.0, 0), (2600, 1.0, 1),
        (2700, 0.5, 0), (2700, 0.5, 1),
    ]  # fmt: skip


def test_the_command_writes_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparda.calibrate.measure.quality.documents import write as write_documents

    monkeypatch.setattr(retrieval, "PLAN", {"needle": ((2500,), (0.5,))})
    write_documents(tmp_path / "tokens.npz", documents())
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    command = [str(tmp_path / name) for name in ("tokens.npz", "tokenizer.json", "cases.npz")]
    assert retrieval.main([*command, "--wording", "passkey", "--trials", "3", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["cases"]
    assert (row["context"], row["cases"]) == (2500, 3)
    assert len(read(tmp_path / "cases.npz")[0]) == 3
    assert retrieval.main([*command, "--wording", "riddle"]) == 2
    assert "there are passkey" in capsys.readouterr().err
