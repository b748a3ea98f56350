"""Configurations of Hugging Face: what shape they state, how their rope is scaled, and which models are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sparda.engine.errors import SpardaError
from sparda.engine.model_config import shape_from_config, shape_of, tied_head
from sparda.engine.shapes import ModelShape

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1000,
    "vocab_size": 321,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
}
MINICPM = {**LLAMA, "model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
HALF = 32


def shape(**changes: Any) -> ModelShape:
    """The shape of the Llama configuration with some keys changed; None removes one."""
    config = {k: v for k, v in {**LLAMA, **changes}.items() if v is not None}
    return shape_of(config, name="m", where="here")


def scaled(kind: str, context: int = 8192, **scaling: Any) -> ModelShape:
    return shape(max_position_embeddings=context, rope_scaling={"rope_type": kind, **scaling})


def test_a_folder_and_its_file_state_the_same_shape(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    found = shape_from_config(folder, value_bytes=4)
    assert found == shape_from_config(folder / "config.json", value_bytes=4)
    assert found == ModelShape("my-model", 3, 512, 8, 2, 64, 1000, 321, 500000.0, (), 1.0, 1e-5, 8192, value_bytes=4)


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpardaError, match=r"config\.json: there is no such file"):
        shape_from_config(tmp_path)


def test_minicpm_has_its_mup_scales_and_llama_none() -> None:
    found = shape_of(MINICPM, name="m", where="here")
    assert (found.scale_emb, found.scale_depth, found.dim_model_base) == (12.0, 1.4, 256)
    assert found.residual_scale == pytest.approx(1.4 / math.sqrt(3))
    assert found.logit_scale == 0.5
    assert shape(scale_depth=1.4).residual_scale == 1.0


@pytest.mark.parametrize("key", ["scale_emb", "scale_depth", "dim_model_base"])
def test_a_mup_scale_is_not_guessed(key: str) -> None:
    config = {k: v for k, v in MINICPM.items() if k != key}
    with pytest.raises(SpardaError, match=f"here: {key} is missing"):
        shape_of(config, name="m", where="here")


def test_what_a_configuration_may_leave_out_has_the_families_defaults() -> None:
    found = shape(num_key_value_heads=None, rms_norm_eps=None, rope_theta=None)
    assert (found.kv_heads, found.head_dim, found.norm_eps, found.rope_theta) == (8, 64, 1e-6, 10000.0)


def test_head_dim_may_differ_from_hidden_size_over_heads() -> None:
    assert shape(head_dim=128).q_width == 1024


def test_the_newer_table_of_rope_parameters_says_the_same_as_the_older_keys() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = shape(rope_scaling=scaling, rope_theta=1e6)
    new = shape(rope_theta=None, rope_parameters={**scaling, "rope_theta": 1e6})
    assert old == new
    assert old.rope_theta == 1e6


def test_the_old_key_of_a_rope_type_is_read() -> None:
    assert shape(rope_scaling={"type": "linear", "factor": 2.0}).rope_factors == (2.0,) * HALF


def test_linear_scaling_divides_every_frequency() -> None:
    found = scaled("linear", factor=4)
    assert found.rope_factors == (4.0,) * HALF
    assert found.rope_amplitude == 1.0


def test_llama3_scaling_goes_by_wavelength() -> None:
    found = scaled(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=4096
    )
    for i, factor in enumerate(found.rope_factors):
        wave = 2 * math.pi * found.rope_theta ** (i / HALF)
        if wave < 4096 / 4:
            assert factor == 1.0
        elif wave > 4096:
            assert factor == 8.0
        else:
            smooth = (4096 / wave - 1.0) / 3.0
            assert 1 / factor == pytest.approx((1 - smooth) / 8 + smooth)
    assert len(set(found.rope_factors)) > 3


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    found = scaled("yarn", 131072, factor=4.0, original_max_position_embeddings=32768)
    # Pair i turns original / wavelength times: 32 turns end the kept pairs, one turn begins the interpolated ones.
    turns = [32768 / (2 * math.pi * found.rope_theta ** (i / HALF)) for i in range(HALF)]
    first = next(i for i, t in enumerate(turns) if t < 32)
    last = next(i for i, t in enumerate(turns) if t < 1)
    assert all(f == 1.0 for f in found.rope_factors[:first])
    assert all(f == 4.0 for f in found.rope_factors[last:])
    assert all(
        a < b for a, b in zip(found.rope_factors[first - 1 : last], found.rope_factors[first:last], strict=False)
    )
    assert found.rope_amplitude == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_takes_a_stated_amplitude() -> None:
    assert scaled("yarn", factor=4.0, attention_factor=1.5).rope_amplitude == 1.5


def test_longrope_takes_the_long_factors_only_where_the_model_reaches_past_its_original_length() -> None:
    short, long = [1.0 + i / 64 for i in range(HALF)], [1.0 + i for i in range(HALF)]
    lists = {"short_factor": short, "long_factor": long, "original_max_position_embeddings": 8192}
    within, beyond = scaled("longrope", 8192, **lists), scaled("longrope", 32768, **lists)
    assert within.rope_factors == tuple(short)
    assert within.rope_amplitude == 1.0
    assert beyond.rope_factors == tuple(long)
    assert beyond.rope_amplitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(8192)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt_neox"}, "model_type is 'gpt_neox'; the engine does not know its mathematics"),
        ({"model_type": "qwen2"}, "Q, K and V projections have a bias"),
        ({"model_type": "qwen3"}, "qk-norm"),
        ({"model_type": None}, "model_type is missing"),
        ({"attention_bias": True}, "attention_bias is true; the engine has no linears with a bias"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"num_local_experts": 8}, "num_local_experts is 8; the engine has no mixture of experts"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is a table; .* quantised tensors"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window is 4096 with 8192 positions"),
        ({"model_type": "mistral"}, "sliding_window is 4096"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"head_dim": 96}, "head_dim is 96; the kernels take 16, 32, 64, 128, 256"),
        ({"hidden_size": 511}, "hidden_size 511 is no multiple of 8"),
        ({"num_key_value_heads": 3}, "here: m: 8 query heads over 3 KV heads"),
        ({"hidden_size": None}, "hidden_size is missing; a whole number"),
        ({"vocab_size": True}, "vocab_size is true"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"rms_norm_eps": -1.0}, r"rms_norm_eps is -1\.0"),
        ({"rope_theta": 1.0}, "rope_theta is 1; it must be above 1"),
        ({"partial_rotary_factor": 0.5}, "rotates whole heads"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope of type 'dynamic' is not known"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor of linear rope is None; a positive number"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor of longrope is 1 values"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one flat table"),
    ],
)
def test_a_model_that_the_engine_cannot_compute_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpardaError, match=said):
        shape(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 8192},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"attention_bias": False, "mlp_bias": False, "num_local_experts": 0},
    ],
)
def test_what_is_switched_off_is_no_reason_to_refuse(changes: dict[str, Any]) -> None:
    assert shape(**changes).heads == 8


@pytest.mark.parametrize("said", [True, False, None])
def test_a_tied_head_is_told_apart_from_a_silent_configuration(tmp_path: Path, said: bool | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({} if said is None else {"tie_word_embeddings": said}))
    assert tied_head(tmp_path) is said
