"""`sparda profile new`, on a GPU that is not: measured, fitted and judged in one go, and gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="measuring needs torch and triton")

import torch

from sparda.calibrate.profile import load_profile
from sparda.calibrate.store import Store
from sparda.explore import cli
from tests.calibrate.measure_fakes import SHAPE, install

Capture = pytest.CaptureFixture[str]
NEEDED = ["link", "kernels", "corun", "steps", "paths", "pathsteps"]


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


def new(capsys: Capture, out: Path, *words: str) -> dict[str, Any]:
    assert cli.main(["profile", "new", str(out), "--model", SHAPE.name, *words, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_a_dry_run_names_the_parts_that_a_profile_needs_and_writes_nothing(capsys: Capture, tmp_path: Path) -> None:
    data = new(capsys, tmp_path / "x", "--dry-run")
    assert [p["name"] for p in data["parts"]] == NEEDED
    assert not (tmp_path / "x").exists()


def test_one_command_measures_and_fits_and_typed_again_measures_nothing(capsys: Capture, tmp_path: Path) -> None:
    out = tmp_path / "none.measured"
    data = new(capsys, out, "--name", "none")
    assert (data["ended"], data["left"], data["profile"], data["throttled_rows"]) == ("complete", 0, "none", 0)
    assert set(data["rows"]) == {"link", "kernel", "corun", "step"}
    made = load_profile(str(out))
    assert (made.name, made.model) == ("none", SHAPE.name)
    assert made.band.count + made.judged.by_host.count == data["rows"]["step"], "every step judges one band"
    assert made.judged.by_host.count > 0
    rows = Store(out).rows()
    capsys.readouterr()
    assert cli.main(["profile", "new", str(out), "--model", SHAPE.name]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Held-out steps: {made.band.count}" in said
    assert "kernel alone" in said, "the error table is part of the answer"
    assert f"sparda measure --out {out} --parts policies,residency" in said
    assert Store(out).rows() == rows


def test_a_spent_budget_leaves_no_profile_and_says_how_much_is_left(capsys: Capture, tmp_path: Path) -> None:
    everything = new(capsys, tmp_path, "--dry-run")["left"]
    data = new(capsys, tmp_path, "--budget", "0.000001")
    assert (data["ended"], data["profile"], data["left"]) == ("budget spent", None, everything)
    assert not (tmp_path / "profile.json").exists()


def test_without_a_gpu_only_the_dry_run_answers(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert new(capsys, tmp_path / "x", "--dry-run")["gpu_memory_gib"] is None
    assert cli.main(["profile", "new", str(tmp_path / "x"), "--model", SHAPE.name]) == 2
    assert "measures on a CUDA GPU and none is visible" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_an_unknown_model_is_named(capsys: Capture, tmp_path: Path) -> None:
    assert cli.main(["profile", "new", str(tmp_path / "x"), "--model", "none-7b"]) == 2
    assert "unknown model" in capsys.readouterr().err
