"""``sparda generate`` as a user types it, on a tiny model with random weights."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparda.engine.errors import SpardaError
from sparda.explore import cli

Capture = pytest.CaptureFixture[str]
Words = list[str]

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter: set TRITON_INTERPRET=1"
)


class Letters:
    """A tokenizer with one token for each letter."""

    def encode(self, text: str) -> Any:
        return types.SimpleNamespace(ids=[ord(c) - ord("a") for c in text.strip()])

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """A checkpoint folder of random weights without a Forecast; what it was asked for. Its end token is 99."""
    torch = pytest.importorskip("torch", reason="the engine needs torch")
    pytest.importorskip("triton", reason="the engine's kernels need triton")
    from sparda.engine.shapes import ModelShape
    from sparda.engine.weights import random_weights

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shape = ModelShape("tiny", layers=2, d_model=64, heads=2, kv_heads=1, head_dim=64, ffn=64, vocab=26)
    asked: list[dict[str, Any]] = []

    def load(path: Path, **given: Any) -> Any:
        asked.append({"path": path, **given})
        weights = random_weights(shape, given["device"], seed=1)
        if given.get("forecast"):
            return weights
        return replace(weights, layers=tuple(replace(w, selection=()) for w in weights.layers))

    tokenizer: Letters | None = Letters()
    fakes: dict[str, dict[str, Callable[..., Any]]] = {
        "checkpoint": {"load_checkpoint": load},
        "gguf_file": {"load_gguf": load},
        "tokenizer": {"tokenizer_of": lambda _path: tokenizer, "end_tokens": lambda _path: (99,)},
    }
    for name, functions in fakes.items():
        module: Any = types.ModuleType(f"sparda.engine.{name}")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, f"sparda.engine.{name}", module)
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    return asked


GENERATE = ["generate", "--checkpoint", ".", "--max-new", "3"]


def one_object(capsys: Capture, words: Words) -> tuple[dict[str, Any], str]:
    assert cli.main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    data: dict[str, Any] = json.loads(out)
    assert (data["schema"], data["command"]) == (1, "generate")
    return data, err


def mistake(capsys: Capture, words: Words) -> str:
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    return err


@interpreted
def test_prompts_of_every_kind_are_decoded_in_the_order_given(
    loaded: list[dict[str, Any]], capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("sparda\n")
    words = [*GENERATE, "--token-ids", "18,15,0,17,3,0", "--prompt", "sparda", "--prompt-file", "prompt.txt"]
    data, err = one_object(capsys, [*words, "--prompt", "gpu"])
    first, *others, last = data["generations"]
    assert others == [first, first]
    assert (first["prompt_tokens"], last["prompt_tokens"]) == (6, 3)
    assert all(len(g["tokens"]) == 3 and g["reason"] == "length" for g in data["generations"])
    assert last["text"] == Letters().decode(last["tokens"])
    assert (data["rows"], data["decoded"]) == (4, 12)
    assert "12 tokens in" in err
    assert "tokens/s" in err


@interpreted
def test_the_text_is_printed_and_nothing_else(loaded: list[dict[str, Any]], capsys: Capture) -> None:
    assert cli.main([*GENERATE, "--policy", "dense", "--prompt", "gpu"]) == 0
    one = capsys.readouterr().out
    assert len(one) == 4
    assert cli.main([*GENERATE, "--policy", "dense", "--prompt", "gpu", "--prompt", "gpu"]) == 0
    assert capsys.readouterr().out == f"[1] {one}[2] {one}"


@interpreted
def test_without_a_tokenizer_the_token_ids_are_printed(
    loaded: list[dict[str, Any]], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_path: Path) -> None:
        raise SpardaError("there is no tokenizer.json; fetch it.")

    monkeypatch.setattr(sys.modules["sparda.engine.tokenizer"], "tokenizer_of", none)
    data, _ = one_object(capsys, [*GENERATE, "--policy", "dense", "--token-ids", "6,15"])
    assert data["generations"][0]["text"] is None
    assert cli.main([*GENERATE, "--policy", "dense", "--token-ids", "6,15"]) == 0
    assert capsys.readouterr().out.strip() == ",".join(map(str, data["generations"][0]["tokens"]))
    assert "no tokenizer.json" in mistake(capsys, [*GENERATE, "--prompt", "gpu"])
    monkeypatch.setattr(sys.modules["sparda.engine.tokenizer"], "tokenizer_of", lambda _path: None)
    assert "has no tokenizer; give the prompts with --token-ids" in mistake(capsys, [*GENERATE, "--prompt", "gpu"])


@interpreted
@pytest.mark.parametrize(
    ("words", "forecast", "said"),
    [
        (["--policy", "sparda"], "proxy", True),
        (["--policy", "sparda", "--forecast", "f.pt"], "checkpoint", False),
        (["--policy", "sparse"], "none", False),
    ],
)
def test_without_a_forecast_checkpoint_the_proxy_chooses_and_that_is_said(
    loaded: list[dict[str, Any]], capsys: Capture, words: Words, forecast: str, said: bool
) -> None:
    data, err = one_object(capsys, [*GENERATE, *words, "--token-ids", "1"])
    assert data["forecast"] == forecast
    assert ("starts from the proxy" in err) == said


@interpreted
def test_infinigen_decodes_without_a_forecast_along_directions_of_the_first_prompt(
    loaded: list[dict[str, Any]], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparda.engine import partial

    learn, samples = partial.partial_basis, []

    def noted(queries: Any, keys: Any, dims: int) -> Any:
        samples.append(tuple(queries.shape))
        return learn(queries, keys, dims)

    monkeypatch.setattr(partial, "partial_basis", noted)
    words = [*GENERATE, "--policy", "infinigen", "--token-ids", "18,15,0,17,3,0", "--token-ids", "6,15"]
    data, err = one_object(capsys, words)
    assert (data["forecast"], data["config"]["policy"], data["decoded"]) == ("none", "infinigen", 6)
    assert samples == [(1, 2, 6, 64)]
    assert "starts from the proxy" not in err


@interpreted
def test_what_is_turned_reaches_the_batch(loaded: list[dict[str, Any]], capsys: Capture) -> None:
    words = ["--set", "config.policy=dense", "--set", "workload.batch=2", "--dtype", "bfloat16", "--token-ids", "1"]
    data, _ = one_object(capsys, [*GENERATE, *words, "--token-ids", "2", "--token-ids", "3"])
    assert (data["config"]["policy"], data["config"]["top_k"], data["rows"]) == ("dense", 1, 2)
    assert len(data["generations"]) == 3
    assert loaded == [{"path": Path("."), "device": "cpu", "value_bytes": 2}]


@interpreted
def test_a_gguf_file_is_loaded_as_one(loaded: list[dict[str, Any]], capsys: Capture) -> None:
    words = ["generate", "--checkpoint", "model.gguf", "--policy", "dense", "--max-new", "1", "--token-ids", "1"]
    one_object(capsys, words)
    assert loaded[0]["path"] == Path("model.gguf")
    one_object(capsys, [*words, "--forecast", "f.pt"])
    assert (loaded[1]["forecast"], loaded[1]["lookahead"]) == (Path("f.pt"), 1)


@interpreted
def test_fewer_local_blocks_leave_more_of_a_budget_to_choose(loaded: list[dict[str, Any]], capsys: Capture) -> None:
    ids = ",".join(str(i % 26) for i in range(400))
    words = ["generate", "--checkpoint", ".", "--policy", "sparse", "--max-new", "1", "--token-ids", ids]
    words += ["--set", "config.top_k=4"]
    assert "always chosen" in mistake(capsys, words)
    data, _ = one_object(capsys, [*words, "--local-blocks", "1"])
    assert data["config"]["top_k"] == 4
    assert "'-1' is no whole number" in mistake(capsys, [*words, "--local-blocks", "-1"])


@interpreted
def test_a_checkpoint_that_is_not_there_is_named(loaded: list[dict[str, Any]], capsys: Capture) -> None:
    assert "nowhere: there is no such" in mistake(
        capsys, ["generate", "--checkpoint", "nowhere", "--token-ids", "1", "--max-new", "1"]
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no prompt is given"),
        (["--prompt", ""], "an empty prompt"),
        (["--token-ids", "1,two"], "'1,two' is no list of token ids"),
        (["--token-ids", "1", "--max-new", "0"], "--max-new 0: ask for at least 1"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (["--token-ids", "1", "--policy", "magic"], "magic"),
        (["--token-ids", "1", "--set", "grid.batch=1"], "generate takes config.… and workload.batch"),
        (["--token-ids", "1", "--set", "config.topk=1"], "top_k"),
    ],
)
def test_a_mistake_is_one_sentence(capsys: Capture, words: Words, said: str) -> None:
    assert said in mistake(capsys, [*GENERATE, *words])


def test_generating_needs_torch(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert "pip install 'sparda[engine]'" in mistake(capsys, [*GENERATE, "--prompt", "gpu"])


def test_generating_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    no_cuda = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", no_cuda)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "generate decodes on a CUDA GPU and none is visible" in mistake(capsys, [*GENERATE, "--prompt", "gpu"])
