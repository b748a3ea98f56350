"""``sparda quality measure`` as a user types it, on a tiny model: alone, after a training, and as `show` reads it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="measuring needs torch")
pytest.importorskip("triton", reason="the engine's kernels need triton")

from sparda.calibrate.measure.quality import retrieval
from sparda.calibrate.quality import FILE, SELECTORS, load_quality
from sparda.engine.checkpoint import write_checkpoint
from sparda.engine.weights import random_weights
from sparda.explore import cli
from tests.explore.tiny_checkpoint import (
    MISTAKES,
    SHAPE,
    Capture,
    document,
    mistake,
    one_object,
    options,
    printed,
    write_model,
)

pytestmark = pytest.mark.usefixtures("here")

MEASURE = ["quality", "measure", "--checkpoint", "model", "--tokens", "tokens.npz", "--out", "out", "--context", "512"]
FEW = options(MEASURE, parts="recall", selectors="sparse,recency")
TRAIN = ["quality", "train", "--checkpoint", "model", "--tokens", "tokens.npz", "--out", "trained", "--context", "256"]
TRAIN += ["--top-k", "4", "--steps", "1", "--batch", "1", "--dtype", "float32", "--lookahead", "1,2"]


def chosen_by(data: dict[str, Any], part: str) -> set[str]:
    """Selectors of a part's rows."""
    return {row["choice"]["selector"] for row in data[part]}


def test_what_is_measured_is_written_and_shown_as_it_was_printed(here: Path, capsys: Capture) -> None:
    text = printed(capsys, MEASURE)
    assert max(map(len, text.splitlines())) <= 80
    assert "model.measured" in text
    profile = load_quality(str(here / "out"))
    assert (profile.name, profile.context_tokens, len(profile.documents)) == ("model.measured", 512, 2)
    assert printed(capsys, ["quality", "show", "out"]) == text
    assert printed(capsys, ["quality", "show", f"out/{FILE}"]) == text


def test_json_is_one_object_and_that_of_show(capsys: Capture) -> None:
    data, err = one_object(capsys, MEASURE)
    assert "to measure: about " in err
    shown, _ = one_object(capsys, ["quality", "show", "out"])
    assert (data.pop("action"), shown.pop("action"), data.pop("out")) == ("measure", "show", "out")
    assert data == shown
    assert data["quality"] == "model.measured"
    assert data["answers"]
    # Without a Forecast and a scorer all the others are tried.
    assert chosen_by(data, "recalls") == set(SELECTORS) - {"forecast", "shallow"}
    assert {r["choice"]["top_k"] for r in data["recalls"]} == {4}
    assert data["perplexities"]
    assert data["dynamics"]
    assert data["retrievals"] == []


def test_what_a_training_wrote_chooses_blocks(capsys: Capture) -> None:
    printed(capsys, [*TRAIN, "--scorer-layer", "1"])
    words = options(MEASURE, parts="recall,perplexity", selectors="sparse,forecast,shallow", forecast="trained")
    data, _ = one_object(capsys, words)
    for part in ("recalls", "perplexities"):
        assert chosen_by(data, part) == {"sparse", "forecast", "shallow"}
        ahead = {r["choice"]["lookahead"] for r in data[part] if r["choice"]["selector"] == "forecast"}
        assert ahead == {1, 2}


@pytest.mark.parametrize("ahead", [1, 2])
def test_one_student_alone_looks_as_far_ahead_as_its_folder_says(ahead: int, capsys: Capture) -> None:
    printed(capsys, TRAIN)
    data, _ = one_object(
        capsys, options(MEASURE, parts="recall", selectors="forecast", forecast=f"trained/d{ahead}-h1")
    )
    assert [r["choice"] for r in data["recalls"]] == [
        {"selector": "forecast", "top_k": 4, "lookahead": ahead, "heads": 1}
    ]


def test_a_budget_stops_and_the_same_command_goes_on(capsys: Capture) -> None:
    part, err = one_object(capsys, options(FEW, budget=1e-9))
    assert "is spent; left are " in err
    assert part["recalls"] == []
    data, err = one_object(capsys, FEW)
    whole, _ = one_object(capsys, options(FEW, out="whole"))
    assert data["recalls"] == whole["recalls"]
    assert chosen_by(data, "recalls") == {"sparse", "recency"}
    again, err = one_object(capsys, FEW)
    assert "to measure" not in err
    assert again["recalls"] == data["recalls"]


def test_what_is_named_alone_is_measured(capsys: Capture) -> None:
    data, _ = one_object(capsys, options(FEW, top_k="4", name="mine"))
    assert data["quality"] == "mine"
    assert chosen_by(data, "recalls") == {"sparse", "recency"}
    assert (data["perplexities"], data["dynamics"]) == ([], [])


def test_a_short_context_is_measured_at_the_largest_top_k_that_it_has_room_for(capsys: Capture) -> None:
    data, _ = one_object(capsys, options(MEASURE, context=400, local_blocks=0, selectors="sparse"))
    assert {r["choice"]["top_k"] for r in data["recalls"]} == {3}


def write_tasks(path: Path, context: int, vocab: int = 100) -> None:
    ids = document("task", "eval", context, vocab).ids.astype(np.uint32)
    answers = ((context - 3, context),)
    case = retrieval.Case("needle", "made", context, 0.5, 0, "b", answers, ((40, 50),), ids)
    retrieval.write(path, [case], "0" * 64)


def test_retrieval_tasks_are_asked_where_they_are_given(here: Path, capsys: Capture) -> None:
    write_tasks(here / "tasks.npz", 500)
    data, _ = one_object(capsys, options(MEASURE, selectors="sparse", retrieval="tasks.npz"))
    assert data["recalls"]
    assert {(r["task"], r["context_tokens"]) for r in data["retrievals"]} == {("needle", 500)}


def test_retrieval_tasks_of_another_model_are_refused(here: Path, capsys: Capture) -> None:
    write_tasks(here / "long.npz", 600)
    said = "long.npz has tasks of 600 tokens, and model takes 512"
    assert said in mistake(capsys, options(FEW, retrieval="long.npz"))
    write_tasks(here / "other.npz", 500, 9999)
    assert "and model has 100, counted from 0" in mistake(capsys, options(FEW, retrieval="other.npz"))


def test_a_forecast_of_another_model_is_refused(here: Path, capsys: Capture) -> None:
    printed(capsys, TRAIN)
    write_model(here / "other", d_model=48)
    said = mistake(capsys, options(FEW, checkpoint="other", forecast="trained"))
    assert "no Forecast of other for lookahead 1: tensors 3 that are not [16, 48] of 3 layers" in said


def test_another_measurement_is_not_gone_on_with(capsys: Capture) -> None:
    printed(capsys, FEW)
    assert "give another folder, or delete this one to measure anew" in mistake(capsys, options(FEW, seed=1))


def test_a_model_whose_losses_are_no_numbers_is_not_measured(here: Path, capsys: Capture) -> None:
    whole = random_weights(SHAPE, "cpu", seed=1)
    whole.embed.fill_(float("nan"))
    write_checkpoint(here / "broken", whole)
    assert cli.main(options(MEASURE, checkpoint="broken")) == 2
    assert "broken computes values that are no numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *MISTAKES,
        ({"tokens": "train.npz"}, "train.npz has no document of the role 'eval'"),
        ({"tokens": "short.npz"}, "document 'b' has 50 tokens and 512 are measured on"),
        ({"top_k": 3}, "--top-k 3: of the 8 blocks of 512 tokens 3 are always chosen; give 4 to 4"),
        ({"top_k": "4,400"}, "--top-k 400: of the 8 blocks of 512 tokens 3 are always chosen; give 4 to 4"),
        ({"top_k": "many"}, "'many' is no list of numbers such as 8,16,32"),
        ({"selectors": "sparse,magic"}, "selector 'magic' is not known; allowed are oracle, sparse"),
        ({"selectors": "forecast"}, "--selectors forecast needs what `sparda quality train` wrote"),
        ({"selectors": "shallow"}, "--selectors shallow needs what `sparda quality train` wrote"),
        ({"selectors": ","}, "',' names nothing"),
        ({"parts": "recal"}, "part 'recal' is not known; parts are recall, perplexity"),
        ({"parts": "retrieval"}, "--parts retrieval needs retrieval tasks; give --retrieval FILE"),
        ({"retrieval": "file"}, "file: damaged or not a file of this kind"),
        ({"retrieval": "tokens.npz"}, "tokens.npz: damaged or not a file of this kind"),
        ({"forecast": "nowhere"}, "nowhere: there is no such file or folder"),
        ({"forecast": "."}, "holds no file ending in .pt"),
        ({"forecast": "file"}, "file: not a zip archive as torch.save writes"),
        ({"budget": 0}, "'0' is no number above 0"),
        ({"out": "file"}, "file/parts: Not a directory"),
    ],
)
def test_a_mistake_is_one_sentence(here: Path, capsys: Capture, given: dict[str, object], said: str) -> None:
    assert said in mistake(capsys, options(FEW, **given))
    assert not (here / "out" / FILE).exists()


def test_a_mistake_is_one_object_too(capsys: Capture) -> None:
    assert cli.main([*options(FEW, out="file"), "--json"]) == 2
    assert "file/parts: Not a directory" in json.loads(capsys.readouterr().out)["error"]


def test_measuring_needs_torch(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert "pip install 'sparda[engine]'" in mistake(capsys, MEASURE)
