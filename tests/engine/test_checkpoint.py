"""Checkpoints: what is written comes back, muP is folded in, and files that do not fit are refused in a sentence."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("safetensors", reason="checkpoints are read with safetensors")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparda.engine.checkpoint import HEAD, INDEX, SINGLE, load_checkpoint, write_checkpoint
from sparda.engine.errors import SpardaError
from sparda.engine.forecast_file import write_forecast
from sparda.engine.shapes import ModelShape
from sparda.engine.tensor_file import TensorFiles
from sparda.engine.weights import Weights, random_weights

SHAPE = ModelShape("tiny", layers=2, d_model=48, heads=4, kv_heads=2, head_dim=16, ffn=40, vocab=37, max_context=512)
SCALING: dict[str, Any] = {"rope_factors": tuple(1.0 + i / 8 for i in range(8)), "rope_amplitude": 1.25}


def tensors_of(w: Weights) -> dict[str, Tensor]:
    """Every tensor of a model by a name of its own."""
    found = {"embed": w.embed, "final_norm": w.final_norm, "head": w.head}
    for i, layer in enumerate(w.layers):
        names = ("norm", "fused", "output", "ffn_norm", "gate_up", "down")
        found |= {f"{i}.{name}": getattr(layer, name) for name in names}
        if layer.eviction is not None:
            found |= {f"{i}.A": layer.eviction[0], f"{i}.delta": layer.eviction[1]}
    return found


def assert_same(found: Weights, expected: Weights) -> None:
    a, b = tensors_of(found), tensors_of(expected)
    assert a.keys() == b.keys()
    for name, tensor in b.items():
        assert a[name].dtype == tensor.dtype, name
        assert torch.equal(a[name], tensor), name
    assert [w.selection for w in found.layers] == [w.selection for w in expected.layers]


def rewrite(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """Change keys of a written configuration; returns the tensors beside it."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return load_file(folder / SINGLE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plain Llama checkpoint: no selection rows, no eviction head."""
    qkv = SHAPE.q_width + 2 * SHAPE.kv_width
    weights = random_weights(SHAPE, "cpu")
    layers = [replace(w, fused=w.fused[:qkv], selection=(), eviction=None) for w in weights.layers]
    write_checkpoint(tmp_path / "tiny", replace(weights, layers=tuple(layers)))
    return tmp_path / "tiny"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("value_bytes", [2, 4])
def test_a_written_checkpoint_comes_back(tmp_path: Path, value_bytes: int, tied: bool) -> None:
    shape = replace(SHAPE, value_bytes=value_bytes, **SCALING)
    weights = random_weights(shape, "cpu", seed=1)
    weights = replace(weights, head=weights.embed) if tied else weights
    write_checkpoint(tmp_path / "tiny", weights)
    found = load_checkpoint(tmp_path / "tiny", device="cpu", value_bytes=value_bytes)
    assert_same(found, weights)
    assert found.shape == shape
    assert (found.head is found.embed) == tied
    assert (HEAD in load_file(tmp_path / "tiny" / SINGLE)) != tied


def test_folded_scales_are_not_applied_again(tmp_path: Path) -> None:
    weights = random_weights(replace(SHAPE, scale_emb=12.0, scale_depth=1.4, dim_model_base=16), "cpu")
    write_checkpoint(tmp_path / "tiny", weights)
    found = load_checkpoint(tmp_path / "tiny", device="cpu")
    assert_same(found, weights)
    assert (found.shape.scale_emb, found.shape.residual_scale, found.shape.logit_scale) == (1.0, 1.0, 1.0)


def test_values_are_converted_to_the_type_asked_for(folder: Path) -> None:
    narrow, wide = (load_checkpoint(folder, device="cpu", value_bytes=n) for n in (2, 4))
    assert wide.embed.dtype == torch.float32
    assert torch.equal(wide.embed, narrow.embed.float())


def test_mup_scales_are_folded_in_and_a_tied_head_is_the_unscaled_embedding(folder: Path) -> None:
    mup = {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 12}
    raw = {n: t for n, t in rewrite(folder, **mup, tie_word_embeddings=True).items() if n != HEAD}
    save_file(raw, folder / SINGLE)
    found = load_checkpoint(folder, device="cpu", value_bytes=4)
    prefix, residual = "model.layers.1.", 1.4 / 2**0.5
    embed = raw["model.embed_tokens.weight"].float()
    torch.testing.assert_close(found.embed, embed * 12)
    assert torch.equal(found.head, embed)
    torch.testing.assert_close(found.final_norm, raw["model.norm.weight"].float() * 0.25)
    torch.testing.assert_close(found.layers[1].output, raw[prefix + "self_attn.o_proj.weight"].float() * residual)
    torch.testing.assert_close(found.layers[1].down, raw[prefix + "mlp.down_proj.weight"].float() * residual)
    q, k, v = (raw[f"{prefix}self_attn.{p}_proj.weight"].float() for p in "qkv")
    assert torch.equal(found.layers[1].fused, torch.cat([q, k, v]))


def test_shards_are_read_by_their_index(folder: Path) -> None:
    expected = load_checkpoint(folder, device="cpu")
    raw = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    files = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(raw)}
    for file in set(files.values()):
        save_file({n: t for n, t in raw.items() if files[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert_same(load_checkpoint(folder, device="cpu"), expected)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(SpardaError, match=r"model-00002-of-00003\.safetensors: there is no such file"):
        load_checkpoint(folder, device="cpu")


def test_an_index_may_not_name_a_file_of_another_folder(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": f"../tiny/{SINGLE}"}}))
    with pytest.raises(SpardaError, match="no file of that folder"):
        load_checkpoint(folder, device="cpu")


def test_a_head_may_be_stored_or_tied_where_the_configuration_is_silent(folder: Path) -> None:
    raw = rewrite(folder, tie_word_embeddings=None)
    assert torch.equal(load_checkpoint(folder, device="cpu").head, raw[HEAD])
    save_file({n: t for n, t in raw.items() if n != HEAD}, folder / SINGLE)
    found = load_checkpoint(folder, device="cpu")
    assert found.head is found.embed


def test_a_head_that_the_configuration_ties_is_ignored_in_the_file(folder: Path) -> None:
    rewrite(folder, tie_word_embeddings=True)
    found = load_checkpoint(folder, device="cpu")
    assert found.head is found.embed


def test_old_rotary_buffers_are_ignored(folder: Path) -> None:
    raw = load_file(folder / SINGLE)
    save_file({**raw, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, folder / SINGLE)
    assert load_checkpoint(folder, device="cpu").layers[0].selection == ()


def test_every_tensor_that_does_not_fit_is_told_before_any_is_read(folder: Path, monkeypatch: Any) -> None:
    raw = load_file(folder / SINGLE)
    for i in range(2):
        for p in "qkv":
            raw[f"model.layers.{i}.self_attn.{p}_proj.bias"] = torch.ones(4)
    del raw["model.norm.weight"], raw[HEAD]
    raw["model.layers.1.mlp.up_proj.weight"] = torch.ones(3, 5)
    raw["model.layers.0.mlp.up_proj.weight"] = torch.ones(40, 48, dtype=torch.int8)
    save_file(raw, folder / SINGLE)
    monkeypatch.setattr(TensorFiles, "read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(SpardaError) as error:
        load_checkpoint(folder, device="cpu")
    said = str(error.value)
    assert "2 missing: model.norm.weight, lm_head.weight;" in said
    assert "6 unknown: model.layers.0.self_attn.k_proj.bias" in said
    assert "and 1 more" in said
    assert "model.layers.1.mlp.up_proj.weight [3, 5], not [40, 48]" in said
    assert "model.layers.0.mlp.up_proj.weight I8" in said


def test_a_damaged_file_and_an_empty_folder_are_told(folder: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-1])
    with pytest.raises(SpardaError, match="not a whole safetensors file"):
        load_checkpoint(folder, device="cpu")
    (folder / SINGLE).unlink()
    with pytest.raises(SpardaError, match=r"holds neither model\.safetensors nor"):
        load_checkpoint(folder, device="cpu")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_forecast_brings_its_rows_after_q_k_and_v(folder: Path, tmp_path: Path, suffix: str) -> None:
    trained = random_weights(SHAPE, "cpu", seed=5)
    write_forecast(tmp_path / f"f{suffix}", trained)
    found = load_checkpoint(folder, device="cpu", forecast=tmp_path / f"f{suffix}")
    assert [w.selection for w in found.layers] == [("forecast", "current"), ("forecast",)]
    qkv, kv = SHAPE.q_width + 2 * SHAPE.kv_width, SHAPE.kv_width
    assert torch.equal(found.layers[0].fused[qkv:], trained.layers[0].fused[qkv:])
    assert torch.equal(found.layers[1].fused[qkv:], trained.layers[1].fused[qkv : qkv + kv])
    assert torch.equal(found.layers[0].fused[:qkv], load_checkpoint(folder, device="cpu").layers[0].fused)


def test_a_forecast_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    write_forecast(tmp_path / "f.pt", random_weights(replace(SHAPE, d_model=32), "cpu"))
    with pytest.raises(SpardaError, match=r"that are not \[32, 48\] of 2 layers"):
        load_checkpoint(folder, device="cpu", forecast=tmp_path / "f.pt")


def test_a_folder_that_holds_files_is_not_overwritten(folder: Path) -> None:
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(SpardaError, match="cannot be written"):
        write_checkpoint(folder, random_weights(SHAPE, "cpu", seed=9))
    assert sorted(folder.parent.rglob("*")) == before


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sparda.engine.tensor_file.os.fsync", full)
    with pytest.raises(SpardaError, match="No space left on device"):
        write_checkpoint(tmp_path / "tiny", random_weights(SHAPE, "cpu"))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_the_extra_that_brings_it(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SpardaError, match=r"pip install 'sparda\[engine\]'"):
        load_checkpoint(folder, device="cpu")
