"""A tiny model on disk, and token files beside it: what `sparda quality train` and `measure` are given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparda.calibrate.measure.quality.documents import Document, Documents, write
from sparda.engine.checkpoint import write_checkpoint
from sparda.engine.shapes import ModelShape
from sparda.engine.weights import random_weights
from sparda.explore import cli

# Threads that wait for one another take longer than what there is to do on tensors this small.
torch.set_num_threads(1)

Capture = pytest.CaptureFixture[str]
Mistake = tuple[dict[str, object], str]
"""What a command is given, and what it says to that."""

SHAPE = ModelShape(
    "tiny", layers=3, d_model=32, heads=2, kv_heads=1, head_dim=16, ffn=32, vocab=100, max_context=512, value_bytes=4
)


MISTAKES: list[Mistake] = [
    ({"checkpoint": "nowhere"}, "--checkpoint nowhere: there is no such folder or file"),
    ({"checkpoint": "."}, "config.json: there is no such file"),
    ({"checkpoint": "file"}, "file: not a whole GGUF file"),
    ({"tokens": "nowhere.npz"}, "nowhere.npz: cannot be read (No such file or directory)"),
    ({"tokens": "model"}, "model: cannot be read (Is a directory)"),
    ({"tokens": "file"}, "file: damaged or not a file of this kind (it is no .npz archive)"),
    ({"tokens": "damaged.npz"}, "damaged.npz: damaged or not a file of this kind"),
    ({"tokens": "other.npz"}, "and model has 100, counted from 0"),
    ({"context": 513}, "--context 513; model takes 64 to 512 tokens"),
    ({"context": 63}, "--context 63; model takes 64 to 512 tokens"),
    ({"context": 70}, "--context 70: 3 blocks of 64 tokens are always chosen"),
    ({"context": "long"}, "argument --context: invalid int value: 'long'"),
    ({"local_blocks": -1}, "'-1' is no whole number from 0"),
    ({"local_blocks": 100}, "102 blocks of 64 tokens are always chosen"),
    ({"seed": 10**30}, "is no whole number from 0 to"),
    ({"speed": 1}, "unrecognized arguments: --speed 1"),
]
"""Those that training and measuring have in common."""


def write_model(folder: Path, **changes: Any) -> None:
    """A checkpoint of random weights."""
    write_checkpoint(folder, random_weights(replace(SHAPE, **changes), "cpu", seed=1))


def document(name: str, role: str, tokens: int, vocab: int = SHAPE.vocab) -> Document:
    """Random tokens, the same for the same name."""
    drawn = np.random.default_rng(sum(map(ord, name))).integers(0, vocab, tokens)
    return Document(name, role, "novel", drawn.astype(np.uint16))


def write_tokens(path: Path, *documents: Document) -> None:
    write(path, Documents(documents, "0" * 64))


def prepare(folder: Path) -> None:
    """A model and token files: as they should be, of few roles, of another tokenizer, too short, damaged."""
    write_model(folder / "model")
    train, held = document("a", "train", 1600), (document("b", "eval", 512), document("c", "eval", 600))
    write_tokens(folder / "tokens.npz", train, *held)
    write_tokens(folder / "train.npz", train)
    write_tokens(folder / "eval.npz", *held)
    write_tokens(folder / "other.npz", document("a", "train", 600, 9999), document("b", "eval", 600, 9999))
    write_tokens(folder / "short.npz", document("a", "train", 50), document("b", "eval", 50))
    write_tokens(folder / "empty.npz")
    (folder / "damaged.npz").write_bytes((folder / "tokens.npz").read_bytes()[:300])
    (folder / "file").write_text("no model, no Forecast, no folder\n")


def one_object(capsys: Capture, words: list[str]) -> tuple[dict[str, Any], str]:
    """What the command prints with --json, and what it says beside it."""
    assert cli.main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    data: dict[str, Any] = json.loads(out)
    assert (data["schema"], data["command"]) == (1, "quality")
    return data, err


def printed(capsys: Capture, words: list[str]) -> str:
    """What the command prints for a reader."""
    assert cli.main(words) == 0
    return capsys.readouterr().out


def mistake(capsys: Capture, words: list[str]) -> str:
    """The one sentence of a command that refuses."""
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("sparda: ")
    return err


def options(command: list[str], **given: object) -> list[str]:
    """A command's words; ``given``, of the same names, in place of its own."""
    own = dict(zip(command[2::2], command[3::2], strict=True))
    own |= {f"--{name.replace('_', '-')}": str(value) for name, value in given.items()}
    return [*command[:2], *(word for pair in own.items() for word in pair)]
