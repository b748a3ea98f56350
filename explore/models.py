"""Models to plan for: known by name, read from a Hugging Face config.json, some of their sizes changed."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from sparda.engine.errors import SpardaError
from sparda.engine.model_config import planned_shape
from sparda.engine.shapes import MODELS, ModelShape


@dataclass(frozen=True, slots=True)
class ShapeChange:
    """Sizes of the model to change; 0 leaves one as it is. ``kv_bytes``: of one cached value, 1 for FP8."""

    layers: int = 0
    d_model: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    vocab: int = 0
    max_context: int = 0
    kv_bytes: int = 0

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            if not 0 < value <= 1 << 24:
                raise SpardaError(
                    f"shape.{name} is {value}; give a whole number from 1 to {1 << 24}, or 0 for the model's own."
                )

    @property
    def given(self) -> dict[str, int]:
        """Names and values of what is changed."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name)}


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model's sizes, and what of it a plan leaves out (none where the engine runs it as it is)."""

    shape: ModelShape
    notes: tuple[str, ...] = ()


@lru_cache(maxsize=256)
def model_of(model: str, change: ShapeChange) -> PlannedModel:
    """The model by name, or by the path of a config.json or its folder, changed as asked.

    Raises SpardaError where there is no such model, where the method does not fit it, and for sizes that cannot be.
    """
    found = _base(model)
    if not change.given:
        return found
    given = ", ".join(f"{name}={value}" for name, value in change.given.items())
    try:
        shape = replace(found.shape, **change.given, rope_factors=(), name=f"{found.shape.name}, {given}")
    except SpardaError as e:
        raise SpardaError(f"shape {given}: {e}") from None
    return PlannedModel(shape, found.notes)


def _base(model: str) -> PlannedModel:
    if model in MODELS:
        return PlannedModel(MODELS[model])
    path = Path(model)
    try:
        there = path.exists()
    except (OSError, ValueError):
        there = False
    if not there:
        raise SpardaError(
            f"unknown model {model!r}; known models: {', '.join(sorted(MODELS))}; or give the path of a Hugging Face "
            "config.json, or of its folder."
        )
    return PlannedModel(*planned_shape(path))
