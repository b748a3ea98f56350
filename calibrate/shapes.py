"""Whole steps of other models' shapes, measured beside a profile: the rules that carry costs to a shape, held to them.

They lie in ``shapes/NAME`` of the profile's folder, each a store of its own with the cells file it was measured by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from sparda.calibrate.costs import FittedCosts
from sparda.calibrate.holdout import HeldOut, held_out
from sparda.calibrate.reshape import reshaped
from sparda.calibrate.store import Store
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, read_json
from sparda.engine.shapes import ModelShape, SparseSpec

FOLDER, CELLS = "shapes", "validation.json"


def measured_shapes(folder: Path) -> Iterator[tuple[ModelShape, Store]]:
    """Every other shape that was measured for the profile in ``folder``, and its rows; by folder name.

    Raises SpardaError where a cells file is damaged.
    """
    for path in sorted((folder / FOLDER).glob(f"*/{CELLS}")):
        plain = read_json(path).get("shape")
        if not isinstance(plain, Mapping):
            raise SpardaError(f"{path}: has no shape; write it again with `sparda validate --winners {path}`.")
        yield read(ModelShape, cast(Mapping[str, object], plain), where=f"{path}: shape"), Store(path.parent)


def other_shapes(folder: Path, costs: FittedCosts, measured: ModelShape, spec: SparseSpec) -> list[HeldOut]:
    """Their steps beside the predictions of ``costs`` of decoding ``measured``, carried over by rule."""
    found = []
    for shape, store in measured_shapes(folder):
        rows = [r for r in store.latest("validation") if r.us > 0]
        found += held_out(rows, reshaped(costs, measured, shape), shape, spec)
    return found
