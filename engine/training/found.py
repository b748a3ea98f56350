"""What a training left behind, for those who choose blocks with it."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from sparda.engine.errors import SpardaError
from sparda.engine.forecast_file import Forecast, read_forecast
from sparda.engine.shapes import SCORER_WIDTH, ModelShape
from sparda.engine.training import checkpoints
from sparda.engine.weights import ScorerWeights

_STUDENT = re.compile(r"d([0-4])-h([124])")
_SCORER = re.compile(r"scorer-(\d+)")


def trained_forecasts(path: Path, shape: ModelShape) -> dict[tuple[int, int], Forecast]:
    """Forecasts by (lookahead, heads per KV head).

    ``path``: the folder of a training, whose students are named by what they are (``d1-h1``); or one Forecast, file or
    folder, which looks one layer ahead where its name does not say otherwise. Whether they fit the model is for
    ``Forecast.check_fits`` to say. Raises SpardaError where there is none.
    """
    if not path.exists():
        raise SpardaError(f"{path}: there is no such file or folder; give what `sparda quality train` wrote to.")
    names = sorted(f.name for f in path.iterdir() if f.is_dir()) if path.is_dir() else []
    found = {(int(m[1]), int(m[2])): read_forecast(path / m[0]) for n in names if (m := _STUDENT.fullmatch(n))}
    if not found:
        alone, own = read_forecast(path), _STUDENT.fullmatch(path.name)
        found = {(int(own[1]) if own else 1, _heads(alone, shape)): alone}
    return found


def trained_scorer(path: Path, shape: ModelShape) -> tuple[int, ScorerWeights] | None:
    """The layer and the weights of a training's scorer, fp32 on the CPU; None where the folder has none."""
    names = sorted(f.name for f in path.iterdir() if f.is_dir()) if path.is_dir() else []
    for match in filter(None, map(_SCORER.fullmatch, names)):
        steps = checkpoints.steps_in(path / match[0])
        if steps:
            file = checkpoints.path_of(path / match[0], steps[-1])
            return int(match[1]), _scorer(file, checkpoints.read(file)["model_state_dict"], shape)
    return None


def _scorer(file: Path, values: dict[str, Tensor], shape: ModelShape) -> ScorerWeights:
    wanted: dict[str, tuple[int, ...]] = {"hidden": (SCORER_WIDTH, shape.d_model + shape.kv_width)}
    wanted |= {"hidden_bias": (SCORER_WIDTH,), "output": (SCORER_WIDTH,)}
    for name, size in wanted.items():
        held = values.get(f"scorer.{name}")
        if held is None or tuple(held.shape) != size:
            given = "missing" if held is None else list(held.shape)
            raise SpardaError(f"{file}: scorer.{name} is {given}, {shape.name} needs {list(size)}.")
    return ScorerWeights(*(values[f"scorer.{name}"] for name in wanted))


def _heads(forecast: Forecast, shape: ModelShape) -> int:
    rows = next((t for layers in forecast.rows.values() for t in layers.values()), None)
    return max(1, len(rows) // shape.kv_width) if rows is not None else 1
