"""Parts of a quality measurement as files: what is there is not measured again."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

from sparda.calibrate.measure.quality.dynamics import Sets
from sparda.calibrate.measure.quality.recall import Tally
from sparda.calibrate.measure.quality.retrieved import Trial
from sparda.calibrate.measure.quality.scope import choice_key
from sparda.calibrate.quality import Choice
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, read_json, write_bytes, write_json

T = TypeVar("T")
FOLDER = "parts"
ABOUT = "measured.json"


@dataclass(frozen=True, slots=True)
class _Tallies:
    tallies: tuple[Tally, ...]


@dataclass(frozen=True, slots=True)
class _Losses:
    runs: tuple[float, ...]


class Store:
    """A folder of parts of one measurement. ``about`` says of what, by name: what was said before must be the same.

    Raises SpardaError where the folder holds parts of another model, other projections or other windows.
    """

    def __init__(self, out: Path, about: Mapping[str, str]) -> None:
        self.folder = out / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / ABOUT
        before = cast(dict[str, str], read_json(path)) if path.exists() else {}
        for name, value in about.items():
            if before.get(name, value) != value:
                raise SpardaError(
                    f"{path}: the parts there were measured with another {name} ({before[name]}; now {value}); give "
                    "another folder, or delete this one to measure anew."
                )
        if {**before, **about} != before:
            write_json(path, {**before, **about})

    def tallies(self, document: str) -> dict[Choice, Tally]:
        part = self._read(_Tallies, self.folder / f"recall-{document}.json")
        return {tally.choice: tally for tally in part.tallies} if part else {}

    def write_tallies(self, document: str, tallies: Sequence[Tally]) -> None:
        write_json(self.folder / f"recall-{document}.json", _Tallies(tuple(tallies)))

    def runs(self, document: str, choice: Choice | None) -> tuple[float, ...] | None:
        """Mean losses, with full attention where there is no choice; ``None`` where they were not measured."""
        losses = self._read(_Losses, self._loss_path(document, choice))
        return losses.runs if losses else None

    def write_runs(self, document: str, choice: Choice | None, runs: Sequence[float]) -> None:
        path = self._loss_path(document, choice)
        path.parent.mkdir(exist_ok=True)
        write_json(path, _Losses(tuple(runs)))

    def trial(self, case: str) -> Trial | None:
        return self._read(Trial, self.folder / f"retrieval-{case}.json")

    def write_trial(self, case: str, trial: Trial) -> None:
        write_json(self.folder / f"retrieval-{case}.json", trial)

    def has_sets(self, document: str) -> bool:
        return self._sets_path(document).exists()

    def sets(self, document: str) -> Sets:
        path = self._sets_path(document)
        try:
            with np.load(path, allow_pickle=False) as file:
                return cast(Sets, file["sets"])
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise SpardaError(f"{path}: damaged ({error}); delete it to measure it again.") from None

    def write_sets(self, document: str, sets: Sets) -> None:
        path = self._sets_path(document)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, sets=sets)
        write_bytes(path, buffer.getvalue())

    def _sets_path(self, document: str) -> Path:
        return self.folder / f"sets-{document}.npz"

    def _loss_path(self, document: str, choice: Choice | None) -> Path:
        return self.folder / f"loss-{document}" / f"{choice_key(choice) if choice else 'dense'}.json"

    def _read(self, cls: type[T], path: Path) -> T | None:
        return read(cls, read_json(path), where=str(path)) if path.exists() else None
