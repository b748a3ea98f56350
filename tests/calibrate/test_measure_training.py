"""What training a Forecast takes, measured on a GPU that is not, whose clock only the work itself moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="measuring needs torch and triton")

import torch

from sparda.calibrate.measure import bench, training
from sparda.calibrate.measure.run import PARTS, estimate_measure, main_measure
from sparda.calibrate.measure.training import LENGTHS, STEPS, cases
from sparda.calibrate.store import Row, Store
from sparda.engine.shapes import MODELS, ModelShape
from sparda.engine.weights import random_weights
from tests.calibrate.measure_fakes import SHAPE, Gpu, install
from tests.calibrate.training_fakes import PEAK_GIB, STEP_S, TEACH_S, WALK_S, Work, install_training

TINY = ModelShape(
    "tiny", layers=3, d_model=32, heads=2, kv_heads=1, head_dim=16, ffn=32, vocab=100, max_context=512, value_bytes=4
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return install(monkeypatch)


@pytest.fixture
def work(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Work:
    made = install_training(monkeypatch)
    clock = SimpleNamespace(monotonic=lambda: made.now, perf_counter=lambda: made.now)
    monkeypatch.setattr(bench, "time", clock)
    monkeypatch.setattr(training, "time", clock)
    return made


def measured(folder: Path, budget_s: float = 6000.0, model: str = SHAPE.name) -> list[Row]:
    """Rows of a session whose length is what the work took."""
    main_measure(folder, budget_s, ["training"], model)
    return Store(folder).rows()


def ended(folder: Path) -> list[object]:
    return [p["ended"] for p in Store(folder).provenance.values()]


def test_every_length_leaves_a_row(work: Work, tmp_path: Path) -> None:
    rows = measured(tmp_path)
    assert [(r.kind, r.op, r.case["tokens"]) for r in rows] == [("training", "forecast", n) for n in LENGTHS]
    assert [len(text) for text in work.texts] == list(LENGTHS)
    for row in rows:
        assert row.case == {
            "tokens": row.case["tokens"], "lookahead": 1, "heads": 1, "top_k": 96, "sequences": 1,
        }  # fmt: skip
        assert row.complete
    assert ended(tmp_path) == ["complete"]


def test_the_step_that_compiles_is_not_timed_and_the_median_of_the_others_is_told(work: Work, tmp_path: Path) -> None:
    for row in measured(tmp_path):
        assert row.samples_us == pytest.approx([1e6 * STEP_S[step] for step in range(2, 2 + STEPS)])
        assert row.values["seconds_per_step"] == pytest.approx(20.0)


def test_walk_teacher_and_peak_of_memory_are_told_apart(work: Work, tmp_path: Path) -> None:
    for row in measured(tmp_path):
        assert row.values["walk_s"] == pytest.approx(WALK_S)
        assert row.values["teacher_s"] == pytest.approx(WALK_S + TEACH_S)
        assert row.values["peak_gib"] == PEAK_GIB


def test_a_text_has_tokens_that_the_model_knows_and_is_drawn_by_the_seed(work: Work, tmp_path: Path) -> None:
    measured(tmp_path / "one")
    measured(tmp_path / "two")
    one, two = work.texts[: len(LENGTHS)], work.texts[len(LENGTHS) :]
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert all(0 <= int(text.min()) <= int(text.max()) < SHAPE.vocab for text in one)


def test_a_spent_budget_keeps_what_is_there_and_the_next_session_measures_the_rest(
    work: Work, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = measured(tmp_path, budget_s=200.0)
    assert [r.case["tokens"] for r in rows] == list(LENGTHS[:2])
    assert "run the same command again" in capsys.readouterr().err
    rows = measured(tmp_path)
    assert [r.case["tokens"] for r in rows] == list(LENGTHS)
    assert [len(text) for text in work.texts] == list(LENGTHS)
    assert ended(tmp_path) == ["budget spent", "complete"]
    measured(tmp_path)
    assert len(work.texts) == len(LENGTHS)


def test_a_failed_length_leaves_no_row_and_those_before_it_stay(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        if len(given[-1][0]) == LENGTHS[1]:  # type: ignore[index]
            raise RuntimeError("out of memory")
        return work.trainer(*given)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(training, "Trainer", fail)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: PEAK_GIB << 30)
    with pytest.raises(RuntimeError):
        measured(tmp_path)
    assert [r.case["tokens"] for r in Store(tmp_path).rows()] == [LENGTHS[0]]
    assert ended(tmp_path) == ["failed"]


def test_the_cases_are_listed_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = estimate_measure(tmp_path, 600.0, ["training"])
    (part,) = found.parts
    assert (part.name, part.cases, part.left, part.measured, part.too_big) == ("training", len(LENGTHS), 3, 0, ())
    assert part.seconds == pytest.approx(PARTS["training"].seconds_per_case * len(LENGTHS))
    assert not list(tmp_path.iterdir())


def test_rows_that_are_there_are_not_estimated_again(work: Work, tmp_path: Path) -> None:
    measured(tmp_path, budget_s=200.0)
    (part,) = estimate_measure(tmp_path, 600.0, ["training"], SHAPE.name).parts
    assert (part.measured, part.left) == (2, 1)


def test_no_longer_text_is_trained_on_than_the_model_takes() -> None:
    short = replace(MODELS["minicpm4.1-8b"], max_context=LENGTHS[1])
    assert [case.conditions["tokens"] for case in cases(short)] == list(LENGTHS[:2])
    assert not list(cases(replace(short, max_context=LENGTHS[0] - 1)))


def test_a_real_training_of_a_tiny_model_is_measured(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setitem(MODELS, TINY.name, TINY)
    monkeypatch.setattr(training, "LENGTHS", (160,))
    monkeypatch.setattr(bench, "random_weights", random_weights)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 1 << 30)
    (row,) = measured(tmp_path, model=TINY.name)
    assert (row.case["tokens"], len(row.samples_us)) == (160, STEPS)
    assert min(row.samples_us) > 0
    assert row.values["walk_s"] > 0
    assert row.values["teacher_s"] > 0
    assert row.values["peak_gib"] == 1.0
