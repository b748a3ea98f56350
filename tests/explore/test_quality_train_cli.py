"""``sparda quality train`` as a user types it, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("triton", reason="the engine's kernels need triton")

import torch

from sparda.engine.checkpoint import write_checkpoint
from sparda.engine.forecast_file import read_forecast
from sparda.engine.training.checkpoints import steps_in
from sparda.engine.weights import random_weights
from sparda.explore import cli
from tests.explore.tiny_checkpoint import MISTAKES, SHAPE, Capture, mistake, one_object, options, printed, write_model

pytestmark = pytest.mark.usefixtures("here")

TRAIN = ["quality", "train", "--checkpoint", "model", "--tokens", "tokens.npz", "--out", "out", "--context", "256"]
TRAIN += ["--top-k", "4", "--steps", "2", "--batch", "1", "--dtype", "float32"]


def test_training_writes_checkpoints_and_says_how_good_they_are(here: Path, capsys: Capture) -> None:
    assert cli.main(TRAIN) == 0
    out, err = capsys.readouterr()
    assert "training d1-h1 on model: 2 steps, each of 1 sequences of 256 tokens" in err
    assert "2 steps, checkpoints in out." in out
    assert "On 2 sequences that were not trained on:" in out
    assert "d1-h1: loss " in out
    assert "% of its teacher's blocks" in out
    forecast = read_forecast(here / "out" / "d1-h1")
    assert forecast.step == 2
    assert {name: sorted(rows) for name, rows in forecast.rows.items()} == {"forecast": [0, 1], "current": [0]}


def test_json_is_one_object(capsys: Capture) -> None:
    data, err = one_object(capsys, TRAIN)
    assert (data["action"], data["out"], data["model"], data["steps"]) == ("train", "out", "model", 2)
    assert (data["sequences"], data["context_tokens"], data["judged_on"]) == (6, 256, 2)
    assert (data["training"]["top_k"], data["training"]["batch"]) == (4, 1)
    assert set(data["losses"]) == set(data["judged"]) == {"d1-h1"}
    assert data["losses"]["d1-h1"] > 0
    assert 0 <= data["judged"]["d1-h1"]["recall"] <= 1
    assert data["seconds_per_step"] > 0
    assert "training d1-h1" in err


def test_a_training_that_is_killed_at_any_moment_ends_as_if_it_had_not_been(here: Path, capsys: Capture) -> None:
    words = [*options(TRAIN, steps=150), "--save-every", "1"]
    command = "import sys; from sparda.explore import cli; sys.exit(cli.main(sys.argv[1:]))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.Popen([sys.executable, "-c", command, *words], cwd=here, env=environment)
    while child.poll() is None and max(steps_in(here / "out" / "d1-h1"), default=0) < 3:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "it ended before it was killed"
    again, err = one_object(capsys, words)
    assert "of them done already" in err
    whole, _ = one_object(capsys, options(words, out="whole"))
    assert (again["steps"], again["judged"]) == (150, whole["judged"])
    rows, expected = (read_forecast(here / out / "d1-h1").rows["forecast"] for out in ("out", "whole"))
    assert all(torch.equal(rows[layer], expected[layer]) for layer in expected)


def test_too_little_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has less")

    monkeypatch.setattr("sparda.engine.training.trainer.Trainer.run", full)
    assert cli.main(TRAIN) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("sparda: CUDA out of memory; give a shorter --context or fewer students")


def test_the_same_command_goes_on_where_it_stopped(capsys: Capture) -> None:
    first, _ = one_object(capsys, TRAIN)
    again, err = one_object(capsys, TRAIN)
    assert "2 steps, 2 of them done already" in err
    assert (again["losses"], again["judged"]) == (first["losses"], first["judged"])
    longer, err = one_object(capsys, options(TRAIN, steps=4))
    assert "4 steps, 2 of them done already" in err
    whole, _ = one_object(capsys, options(TRAIN, steps=4, out="whole"))
    assert (longer["steps"], longer["losses"], longer["judged"]) == (4, whole["losses"], whole["judged"])


def test_students_of_every_lookahead_and_count_of_heads_train_together_with_a_scorer(
    here: Path, capsys: Capture
) -> None:
    data, err = one_object(capsys, options(TRAIN, lookahead="0,1,2", heads="1,2,2", scorer_layer=1))
    names = ["d0-h1", "d0-h2", "d1-h1", "d1-h2", "d2-h1", "d2-h2"]
    assert list(data["judged"]) == names
    assert list(data["losses"]) == [*names, "scorer-1"]
    assert all((here / "out" / name / "ckpt-2.pt").is_file() for name in data["losses"])
    assert ", ".join(data["losses"]) in err


def test_how_long_it_takes_is_said_once_two_steps_have_shown_it(capsys: Capture) -> None:
    assert " s a step, about " in one_object(capsys, options(TRAIN, steps=3))[1]
    assert " s a step, about " not in one_object(capsys, options(TRAIN, steps=2, out="brief"))[1]


def test_bfloat16_trains_too(capsys: Capture) -> None:
    assert one_object(capsys, options(TRAIN, dtype="bfloat16"))[0]["losses"]["d1-h1"] > 0


def test_without_held_out_documents_every_tenth_sequence_is_judged_on(capsys: Capture) -> None:
    few, _ = one_object(capsys, options(TRAIN, tokens="train.npz"))
    assert (few["sequences"], few["judged_on"], few["judged"]) == (6, 0, {})
    assert "No sequence was left to judge on." in printed(capsys, options(TRAIN, tokens="train.npz"))


def texts(here: Path) -> list[str]:
    """The words that train on a text, with a tokenizer in the model's folder."""
    pytest.importorskip("tokenizers", reason="texts need a tokenizer")
    from tests.calibrate.small_tokenizer import small_tokenizer

    write_model(here / "reader", vocab=300)
    small_tokenizer().save(str(here / "reader" / "tokenizer.json"))
    (here / "cat.txt").write_text("The cat sat.\n" * 450)
    words = options(TRAIN, checkpoint="reader", text="cat.txt")
    at = words.index("--tokens")
    return words[:at] + words[at + 2 :]


def test_texts_are_cut_into_sequences_and_every_tenth_is_judged_on(here: Path, capsys: Capture) -> None:
    data, _ = one_object(capsys, texts(here))
    assert data["judged_on"] == 1
    assert 9 <= data["sequences"] < 18


def test_a_text_that_is_empty_or_no_text_is_refused(here: Path, capsys: Capture) -> None:
    (here / "empty.txt").touch()
    (here / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    words = texts(here)
    assert "no text has 256 tokens, the longest 0" in mistake(capsys, options(words, text="empty.txt"))
    assert "bytes.txt: is no UTF-8 text" in mistake(capsys, options(words, text="bytes.txt"))
    assert "nowhere.txt: cannot be read" in mistake(capsys, options(words, text="nowhere.txt"))


def test_a_tokenizer_of_another_model_is_refused(here: Path, capsys: Capture) -> None:
    words = texts(here)
    (here / "model" / "tokenizer.json").write_bytes((here / "reader" / "tokenizer.json").read_bytes())
    assert "the tokenizer has the token 2" in mistake(capsys, options(words, checkpoint="model"))


def test_a_model_whose_losses_are_no_numbers_is_not_trained_on(here: Path, capsys: Capture) -> None:
    whole = random_weights(SHAPE, "cpu", seed=1)
    whole.embed.fill_(float("nan"))
    write_checkpoint(here / "broken", whole)
    assert cli.main(options(TRAIN, checkpoint="broken")) == 2
    assert "step 1: the loss of d1-h1 is no number any more" in capsys.readouterr().err


def test_texts_need_a_tokenizer(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    words = texts(here)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "text needs a package that is not installed: pip install 'sparda[tokenizer]'" in mistake(capsys, words)
    (here / "reader" / "tokenizer.json").unlink()
    assert "tokenizer.json: there is no such file" in mistake(capsys, words)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *MISTAKES,
        ({"tokens": "empty.npz"}, "empty.npz has no document of the role 'train'"),
        ({"tokens": "eval.npz"}, "eval.npz has no document of the role 'train'"),
        ({"tokens": "short.npz"}, "no text has 256 tokens, the longest 50"),
        ({"top_k": 3}, "--top-k 3: of the 4 blocks of 256 tokens 3 are always chosen; give 4 to 4"),
        ({"top_k": 5}, "--top-k 5: of the 4 blocks of 256 tokens 3 are always chosen; give 4 to 4"),
        ({"lookahead": 9}, "a Forecast 9 layers ahead; allowed are 0 to 4"),
        ({"lookahead": "1,3"}, "--lookahead 3; the layers of model are 3, give at most 2"),
        ({"lookahead": "1;2"}, "'1;2' is no list of numbers such as 1,2"),
        ({"heads": 3}, "3 Forecast heads per KV head; allowed are 1, 2 and 4"),
        ({"heads": ""}, "'' is no list of numbers such as 1,2"),
        ({"begin": "zeros"}, "invalid choice: 'zeros'"),
        ({"scorer_layer": 2}, "--scorer-layer 2; of the 3 layers of model 0 to 1 can score"),
        ({"scorer_layer": -1}, "--scorer-layer -1; of the 3 layers of model 0 to 1 can score"),
        ({"steps": 0}, "training.steps is 0; give 1 or more"),
        ({"learning_rate": "nan"}, "give a rate between 0 and 1"),
        ({"warmup": 1}, "allowed are 0 to a tenth of 2 steps"),
        ({"out": "file"}, "file: cannot be made (File exists)"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    here: Path, capsys: Capture, given: dict[str, object], said: str
) -> None:
    assert said in mistake(capsys, options(TRAIN, **given))
    assert not (here / "out").exists()


def test_a_model_of_one_layer_has_none_to_look_at(here: Path, capsys: Capture) -> None:
    write_model(here / "one", layers=1)
    assert "the layers of one are 1, give at most 0" in mistake(capsys, options(TRAIN, checkpoint="one"))
    words = options(TRAIN, checkpoint="one", lookahead=0)
    assert "of the 1 layers of one none can score" in mistake(capsys, options(words, scorer_layer=0))
    assert list(one_object(capsys, words)[0]["judged"]) == ["d0-h1"]


def test_another_training_is_not_gone_on_with(capsys: Capture) -> None:
    printed(capsys, TRAIN)
    said = mistake(capsys, options(TRAIN, seed=1))
    assert "is of another training (seed 0 then, 1 now); give a new --out" in said


def test_a_mistake_is_one_object_too(here: Path, capsys: Capture) -> None:
    for given, said in (({"heads": 3}, "3 Forecast heads"), ({"out": "file/x"}, "file/x")):
        assert cli.main([*options(TRAIN, **given), "--json"]) == 2
        data = json.loads(capsys.readouterr().out)
        assert (data["schema"], data["command"]) == (1, "quality")
        assert said in data["error"]


def test_training_needs_torch(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert "pip install 'sparda[engine]'" in mistake(capsys, TRAIN)


@pytest.mark.parametrize("action", ["train", "measure"])
def test_the_help_says_what_every_option_is_in_80_columns(
    action: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main(["quality", action, "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert f"sparda quality {action}" in text.splitlines()[0]
    assert text.count("--checkpoint PATH") == 2
