"""GGUF files: the tensors and the shape that they state, in the engine's order of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("gguf", reason="GGUF files are read with the gguf package")

import gguf
import numpy as np
import numpy.typing as npt
import torch

from sparda.engine.errors import SpardaError
from sparda.engine.gguf_file import load_gguf
from sparda.engine.model_config import shape_of
from sparda.engine.shapes import ModelShape

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 2, 64, 4, 2, 16, 96, 50
Array = npt.NDArray[np.float32]


def model(tied: bool = False) -> dict[str, Array]:
    """Random tensors under Hugging Face's names, rows in its order."""
    rng = np.random.default_rng(0)
    kv = KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    if not tied:
        shapes["lm_head"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer: dict[str, tuple[int, ...]] = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        layer |= {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN)}
        layer |= {"self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN)}
        layer |= {"mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}
        shapes |= {f"model.layers.{i}.{name}": size for name, size in layer.items()}
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in shapes.items()}


def interleaved(rows: Array, heads: int) -> Array:
    """A head's rows as llama.cpp's converter lays them: i, i + half, i + 1, …"""
    half = rows.shape[0] // heads // 2
    order = [h * 2 * half + i + part for h in range(heads) for i in range(half) for part in (0, half)]
    return rows[order]


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(path: Path, tensors: dict[str, Array], *, quantised: bool = False, arch: str = "llama", **more: Any) -> Path:
    """A GGUF file of the model; ``more`` sets further keys of the architecture or, as an array, further tensors."""
    w = gguf.GGUFWriter(path, arch)
    w.add_context_length(256)
    w.add_block_count(LAYERS)
    w.add_embedding_length(HIDDEN)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(50000.0)
    for key, value in more.items():
        if isinstance(value, np.ndarray):
            w.add_tensor(key.replace("__", "."), value)
        else:
            add = (
                w.add_string if isinstance(value, str) else w.add_float32 if isinstance(value, float) else w.add_uint32
            )
            add(f"{arch}.{key.replace('__', '.')}", value)
    for name, value in tensors.items():
        prefix, module = ("", name)
        if name.startswith("model.layers."):
            _, _, layer, module = name.split(".", 3)
            prefix = f"blk.{layer}."
        heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(module)
        value = interleaved(value, heads) if heads else value
        kind = gguf.GGMLQuantizationType.Q8_0
        if quantised and value.ndim == 2:
            w.add_tensor(f"{prefix}{GGUF_NAMES[module]}.weight", gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            w.add_tensor(f"{prefix}{GGUF_NAMES[module]}.weight", value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def test_the_shape_is_that_of_the_metadata(tmp_path: Path) -> None:
    found = load_gguf(write(tmp_path / "small.gguf", model()), device="cpu", value_bytes=4).shape
    assert found == ModelShape(
        "small", LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, 50000.0, norm_eps=found.norm_eps,
        max_context=256, value_bytes=4,
    )  # fmt: skip
    assert found.norm_eps == pytest.approx(1e-5)


def test_tensors_come_back_with_each_heads_rows_in_the_engines_order(tmp_path: Path) -> None:
    raw = {name: torch.from_numpy(value) for name, value in model().items()}
    found = load_gguf(write(tmp_path / "m.gguf", model()), device="cpu", value_bytes=4)
    assert torch.equal(found.embed, raw["model.embed_tokens"])
    assert torch.equal(found.head, raw["lm_head"])
    assert torch.equal(found.final_norm, raw["model.norm"])
    for i, layer in enumerate(found.layers):
        own = {name.removeprefix(f"model.layers.{i}."): value for name, value in raw.items()}
        assert torch.equal(layer.fused, torch.cat([own[f"self_attn.{p}_proj"] for p in "qkv"]))
        assert torch.equal(layer.gate_up, torch.cat([own["mlp.gate_proj"], own["mlp.up_proj"]]))
        assert torch.equal(layer.output, own["self_attn.o_proj"])
        assert torch.equal(layer.down, own["mlp.down_proj"])
        assert torch.equal(layer.norm, own["input_layernorm"])
        assert torch.equal(layer.ffn_norm, own["post_attention_layernorm"])
        assert layer.selection == ()


def test_quantised_tensors_are_near_what_was_quantised(tmp_path: Path) -> None:
    exact = load_gguf(write(tmp_path / "f32.gguf", model()), device="cpu", value_bytes=4)
    found = load_gguf(write(tmp_path / "q8.gguf", model(), quantised=True), device="cpu", value_bytes=4)
    for a, b in zip(found.layers, exact.layers, strict=True):
        # Q8_0: 8 bits for each of 32 values, whose largest is about 3.
        torch.testing.assert_close(a.fused, b.fused, atol=0.03, rtol=0)
        assert not torch.equal(a.fused, b.fused)
        assert torch.equal(a.norm, b.norm)


def test_a_file_without_an_output_has_the_embedding_for_a_head(tmp_path: Path) -> None:
    found = load_gguf(write(tmp_path / "m.gguf", model(tied=True)), device="cpu")
    assert found.head is found.embed
    assert found.embed.dtype == torch.bfloat16


def test_frequency_divisors_in_the_file_are_the_ropes(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2).astype(np.float32)
    more: dict[str, Any] = {
        "rope_freqs__weight": factors,
        "rope__scaling__type": "linear",
        "rope__scaling__factor": 2.0,
    }
    found = load_gguf(write(tmp_path / "m.gguf", model(), **more), device="cpu").shape
    assert found.rope_factors == tuple(float(f) * 2.0 for f in factors)


def test_yarn_is_scaled_as_a_configuration_that_says_the_same(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    more: dict[str, Any] = {f"rope__scaling__{key}": value for key, value in scaling.items()}
    found = load_gguf(write(tmp_path / "m.gguf", model(), **more), device="cpu").shape
    table = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = {
        "model_type": "llama", "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": 1,
        "intermediate_size": FFN, "vocab_size": VOCAB, "max_position_embeddings": 256, "rope_theta": 50000.0,
    }  # fmt: skip
    expected = shape_of({**config, "rope_scaling": table}, name="m", where="here")
    assert (found.rope_factors, found.rope_amplitude) == (expected.rope_factors, expected.rope_amplitude)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"arch": "qwen2"}, "architecture is 'qwen2'; of GGUF files only 'llama'"),
        ({"expert_count": 8}, "num_experts is 8; the engine has no mixture of experts"),
        ({"rope__dimension_count": 8}, "rotates whole heads"),
        ({"attention__key_length": 48}, "keys and values differ|head_dim is 48"),
        ({"residual_scale": 0.5}, r"residual_scale is 0\.5"),
        ({"attention__sliding_window": 64}, "sliding_window is 64"),
        ({"blk.0.attn_q.bias": np.ones(HIDDEN, np.float32)}, r"1 unknown: blk\.0\.attn_q\.bias"),
        ({"rope_freqs__weight": np.ones(3, np.float32)}, r"rope_freqs\.weight are not 8 positive numbers"),
    ],
)
def test_a_model_that_the_engine_cannot_compute_is_refused(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(SpardaError, match=said):
        load_gguf(write(tmp_path / "m.gguf", model(), **more), device="cpu")


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    tensors = model()
    del tensors["model.norm"]
    tensors["model.layers.1.mlp.down_proj"] = np.ones((3, 5), np.float32)
    with pytest.raises(SpardaError, match=r"1 missing: output_norm\.weight; .*blk\.1\.ffn_down\.weight \[3, 5\], not"):
        load_gguf(write(tmp_path / "m.gguf", tensors), device="cpu")


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF not really")
    with pytest.raises(SpardaError, match="not a whole GGUF file"):
        load_gguf(tmp_path / "m.gguf", device="cpu")
    with pytest.raises(SpardaError, match="no such file"):
        load_gguf(tmp_path / "none.gguf", device="cpu")


def test_a_file_cut_short_is_told(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", model())
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SpardaError, match="not a whole GGUF file"):
        load_gguf(file, device="cpu")
