from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparda.engine.errors import SpardaError
from sparda.engine.model_config import planned_shape
from sparda.explore import cli
from sparda.explore.models import ShapeChange, model_of
from sparda.explore.scenario import load_scenario
from sparda.explore.setting import profile_for

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
QWEN3 = {
    **LLAMA,
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "vocab_size": 151936,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
}


def write(folder: Path, config: dict[str, Any], name: str = "my-model") -> Path:
    (folder / name).mkdir()
    path = folder / name / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_a_config_file_and_its_folder_are_the_same_model(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA)
    shapes = [model_of(str(p), ShapeChange()).shape for p in (path, path.parent)]
    assert shapes[0] == shapes[1]
    assert (shapes[0].name, shapes[0].kv_heads, shapes[0].ffn) == ("my-model", 8, 14336)


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (QWEN3, "norm of every head's query and key is left out"),
        ({**LLAMA, "model_type": "qwen2"}, "bias of Q, K and V is left out"),
        ({**LLAMA, "attention_bias": True}, "bias of the attention's linears is left out"),
    ],
)
def test_what_a_plan_leaves_out_of_a_near_relative_is_said(tmp_path: Path, config: dict[str, Any], note: str) -> None:
    shape, notes = planned_shape(write(tmp_path, config))
    assert shape.layers == config["num_hidden_layers"]
    assert note in "; ".join(notes)
    scenario = load_scenario(None, [f"model={tmp_path / 'my-model'}"])
    assert note in profile_for(scenario).carried[0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "deepseek_v3"}, r"latent \(MLA\)"),
        ({"model_type": "qwen3_moe"}, "mixture of experts"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "qwen3_next"}, "state of constant size"),
        ({"model_type": "gemma3_text"}, "sliding window"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sees every token"),
        ({"model_type": "t5"}, "does not know its mathematics"),
        ({"head_dim": 96}, "the kernels take 16, 32, 64, 128, 256"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing; a whole number from 1 up is wanted"),
        ({"num_key_value_heads": 5}, "the first must be a multiple of the second"),
    ],
)
def test_a_model_that_the_method_does_not_fit_says_why(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    path = write(tmp_path, {**LLAMA, **change})
    with pytest.raises(SpardaError, match=why) as caught:
        planned_shape(path)
    assert str(caught.value).startswith(str(path))


def test_changed_sizes_are_another_model_by_name() -> None:
    found = model_of("minicpm4.1-8b", ShapeChange(kv_heads=8, kv_bytes=1)).shape
    assert (found.name, found.kv_heads, found.cached_bytes) == ("minicpm4.1-8b, kv_heads=8, kv_bytes=1", 8, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=llama"], "unknown model 'llama'; known models: minicpm4.1-8b; or give the path"),
        (["shape.heads=7"], "the first must be a multiple of the second"),
        (["shape.layers=-3"], "shape.layers is -3; give a whole number from 1"),
        (["shape.kv_bytes=3"], "allowed are 0 (as the weights), 1, 2 and 4"),
        (["shape.layer=3"], "did you mean 'layers'?"),
        (["machine.link=3"], "unknown key 'machine.link'; Allowed keys: sms, hbm_gb_s"),
        (["machine.sms=1.5"], "an integer is wanted"),
    ],
)
def test_a_mistake_in_a_what_if_is_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *(a for w in words for a in ("--set", w))]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_what_if_is_called_so_and_says_what_was_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--set", "machine.link_h2d_gb_s=110", "--set", "shape.kv_bytes=1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "(what-if)" in text
    assert "machine changed: link_h2d_gb_s=110; model minicpm4.1-8b, kv_bytes=1, measured minicpm4.1-8b" in text
