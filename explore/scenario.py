"""A scenario: which profile and model, what is to be decoded, what is turned, and the grid to search over."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sparda.calibrate.changes import MachineChange
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, read_toml, to_plain
from sparda.engine.shapes import ModelShape
from sparda.explore.models import PlannedModel, ShapeChange, model_of

CTA_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory that may be used, in GiB (2**30 bytes); 0 means what the profile's machine has.

    And how good the choice of blocks must be, by a quality profile: ``min_recall`` of what ``sparse`` chooses,
    ``max_ppl_increase`` of perplexity over full attention's, less 1. 0 means no floor.
    """

    gpu_gib: float = 0.0
    pinned_gib: float = 0.0
    min_recall: float = 0.0
    max_ppl_increase: float = 0.0

    def __post_init__(self) -> None:
        for name in ("gpu_gib", "pinned_gib"):
            if getattr(self, name) < 0:
                raise SpardaError(
                    f"limits.{name} is {getattr(self, name):g}; give GiB above 0, or 0 for what the machine has."
                )
        if not 0 <= self.min_recall <= 1:
            raise SpardaError(f"limits.min_recall is {self.min_recall:g}; it is a share, give 0 (no floor) to 1.")
        if self.max_ppl_increase < 0:
            raise SpardaError(
                f"limits.max_ppl_increase is {self.max_ppl_increase:g}; it is a share, give 0 (no floor) or more: "
                "0.05 allows 5 %."
            )

    @property
    def floors(self) -> tuple[str, ...]:
        """Names of the floors of quality that are set."""
        return tuple(name for name in ("min_recall", "max_ppl_increase") if getattr(self, name))


@dataclass(frozen=True, slots=True)
class Grid:
    """Axes to search. The first three span the cells of a CTA table; the others are tried in every cell.

    An empty axis is left to the command: a table keeps the configuration's value, a search tries its own range.
    """

    context_tokens: tuple[int, ...] = (32768, 131072)
    batch: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    miss_rate: tuple[float, ...] = (0.03, 0.06, 0.12)
    prefetch_ctas: tuple[int, ...] = CTA_COUNTS
    prefetch_warps: tuple[int, ...] = ()
    prefetch_stages: tuple[int, ...] = ()
    lookahead: tuple[int, ...] = ()
    top_k: tuple[int, ...] = ()
    resident_blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("context_tokens", "batch", "miss_rate", "prefetch_ctas"):
            if not getattr(self, name):
                raise SpardaError(f"grid.{name} is empty; give at least one value.")
        for axis in fields(self):
            for value in getattr(self, axis.name):
                _check_value(axis.name, value)

    @property
    def cells(self) -> list[Workload]:
        """Workloads of a table, context by context, then batch, then miss rate."""
        return [Workload(b, c, m) for c in self.context_tokens for b in self.batch for m in self.miss_rate]


def _check_value(axis: str, value: Any) -> None:
    """Refuse a value no scenario could use; a pair that cannot be together is the search's business."""
    if axis == "resident_blocks":
        if value < 0:
            raise SpardaError(f"grid.resident_blocks has {value}; give 0 (as many as top_k) or more.")
        return
    kind: Any = Workload if axis in ("context_tokens", "batch", "miss_rate") else Config
    try:
        kind(**{axis: value})
    except SpardaError as e:
        raise SpardaError(f"grid.{axis} has {value}: {e}") from None


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything a command needs to know, from defaults, a file and the command line, in that order."""

    profile: str = "h200-sxm.measured"
    model: str = "minicpm4.1-8b"
    """A known model's name, or the path of a Hugging Face config.json or of its folder."""
    link: str = ""
    """Another link than the profile's, by its name in machines.toml; "" leaves it."""
    quality: str = ""
    """A quality profile, by name, folder or file: what a choice of blocks costs the model. "" leaves that unsaid."""
    selection: str = ""
    """A quality profile whose choice gives the misses of every top-k and number of resident blocks; "" takes the
    stated ``miss_rate`` of workload and grid, which is not read otherwise."""
    workload: Workload = field(default_factory=Workload)
    config: Config = field(default_factory=Config)
    limits: Limits = field(default_factory=Limits)
    grid: Grid = field(default_factory=Grid)
    machine: MachineChange = field(default_factory=MachineChange)
    """Values of the profile's machine to change: a what-if."""
    shape: ShapeChange = field(default_factory=ShapeChange)
    """Sizes of the model to change: a what-if."""

    @property
    def planned_model(self) -> PlannedModel:
        """The model, changes included. Raises SpardaError for one that is unknown or does not fit the method."""
        return model_of(self.model, self.shape)

    @property
    def model_shape(self) -> ModelShape:
        """The model's sizes, changes included. Raises SpardaError as ``planned_model``."""
        return self.planned_model.shape

    @property
    def model_name(self) -> str:
        """What the model is called in an output."""
        return self.model_shape.name

    @property
    def cells(self) -> list[Workload]:
        """Workloads of a table. With a ``selection`` their miss rate is still to be found, by the configuration."""
        return replace(self.grid, miss_rate=self.grid.miss_rate[:1]).cells if self.selection else self.grid.cells

    def require_quality(self) -> None:
        """Refuse a floor that nothing is known to be held to."""
        for name in self.limits.floors if not self.quality else ():
            raise SpardaError(
                f"limits.{name} is {getattr(self.limits, name):g} but no quality profile says what a configuration "
                "keeps; give one with quality=NAME (see `sparda quality list`), or 0 for no floor."
            )


def default_scenario() -> Scenario:
    """MiniCPM4.1-8B on the measured H200: 16 sequences of 128K tokens, 6 % misses, top-k 96."""
    return Scenario()


def load_scenario(path: Path | None, overrides: Sequence[str] = (), profile: str | None = None) -> Scenario:
    """The scenario of a TOML file (the default one without), changed by ``section.key=value`` texts.

    Raises SpardaError for unknown keys (with the closest one), wrong types and impossible values.
    """
    scenario = read(Scenario, read_toml(path), where=str(path)) if path else default_scenario()
    if overrides:
        data = to_plain(scenario)
        for text in overrides:
            _override(data, text)
        # All at once: two values may only be allowed together (top_k and resident_blocks).
        scenario = read(Scenario, data, where="--set " + " --set ".join(overrides))
    # Not where a scenario is made: a file may set a floor and the command line name the profile.
    scenario.require_quality()
    return replace(scenario, profile=profile) if profile else scenario


def _override(data: dict[str, object], text: str) -> None:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key or not value:
        raise SpardaError(f"--set {text}: give section.key=value, for example --set config.prefetch_ctas=4.")
    section, dot, name = key.partition(".")
    table = data.get(section)
    if not dot:
        if isinstance(table, dict):
            raise SpardaError(
                f"--set {text}: {section!r} is a section; give one of its keys: {_names(section, table)}."
            )
        data[section] = _typed(value, listed=False)
    elif isinstance(table, dict):
        data[section] = {**table, name: _typed(value, listed=section == "grid")}
    else:
        sections = [k for k, v in data.items() if isinstance(v, dict)]
        near = difflib.get_close_matches(section, sections, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SpardaError(f"--set {text}: unknown section {section!r}; {hint}Sections: {', '.join(sections)}.")


def _names(section: str, table: dict[str, object]) -> str:
    return ", ".join(f"{section}.{name}" for name in table)


def _typed(value: str, listed: bool) -> object:
    """The value as TOML reads it; a bare word is a string, ``1,2,4`` on a grid axis a list."""
    if listed and not value.startswith("["):
        value = f"[{value}]"
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value
