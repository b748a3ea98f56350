"""`sparda measure --dry-run`: what would be measured, without a GPU and without a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the parts of a session need torch and triton, but no GPU")

import torch

from sparda.calibrate.measure import run
from sparda.calibrate.measure.parts import Case
from sparda.calibrate.store import Row, Store
from sparda.engine.shapes import MODELS
from sparda.explore import cli
from sparda.explore.cli import measure

Capture = pytest.CaptureFixture[str]
SHAPE = MODELS[run.MODEL]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def dry_run(capsys: Capture, out: Path, *words: str) -> dict[str, Any]:
    assert cli.main(["measure", "--dry-run", "--out", str(out), *words, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def kept(case: Case) -> Row:
    return Row(case.kind, case.op, "s1", "made up", case.conditions, (1.0,))


def test_a_dry_run_counts_every_part_and_writes_nothing(capsys: Capture, tmp_path: Path) -> None:
    data = dry_run(capsys, tmp_path / "new")
    assert [p["name"] for p in data["parts"]] == list(measure.PARTS)
    assert all(p["left"] == p["cases"] for p in data["parts"])
    assert [p["name"] for p in data["parts"] if not p["cases"]] == ["traces"], "files, not rows"
    assert (data["cut"], data["gpu_memory_gib"]) == ([], None)
    assert data["seconds"] == pytest.approx(data["setup_s"] + sum(p["seconds"] for p in data["parts"]), abs=0.5)
    assert not (tmp_path / "new").exists()


def test_a_dry_run_counts_what_is_left_and_judges_memory_by_the_gpu_that_measured_there(
    capsys: Capture, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    store.add_session("s1", {"gpu": "NVIDIA None", "gpu_memory_bytes": 100 << 30, "model": run.MODEL})
    cases = list(run.PARTS["kernels"].cases(SHAPE))
    store.append("kernel", [kept(c) for c in cases[:100]])
    data = dry_run(capsys, tmp_path, "--parts", "kernels,policies")
    kernels, policies = data["parts"]
    assert (kernels["measured"], kernels["left"]) == (100, len(cases) - 100)
    assert data["gpu_memory_gib"] == 100.0
    assert any("100 GiB are there" in reason for reason in policies["too_big"])
    assert policies["left"] < policies["cases"]


def test_a_dry_run_says_which_parts_the_budget_cuts(capsys: Capture, tmp_path: Path) -> None:
    assert dry_run(capsys, tmp_path, "--budget", "100")["cut"] == [p for p in measure.PARTS[1:] if p != "traces"]
    assert cli.main(["measure", "--dry-run", "--out", str(tmp_path), "--budget", "100"]) == 0
    text = capsys.readouterr().out
    assert "The budget does not cover all: kernels cut short, corun not begun" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_store_of_another_model_is_refused(capsys: Capture, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_session("s1", {"gpu": "NVIDIA None", "model": "another-7b"})
    store.append("link", [kept(next(iter(run.PARTS["link"].cases(SHAPE))))])
    assert cli.main(["measure", "--dry-run", "--out", str(tmp_path)]) == 2
    assert "holds measurements of another-7b" in capsys.readouterr().err


def test_progress_goes_to_a_terminal_only(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fake(out: Path, budget_s: float, parts: object, model: str, each: Any) -> dict[str, object]:
        each(1, 2)
        each(2, 2)
        return {"ended": "complete"}

    monkeypatch.setattr(run, "main_measure", fake)
    measure.measured(tmp_path, 1.0, [])
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    measure.measured(tmp_path, 1.0, [])
    out, err = capsys.readouterr()
    assert (out, "cases: 2 of 2" in err) == ("", True)
