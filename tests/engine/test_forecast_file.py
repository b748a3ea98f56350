"""Forecast checkpoints: the public format in all its wrappings, and nothing in them that runs."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("safetensors", reason="checkpoints are read with safetensors")

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from sparda.engine.errors import SpardaError
from sparda.engine.forecast_file import chosen_file, forecast_of, read_forecast, tensor_name, write_forecast
from sparda.engine.shapes import ModelShape
from sparda.engine.torch_file import Inert, TorchFile
from sparda.engine.weights import random_weights

SHAPE = ModelShape("tiny", layers=3, d_model=48, heads=4, kv_heads=2, head_dim=16, ffn=40, vocab=37)


def trained(layers: int = 3) -> dict[str, Tensor]:
    """A state dict as training saves it: every layer's forecast and layer 0's current query."""
    generator = torch.Generator().manual_seed(3)
    names = [tensor_name("forecast", i) for i in range(layers)] + [tensor_name("current", 0)]
    return {n: torch.randn(32, 48, generator=generator).bfloat16() for n in names}


def assert_holds(path: Path, state: dict[str, Tensor]) -> None:
    found = read_forecast(path)
    assert {tensor_name(q, i) for q, layers in found.rows.items() for i in layers} == set(state)
    for query, layers in found.rows.items():
        for i, tensor in layers.items():
            expected = state[tensor_name(query, i)]
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected)


class Malice:
    """Runs a command when an ordinary unpickler meets it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


class Plain:
    """An object whose class the reader does not know."""

    def __init__(self) -> None:
        self.value = 3


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model_state_dict", "model", "net", "weights"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_state_dict_is_found_bare_or_wrapped_and_under_a_prefix(
    tmp_path: Path, wrapper: str | None, prefix: str
) -> None:
    state = {prefix + name: tensor for name, tensor in trained().items()}
    torch.save({wrapper: state, "step": 7} if wrapper else state, tmp_path / "f.pt")
    assert_holds(tmp_path / "f.pt", trained())
    assert read_forecast(tmp_path / "f.pt").step == (7 if wrapper else None)


def test_safetensors_are_read_beside_tensors_of_other_names(tmp_path: Path) -> None:
    save_file({**trained(), "model.norm.weight": torch.ones(4)}, tmp_path / "f.safetensors")
    assert_holds(tmp_path / "f.safetensors", trained())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_come_back_as_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {n: t.to(dtype) for n, t in trained().items()}
    torch.save(state, tmp_path / "f.pt")
    assert_holds(tmp_path / "f.pt", state)


def test_views_and_parameters_are_read_as_the_values_that_they_show(tmp_path: Path) -> None:
    big = torch.randn(48, 100)
    state = {tensor_name("forecast", 0): big[:, 10:42].T, tensor_name("current", 0): torch.nn.Parameter(big[:, :32].T)}
    torch.save(state, tmp_path / "f.pt")
    assert_holds(tmp_path / "f.pt", {n: t.detach() for n, t in state.items()})


def test_a_training_checkpoint_is_read_past_its_optimizer_and_random_states(tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4)).sum().backward()
    optimizer.step()
    torch.save(
        {
            "model_state_dict": trained(),
            "step": 150,
            "optimizer_state_dict": optimizer.state_dict(),
            "scheduler_state_dict": {"last": np.float64(0.1), "object": Plain()},
            "rng_state": {
                "python": random.getstate(),
                "numpy": np.random.get_state(),
                "torch": torch.get_rng_state(),
            },
            "loss": np.arange(6.0).reshape(2, 3),
            "module": module.state_dict(),
            "path": tmp_path,
            "set": {1, 2},
        },
        tmp_path / "ckpt-150.pt",
    )
    assert_holds(tmp_path / "ckpt-150.pt", trained())
    assert read_forecast(tmp_path / "ckpt-150.pt").step == 150


def test_nothing_that_a_file_names_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "run"
    torch.save({"model_state_dict": trained(), "other": [Malice(marker)], Malice(marker): 1}, tmp_path / "f.pt")
    assert_holds(tmp_path / "f.pt", trained())
    assert not marker.exists()
    content = TorchFile(tmp_path / "f.pt").content
    assert isinstance(content, dict)
    assert isinstance(content["other"][0], Inert)
    assert pickle.loads(pickle.dumps([Malice(marker)])) == [0]
    assert marker.exists(), "the test's own file would not have run anything"


@pytest.mark.parametrize(
    "pickled",
    [
        b"cbuiltins\nexec\n(S'raise SystemExit'\ntR.",
        b"cos\nsystem\n}S'__new__'\nNsb.",
        b"ctorch._utils\n_rebuild_tensor_v2\n}S'x'\nNsb.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'__init__'\nNstb.",
        b"ccollections\nOrderedDict\n(N}S'get'\nNstb.",
        b"ctorch\nFloatStorage\n(N}S'itemsize'\nI1\nstb.",
        b"S'storage'\nQ.",
        b"",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    ],
)
def test_a_pickle_made_by_hand_runs_nothing_and_changes_nothing(tmp_path: Path, pickled: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "f.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    with pytest.raises(SpardaError, match=r"f\.pt: (its pickle cannot be read|holds no tensor named)"):
        read_forecast(tmp_path / "f.pt")
    torch.save(trained(), tmp_path / "good.pt")
    assert_holds(tmp_path / "good.pt", trained())


def test_a_file_of_the_older_form_is_refused_unread(tmp_path: Path) -> None:
    marker = tmp_path / "run"
    torch.save({"a": Malice(marker)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(SpardaError, match=r"not a zip archive as torch\.save writes"):
        read_forecast(tmp_path / "old.pt")
    assert not marker.exists()


def test_a_tensor_that_reaches_beyond_its_values_is_refused(tmp_path: Path) -> None:
    name = tensor_name("forecast", 0)
    torch.save({name: torch.ones(32, 48)}, tmp_path / "f.pt")
    with zipfile.ZipFile(tmp_path / "f.pt") as archive, zipfile.ZipFile(tmp_path / "g.pt", "w") as other:
        for entry in archive.namelist():
            # 32 rows become 33 of 48: the shape (K 32, K 48) of the pickle.
            other.writestr(entry, archive.read(entry).replace(b"K K0", b"K!K0"))
    with pytest.raises(SpardaError, match=r"of shape \[33, 48\] reaches beyond its values"):
        read_forecast(tmp_path / "g.pt")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"model.norm.weight": torch.ones(3)}, "holds no tensor named as"),
        ({"q_future_proj.weight": torch.ones(2, 2)}, "q_future_proj.weight is not of the form"),
        ({tensor_name("forecast", 0): torch.ones(2, 2, dtype=torch.int64)}, "not of a floating type"),
        ({tensor_name("forecast", 0): 3}, "is no plain tensor"),
        (
            {tensor_name("forecast", 0): torch.ones(2), "module." + tensor_name("forecast", 0): torch.ones(2)},
            "has q_future_proj of layer 0 twice",
        ),
    ],
)
def test_a_file_without_a_readable_forecast_is_refused(tmp_path: Path, state: dict[str, Any], said: str) -> None:
    torch.save(state, tmp_path / "f.pt")
    with pytest.raises(SpardaError, match=said):
        read_forecast(tmp_path / "f.pt")


def test_a_missing_file_and_an_empty_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(SpardaError, match=r"no\.pt: there is no such file"):
        read_forecast(tmp_path / "no.pt")
    with pytest.raises(SpardaError, match="holds no file ending in"):
        read_forecast(tmp_path)


def test_of_a_folder_the_best_checkpoint_is_read_then_the_latest_then_the_only_one(tmp_path: Path) -> None:
    def added(name: str) -> str:
        torch.save(trained(), tmp_path / name)
        return chosen_file(tmp_path).name

    assert added("indexer.pt") == "indexer.pt"
    with pytest.raises(SpardaError, match="holds 2 files"):
        added("other.pth")
    assert added("ckpt-950.pt") == "ckpt-950.pt"
    assert added("ckpt-1000.pt") == "ckpt-1000.pt"
    assert added("ckpt-best-acc0.8123-step400.pt") == "ckpt-best-acc0.8123-step400.pt"
    assert added("ckpt-best-acc0.79-step900.pt") == "ckpt-best-acc0.8123-step400.pt"
    assert read_forecast(tmp_path).source == tmp_path / "ckpt-best-acc0.8123-step400.pt"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_written_forecast_comes_back(tmp_path: Path, suffix: str) -> None:
    weights = random_weights(SHAPE, "cpu")
    file = tmp_path / f"f{suffix}"
    write_forecast(file, weights, step=12, extra={"sparse_config": {"topk": 96}})
    found, own = read_forecast(file), forecast_of(weights)
    assert [*found.rows["forecast"]] == [0, 1, 2]
    assert [*found.rows["current"]] == [0]
    assert all(torch.equal(t, own.rows[q][i]) for q, layers in found.rows.items() for i, t in layers.items())
    assert [f.name for f in tmp_path.iterdir()] == [file.name]


def test_a_written_forecast_is_the_public_dictionary_and_no_larger_than_its_rows(tmp_path: Path) -> None:
    weights = random_weights(SHAPE, "cpu")
    write_forecast(tmp_path / "f.pt", weights, step=12, lookahead=2)
    saved = torch.load(tmp_path / "f.pt", weights_only=True)
    state = saved["model_state_dict"]
    assert saved["step"] == 12
    assert set(state) == {f"model.layers.{i}.self_attn.q_future_proj.weight" for i in range(3)} | {
        f"model.layers.{i}.self_attn.q_curr_proj.weight" for i in range(2)
    }
    assert all(t.untyped_storage().nbytes() == 32 * 48 * 2 for t in state.values())


def test_missing_layers_are_named(tmp_path: Path) -> None:
    state = trained()
    del state[tensor_name("forecast", 1)], state[tensor_name("current", 0)]
    torch.save(state, tmp_path / "f.pt")
    with pytest.raises(
        SpardaError, match=r"2 missing \(model\.layers\.1\.self_attn\.q_future_proj\.weight, model\.layers\.0\."
    ):
        read_forecast(tmp_path / "f.pt").check_fits(SHAPE)


def test_the_last_layers_forecast_is_not_asked_for(tmp_path: Path) -> None:
    state = trained()
    del state[tensor_name("forecast", 2)]
    torch.save(state, tmp_path / "f.pt")
    forecast = read_forecast(tmp_path / "f.pt")
    forecast.check_fits(SHAPE, lookahead=1)
    with pytest.raises(SpardaError, match="for lookahead 0"):
        forecast.check_fits(SHAPE, lookahead=0)
