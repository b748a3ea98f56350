"""What ``sparda doctor`` finds, what it says works without a GPU, and what measuring says where it cannot."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from sparda.explore import cli

Capture = pytest.CaptureFixture[str]
NO_CUDA = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))


def found(capsys: Capture) -> dict[str, Any]:
    assert cli.main(["doctor", "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    data = found(capsys)
    assert (data["can_measure"], data["can_train"]) == (False, False)
    assert {c["name"] for c in data["checks"] if c["state"] == "missing"} >= {"torch", "triton", "gpu"}
    assert cli.main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "sparda[engine]" in text
    assert "generate --prompt, quality measure --text: pip install 'sparda[tokenizer]'" in text
    assert "Not ready: quality measure, quality train (they need torch and triton)." in text


def test_doctor_says_what_works_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    monkeypatch.setattr("sparda.explore.cli.doctor.version", lambda _name: "2.0+cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    data = found(capsys)
    assert (data["can_simulate"], data["can_measure"], data["can_train"]) == (True, False, True)
    assert next(c for c in data["checks"] if c["name"] == "torch")["state"] == "warning"
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert (
        "Ready: machines, simulate, explain, explore, table, policies, published, report, demo, evidence"
        in " ".join(text.split())
    )
    assert "Not ready: measure, validate" in text
    assert "Ready: quality measure, quality train." in text
    assert max(map(len, text.splitlines())) <= 80


def test_doctor_lists_gpus(monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1, 143771, 5, 16'\n")
    tool.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _name: str(tool))
    checks = {c["name"]: c["found"] for c in found(capsys)["checks"]}
    assert checks["gpu 0"] == "NVIDIA H200, 143771 MiB, driver 570.1, PCIe 5 x16"


def mistake(capsys: Capture, words: list[str]) -> str:
    assert cli.main(words) == 2
    return capsys.readouterr().err


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", NO_CUDA)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())


@pytest.mark.parametrize("words", [["measure", "--out", "x"], ["validate"]])
def test_measuring_needs_a_gpu(no_gpu: None, capsys: Capture, words: list[str]) -> None:
    assert "CUDA GPU and none is visible" in mistake(capsys, words)


@pytest.mark.parametrize("words", [["measure", "--out", "x"], ["validate"]])
def test_measuring_needs_torch(monkeypatch: pytest.MonkeyPatch, capsys: Capture, words: list[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert "pip install 'sparda[engine]'" in mistake(capsys, words)
