"""``sparda trace`` as a user types it: recorded, shown, fitted, drawn and followed."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparda.calibrate.store import Store
from sparda.engine.dynamics.choices_file import read_choices, write_choices
from sparda.engine.dynamics.residents import miss_counts
from sparda.explore import cli
from tests.engine.made_choices import drifting

Capture = pytest.CaptureFixture[str]

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter: set TRITON_INTERPRET=1"
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder to work in, with a trace of 160 steps."""
    write_choices(tmp_path / "a.choices", drifting(160, noise=0.2, layers=(0, 1, 2), top_k=12))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def one_object(capsys: Capture, *words: str) -> dict[str, Any]:
    assert cli.main(["trace", *words, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["command"], data["action"]) == (1, "trace", words[0])
    return data


def mistake(capsys: Capture, *words: str) -> str:
    assert cli.main(["trace", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    return err


def test_a_trace_is_shown_with_what_slots_would_miss(folder: Path, capsys: Capture) -> None:
    data = one_object(capsys, "show", "a.choices", "--skip", "40")
    choices = read_choices(folder / "a.choices")
    assert data["facts"]["top_k"] == 12
    assert (data["steps"], data["skip"], data["bytes"]) == (160, 40, (folder / "a.choices").stat().st_size)
    assert [(m["times"], m["slots"]) for m in data["misses"]] == [
        (1.0, 12), (1.25, 15), (1.5, 18), (2.0, 24), (3.0, 36), (4.0, 48)
    ]  # fmt: skip
    for row in data["misses"]:
        counts = miss_counts(choices, row["slots"], skip=40, ties="block")
        assert row["share"]["mean"] == pytest.approx(counts.sum() / (120 * 6 * 9))
        assert row["blocks"] == pytest.approx(counts.sum() / (120 * 6))
        assert row["totals"]["1.0"] == counts.sum((1, 2)).max()
        assert row["share"]["low"] <= row["share"]["median"] <= row["share"]["high"]
    assert set(data["overlap"]) == {"1", "2", "4", "8", "16", "32", "64"}
    plain = one_object(capsys, "show", "a.choices", "--skip", "40", "--no-spare")
    assert plain["misses"][0]["share"]["mean"] > data["misses"][0]["share"]["mean"]


def test_the_text_says_the_conditions_and_fits_the_terminal(folder: Path, capsys: Capture) -> None:
    assert cli.main(["trace", "show", "a.choices"]) == 0
    text = capsys.readouterr().out
    assert "a.choices: scores on made, 160 steps, 3 layers, 1 sequence, 2 KV heads, from" in " ".join(text.split())
    assert "The first 40 steps are left out" in " ".join(text.split())
    assert "p99" in text
    assert "slot to spare" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_drawn_trace_is_held_to_the_recorded_one(folder: Path, capsys: Capture) -> None:
    data = one_object(capsys, "generate", "--trace", "a.choices", "--steps", "400", "--out", "new/b.choices")
    assert (data["gap_to"], data["steps"]) == ("trace", 400)
    assert 0 < data["gap"] < 0.02
    drawn = read_choices(folder / "new" / "b.choices")
    assert drawn.facts == read_choices(folder / "new" / "b.choices").facts
    assert drawn.blocks.shape == (400, 3, 2, 12)


def test_parameters_are_fitted_kept_and_drawn_from(folder: Path, capsys: Capture) -> None:
    write_choices(folder / "c.choices", drifting(160, noise=0.3, layers=(0, 1, 2), top_k=12, seed=1))
    fitted = one_object(capsys, "fit", "a.choices", "c.choices", "--out", "p.json")
    assert fitted["files"] == ["a.choices", "c.choices"]
    assert fitted["params"] == json.loads((folder / "p.json").read_text())
    assert 0 < fitted["replaced"] < 0.5
    words = ["generate", "--params", "p.json", "--steps", "300", "--out", "d.choices"]
    size = ["--layers", "5", "--heads", "4", "--batch", "2", "--top-k", "16", "--context", "700", "--local-blocks", "3"]
    data = one_object(capsys, *words, *size)
    assert data["facts"]["context_tokens"] == [700, 700]
    drawn = read_choices(folder / "d.choices")
    assert drawn.blocks.shape == (300, 5, 8, 16)
    assert (drawn.facts.forced, data["gap_to"]) == (5, "params")
    assert data["gap"] < 0.03
    assert cli.main(["trace", *words]) == 0
    assert "percentage points of the fitted ones" in " ".join(capsys.readouterr().out.split())
    assert read_choices(folder / "d.choices").blocks.shape == (300, 3, 1, 12)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "none.choices"], "none.choices: there is no such file"),
        (["show", "text.choices"], "text.choices: is no file of choices"),
        (["show", "a.choices", "--skip", "160"], "160 steps are to be skipped of 160"),
        (["fit", "a.choices", "--skip", "150", "--out", "p.json"], "a fit wants at least 32"),
        (["generate", "--out", "b.choices"], "one of the arguments --params --trace is required"),
        (["generate", "--trace", "a.choices", "--steps", "0", "--out", "b.choices"], "0 steps are to be generated"),
        (["generate", "--trace", "a.choices", "--top-k", "3", "--out", "b.choices"], "has no free pick"),
        (["generate", "--trace", "a.choices", "--layers", "0", "--out", "b.choices"], "give at least one of each"),
        (["run", "a.choices", "--set", "grid.batch=1"], "trace run takes config.…, workload.… and model"),
        (["run", "a.choices", "--repeats", "0"], "--repeats 0: give at least 0 and 1 steps"),
        (["run", "text.json"], "text.json: not valid JSON"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_a_mistake_is_one_sentence(folder: Path, capsys: Capture, words: list[str], said: str) -> None:
    (folder / "text.choices").write_text("hello")
    (folder / "text.json").write_text("hello")
    assert said in mistake(capsys, *words)
    assert not (folder / "b.choices").exists()


def test_following_a_trace_needs_a_gpu(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="says what the engine lacks")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "trace run measures on a CUDA GPU and none is visible" in mistake(capsys, "run", "a.choices")


def _on_no_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU that is not; returns the traces that decoders were given."""
    pytest.importorskip("triton", reason="measuring needs torch and triton")
    from sparda.calibrate.measure import selection
    from sparda.engine.replay import replay_trace
    from tests.calibrate.measure_fakes import install

    install(monkeypatch)
    made: list[Any] = []
    known: Callable[..., Any] = replay_trace

    def replay(*case: Any, **given: Any) -> Any:
        made.append(known(*case, **{**given, "device": "cpu"}))
        return made[-1]

    monkeypatch.setattr(selection, "replay_trace", replay)
    return made


SMALL = ["--set", "model=four layers", "--set", "workload.batch=2", "--set", "workload.context_tokens=8192"]
FEW = [*SMALL, "--set", "config.top_k=64", "--warmup", "10", "--repeats", "5"]


def test_a_trace_of_another_case_is_drawn_anew_and_followed(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _on_no_gpu(monkeypatch)
    data = one_object(capsys, "run", "a.choices", *FEW, "--out", "rows")
    assert (data["followed"], len(data["samples_us"])) == ("generated", 5)
    assert made[0].steps == 1 + 10 + 5
    row = Store(folder / "rows").rows("trace")[0]
    assert (row.op, row.case["trace"], row.case["followed"], row.case["batch"]) == (
        "sparda",
        "a.choices",
        "generated",
        2,
    )
    assert row.values["foretold_per_layer"] == pytest.approx(data["foretold_per_layer"])
    assert row.values["misses_per_layer"] == data["misses_per_layer"]
    assert 0 < data["foretold_per_layer"] < 2 * 2 * 30
    assert cli.main(["trace", "run", "a.choices", *FEW]) == 0
    text = capsys.readouterr().out
    assert "the trace was generated" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_a_trace_of_the_very_case_is_replayed(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _on_no_gpu(monkeypatch)
    words = ["--steps", "16", "--layers", "4", "--heads", "2", "--batch", "2", "--top-k", "64", "--context", "8192"]
    draw = ["generate", "--trace", "e.choices", *words, "--out", "f.choices", "--local-blocks", "32"]
    write_choices(folder / "e.choices", drifting(160, noise=0.2, layers=(0, 1), block=64, top_k=12))
    one_object(capsys, *draw)
    data = one_object(capsys, "run", "f.choices", *FEW)
    assert (data["followed"], data["out"]) == ("replayed", None)
    choices = read_choices(folder / "f.choices")
    assert data["foretold_per_layer"] == pytest.approx(miss_counts(choices, 64, skip=11)[:, 1:].sum(2).mean())
    assert made[0].scores[0, 1, 0].nonzero().flatten().tolist() == choices.blocks[0, 0, 2].tolist()
    assert "goes on for 16 steps and 26 are decoded" in mistake(capsys, "run", "f.choices", *FEW, "--warmup", "20")
    assert "policy dense chooses no blocks" in mistake(capsys, "run", "f.choices", *FEW, "--set", "config.policy=dense")


def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of random weights, whatever its path."""
    torch = pytest.importorskip("torch", reason="the engine needs torch")
    from sparda.engine.shapes import ModelShape
    from sparda.engine.weights import random_weights

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shape = ModelShape("tiny", layers=2, d_model=32, heads=2, kv_heads=1, head_dim=16, ffn=32, vocab=26)
    fakes: dict[str, dict[str, Callable[..., Any]]] = {
        "checkpoint": {"load_checkpoint": lambda path, **given: random_weights(shape, given["device"], seed=1)},
        "gguf_file": {"load_gguf": lambda path, **given: None},
        "tokenizer": {"tokenizer_of": lambda _path: None, "end_tokens": lambda _path: ()},
    }
    for name, functions in fakes.items():
        module: Any = types.ModuleType(f"sparda.engine.{name}")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, f"sparda.engine.{name}", module)


@interpreted
def test_prompts_are_decoded_and_their_choices_kept(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(monkeypatch)
    words = ["record", "--checkpoint", ".", "--max-new", "3", "--token-ids", "1,2,3", "--token-ids", "4,5"]
    data = one_object(capsys, *words, "--note", "two short ones", "--out", "r.choices")
    assert (data["decoded"], data["steps"], data["facts"]["context_tokens"]) == (6, 2, [3, 2])
    recorded = read_choices(folder / "r.choices")
    assert (recorded.facts.model, recorded.facts.conditions) == ("tiny", "two short ones")
    assert recorded.blocks[..., 0].tolist() == [[[0, 0]] * 2] * 2, "so short a context has one block"
    assert "no prompt is given" in mistake(capsys, "record", "--checkpoint", ".", "--out", "r.choices")
    assert "--out . is a folder" in mistake(capsys, *words, "--out", ".")
    one_token = ["record", "--checkpoint", ".", "--max-new", "1", "--token-ids", "1", "--out", "s.choices"]
    assert cli.main(["trace", *one_token]) == 2
    assert "sparda: no step was recorded; decode at least one token" in capsys.readouterr().err


@interpreted
def test_an_interrupted_recording_keeps_what_was_chosen(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(monkeypatch)
    from sparda.engine.batch import Batch

    taken, step = iter(range(2)), Batch.step

    def interrupted(batch: Batch) -> list[tuple[int, int]]:
        if next(taken, None) is None:
            raise KeyboardInterrupt
        return step(batch)

    monkeypatch.setattr(Batch, "step", interrupted)
    longer = ["record", "--checkpoint", ".", "--max-new", "9", "--token-ids", "1,2,3", "--out", "cut.choices"]
    assert cli.main(["trace", *longer]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert read_choices(folder / "cut.choices").steps == 2, "what was chosen before is there"
