"""Losses that a choice adds, their error, and answers to questions."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="measuring quality needs torch")

import numpy as np

from sparda.calibrate.measure.quality.perplexity import bootstrap_error, perplexity_row, run_means
from sparda.calibrate.measure.quality.retrieved import Case, Trial, retrieval_rows, trial
from sparda.calibrate.measure.quality.window import read_prefix, run_window
from sparda.calibrate.quality import Choice
from sparda.engine.errors import SpardaError
from tests.calibrate.quality_models import SPEC, TOKENS, WINDOW, FakeCase, ids, materials, prefix, weights

START = TOKENS - WINDOW


def asked(begin: int, end: int, seed: int = 0, depth: float = 0.5) -> Case:
    return FakeCase(ids(seed), ((begin, end),), depth=depth)


def test_run_means_are_means_of_consecutive_tokens() -> None:
    text = ids(0, 260)
    short = prefix().upto(60)
    nats = run_window(weights(), SPEC, short, text[60:], lambda view: None).nats.double()
    found = run_means(weights(), SPEC, short, text[60:], None, materials())
    assert found == pytest.approx([float(nats[:64].mean()), float(nats[64:128].mean()), float(nats[128:].mean())])


def test_a_choice_of_all_blocks_adds_nothing() -> None:
    dense = run_means(weights(), SPEC, prefix(), ids()[START:], None, materials())
    sparse = run_means(weights(), SPEC, prefix(), ids()[START:], Choice("sparse", 19), materials())
    assert sparse == pytest.approx(dense, abs=1e-5)


def test_a_row_is_the_mean_over_documents_of_what_each_adds() -> None:
    row = perplexity_row(Choice("sparse", 8), {"a": [1.0, 2.0], "b": [3.0]}, {"a": [1.5, 2.1], "b": [3.1]})
    assert row.documents == pytest.approx({"a": 0.3, "b": 0.1})
    assert row.nats == pytest.approx(0.2)


def test_the_error_of_one_document_is_that_of_its_runs() -> None:
    runs = np.random.default_rng(1).normal(0.1, 0.02, 400)
    assert bootstrap_error([runs]) == pytest.approx(0.02 / 20, rel=0.1)
    assert bootstrap_error([runs]) == bootstrap_error([runs])


def test_documents_that_differ_widen_the_error() -> None:
    generator = np.random.default_rng(2)
    alike = [generator.normal(0.1, 0.01, 16) for _ in range(8)]
    apart = [runs + shift for runs, shift in zip(alike, np.linspace(-0.2, 0.2, 8), strict=True)]
    assert bootstrap_error(apart) > 5 * bootstrap_error(alike)
    assert bootstrap_error(apart) == pytest.approx(float(np.std(np.linspace(-0.2, 0.2, 8))) / 8**0.5, rel=0.15)


def test_an_answer_is_found_where_each_of_its_tokens_is_the_likeliest() -> None:
    read = read_prefix(weights(), ids()[:100])
    dense = run_window(weights(), SPEC, read, ids()[100:140], lambda view: None)
    likely = int(dense.likeliest.int().argmax()) if bool(dense.likeliest.any()) else None
    done = trial(weights(), SPEC, asked(130, 134), [Choice("sparse", 6), Choice("infinigen", 6, 1)], materials(), 20)
    assert done.dense.nats == pytest.approx(float(dense.nats[29:33].mean()), abs=1e-4)
    assert done.dense.found == bool(dense.likeliest[29:33].all())
    if likely is not None:
        one = trial(weights(), SPEC, asked(101 + likely, 102 + likely), [], materials(), 20)
        assert one.dense.found


def test_of_an_answer_in_pieces_what_stands_between_them_is_given_and_not_asked_for() -> None:
    read = read_prefix(weights(), ids()[:100])
    dense = run_window(weights(), SPEC, read, ids()[100:140], lambda view: None)
    done = trial(weights(), SPEC, FakeCase(ids(), ((130, 132), (135, 136))), [], materials(), 20)
    assert done.dense.nats == pytest.approx(float(dense.nats[[29, 30, 34]].mean()), abs=1e-4)


def test_only_tokens_after_the_dense_prefix_run_under_the_choice() -> None:
    few = Choice("forced", 6)
    near = trial(weights(), SPEC, asked(140, 143), [few], materials(), 1)
    far = trial(weights(), SPEC, asked(140, 143), [few], materials(), 60)
    assert near.dense.nats == pytest.approx(far.dense.nats, abs=1e-4)
    assert near.answers[0].nats != pytest.approx(far.answers[0].nats, abs=1e-6)


def test_rows_of_retrieval_are_by_depth_and_over_all_depths() -> None:
    choices = [Choice("sparse", 6), Choice("recency", 6)]
    done: list[Trial] = [
        trial(weights(), SPEC, asked(140, 143, seed, depth), choices, materials(), 20)
        for seed, depth in ((0, 0.0), (1, 0.0), (2, 1.0))
    ]
    rows = retrieval_rows(done)
    assert len(rows) == 2 * 3
    every = next(r for r in rows if r.choice == choices[0] and r.depth == -1)
    assert every.trials == 3
    assert every.context_tokens == TOKENS
    assert every.nats == pytest.approx(np.mean([t.answers[0].nats for t in done]))
    assert next(r for r in rows if r.depth == 0.0).trials == 2


@pytest.mark.parametrize(("begin", "end"), [(0, 3), (90, 90), (200, 210)])
def test_a_case_without_an_answer_inside_it_is_refused(begin: int, end: int) -> None:
    with pytest.raises(SpardaError, match="must be inside the prompt"):
        trial(weights(), SPEC, asked(begin, end), [], materials())
