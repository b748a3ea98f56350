"""Forecast checkpoints in the public SparDA format (arXiv 2606.04511): the trained rows of the fused projections.

Layer i's forecast is ``model.layers.{i}.self_attn.q_future_proj.weight`` and its current-layer query ``q_curr_proj``,
each [kv_heads * head_dim, d_model], KV head 0's rows first. Training saves them as ``model_state_dict`` of a torch.save
dictionary, beside its own state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from sparda.engine.errors import SpardaError
from sparda.engine.shapes import ModelShape
from sparda.engine.tensor_file import TensorFiles, save_torch, write_tensors
from sparda.engine.torch_file import Stored, TorchFile
from sparda.engine.weights import Weights

NAMES = {"forecast": "q_future_proj", "current": "q_curr_proj"}
"""Modules of a layer's attention, by our name of the selection query."""

WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "weights")
"""Keys under which a saved dictionary may hold the tensors."""

_QUERY = {module: query for query, module in NAMES.items()}
_WEIGHT = re.compile(r"(?:.*\.)?layers\.(\d+)\.self_attn\.(q_future_proj|q_curr_proj)\.weight")
_BEST = re.compile(r"ckpt-best-acc([0-9.]+)-step(\d+)\.pt")
_STEP = re.compile(r"ckpt-(\d+)\.pt")
_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")


@dataclass(frozen=True, slots=True)
class Forecast:
    """``rows[query][layer]`` [kv_width, d_model], query one of ``NAMES``; ``source`` is the file they came from."""

    rows: Mapping[str, Mapping[int, Tensor]]
    source: Path
    step: int | None = None
    """Optimizer steps of the training, where the file says."""

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """The layer's rows by query, in the order of a fused projection."""
        return {query: self.rows[query][layer] for query in NAMES if layer in self.rows.get(query, {})}

    def check_fits(self, shape: ModelShape, lookahead: int = 1, heads: int = 1) -> None:
        """Refuse a Forecast that is not the model's, or that has not so many ``heads`` per KV head.

        Each layer needs its forecast except the last ``lookahead``, which have no layer to look ahead to; each of the
        first ``lookahead`` needs its current-layer query. Raises SpardaError naming what is missing or misshapen.
        """
        wanted = [("forecast", i) for i in range(shape.layers - lookahead)]
        wanted += [("current", i) for i in range(min(lookahead, shape.layers))]
        missing = [tensor_name(q, i) for q, i in wanted if i not in self.rows.get(q, {})]
        size = (heads * shape.kv_width, shape.d_model)
        wrong = [
            f"{tensor_name(q, i)} {list(t.shape)}"
            for q, layers in self.rows.items()
            for i, t in layers.items()
            if tuple(t.shape) != size or i >= shape.layers
        ]
        parts = [f"{len(missing)} missing ({', '.join(missing[:5])})"] if missing else []
        if wrong:
            parts.append(f"{len(wrong)} that are not {list(size)} of {shape.layers} layers ({', '.join(wrong[:5])})")
        if parts:
            more = f", {heads} heads per KV head" if heads > 1 else ""
            raise SpardaError(
                f"{self.source}: no Forecast of {shape.name} for lookahead {lookahead}{more}: tensors "
                f"{' and '.join(parts)}; give one that was trained on this model."
            )


def tensor_name(query: str, layer: int) -> str:
    """The public name of a layer's rows for a selection query."""
    return f"model.layers.{layer}.self_attn.{NAMES[query]}.weight"


def read_forecast(path: Path) -> Forecast:
    """The Forecast of a torch.save file, a safetensors file, or a folder of checkpoints (see ``chosen_file``).

    A saved dictionary may be the tensors themselves or hold them under one of ``WRAPPERS``; names may begin with any
    prefix (``module.``). Other tensors and objects are skipped, none of them runs. Tensors are on the CPU, as stored.
    Raises SpardaError for a file of another form, one without such tensors, and one that has a layer's twice.
    """
    file = chosen_file(path) if path.is_dir() else path
    if file.suffix == ".safetensors":
        files = TensorFiles([file])
        return _forecast({name: files.read(name) for name in files.headers if _is_named(name)}, file, None)
    saved = TorchFile(file)
    table = _tensors_in(saved.content)
    if table is None:
        raise SpardaError(f"{file}: holds no tensor named as {tensor_name('forecast', 0)}; give a Forecast checkpoint.")
    step = saved.content.get("step") if isinstance(saved.content, dict) else None
    found = {}
    for name, value in table.items():
        if not isinstance(value, Stored):
            raise SpardaError(f"{file}: {name} is no plain tensor; save the values themselves.")
        found[name] = saved.read(value, name)
    return _forecast(found, file, step if isinstance(step, int) else None)


def chosen_file(folder: Path) -> Path:
    """The checkpoint of a folder to read: the best one by its name's accuracy, else that of the latest step.

    In a folder without names of that kind the only file of a known suffix. Raises SpardaError where that is not one.
    """
    names = sorted(f.name for f in folder.iterdir() if f.is_file() and f.suffix in _SUFFIXES)
    best = [(float(m[1].strip(".") or 0), int(m[2]), m[0]) for n in names if (m := _BEST.fullmatch(n))]
    if best:
        return folder / max(best)[2]
    steps = [(int(m[1]), m[0]) for n in names if (m := _STEP.fullmatch(n))]
    if steps:
        return folder / max(steps)[1]
    if len(names) == 1:
        return folder / names[0]
    held = f"{len(names)} files ({', '.join(names[:5])})" if names else f"no file ending in {', '.join(_SUFFIXES)}"
    raise SpardaError(f"{folder}: holds {held}; give the Forecast checkpoint's own path.")


def _is_named(name: object) -> bool:
    return isinstance(name, str) and any(module in name for module in _QUERY)


def _tensors_in(content: object, depth: int = 3) -> dict[str, object] | None:
    """The Forecast's part of a saved object, or None where it has none."""
    if not isinstance(content, dict) or not depth:
        return None
    found = {name: value for name, value in content.items() if _is_named(name)}
    if found:
        return found
    inner = (_tensors_in(content.get(key), depth - 1) for key in WRAPPERS)
    return next((table for table in inner if table is not None), None)


def _forecast(tensors: Mapping[str, Tensor], file: Path, step: int | None) -> Forecast:
    rows: dict[str, dict[int, Tensor]] = {query: {} for query in NAMES}
    for name, tensor in tensors.items():
        match = _WEIGHT.fullmatch(name)
        if match is None:
            raise SpardaError(f"{file}: {name} is not of the form {tensor_name('forecast', 0)}; rename or remove it.")
        layers = rows[_QUERY[match[2]]]
        if int(match[1]) in layers:
            raise SpardaError(f"{file}: has {match[2]} of layer {match[1]} twice; remove one of them.")
        layers[int(match[1])] = tensor
    if not tensors:
        raise SpardaError(f"{file}: holds no tensor named as {tensor_name('forecast', 0)}; give a Forecast checkpoint.")
    return Forecast(rows, file, step)


def forecast_of(weights: Weights, source: Path = Path("weights")) -> Forecast:
    """The Forecast rows in a model's fused projections, as views."""
    s = weights.shape
    rows: dict[str, dict[int, Tensor]] = {query: {} for query in NAMES}
    for index, layer in enumerate(weights.layers):
        for place, query in enumerate(layer.selection):
            start = s.q_width + (2 + place) * s.kv_width
            rows[query][index] = layer.fused[start : start + s.kv_width]
    return Forecast(rows, source)


def write_forecast(
    path: Path,
    weights: Weights,
    *,
    step: int = 0,
    lookahead: int = 1,
    base_model_path: str = "",
    extra: Mapping[str, object] | None = None,
) -> None:
    """Write a model's Forecast in the public format, whole or not at all; ``.safetensors`` holds the tensors alone.

    Kept: every layer's forecast and the current-layer queries of the first ``lookahead`` layers, which is what the
    public engine asks for with lookahead 1. ``extra``: further plain entries, such as ``sparse_config``. Raises
    SpardaError where rows are missing or the file cannot be written.
    """
    forecast = forecast_of(weights, path)
    forecast.check_fits(weights.shape, lookahead)
    tensors = {tensor_name("forecast", i): t for i, t in forecast.rows["forecast"].items()}
    tensors |= {tensor_name("current", i): t for i, t in forecast.rows["current"].items() if i < lookahead}
    if path.suffix == ".safetensors":
        write_tensors(path, tensors, {"format": "pt", "step": str(step)})
        return
    # A view would drag its whole fused projection into the file.
    values = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    content = {"model_state_dict": values, "step": step, "base_model_path": base_model_path, **(extra or {})}
    save_torch(path, content)
