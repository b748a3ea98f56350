"""Validation: a file of cells to measure, with predictions in, and verdicts on what was measured.

The machine that measures reads the file and needs no simulator; verdicts need the file and the rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, read_json, to_plain, write_json
from sparda.explore.cells import CellVerdict, cell_verdict, public_ctas

if TYPE_CHECKING:
    from sparda.explore.predict import Predictor
    from sparda.explore.scenario import Scenario

SCHEMA = 1
FILE = "validation.json"
"""Name of the cells file in a profile's folder."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A configuration to measure and its predicted step, microseconds."""

    config: Config
    predicted_us: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload, the configuration the search chose for it, and all that is to be measured there.

    ``runs`` holds the chosen configuration first, then every CTA count of the grid with the chosen lookahead,
    warps and stages (16 and 32, the public counts, among them), then the chosen count with other lookaheads.
    """

    workload: Workload
    chosen: Config
    public_ctas: int
    runs: tuple[PlannedRun, ...]


@dataclass(frozen=True, slots=True)
class Cells:
    """A cells file: ``{"schema": 1, "profile", "model", "cells": [Cell, ...]}``, read by ``loader.read``."""

    schema: int
    profile: str
    model: str
    cells: tuple[Cell, ...]


def winners(
    predictor: Predictor, scenario: Scenario, path: Path | None = None, each: Callable[[], None] = lambda: None
) -> Cells:
    """Choose for every cell of the scenario's grid, and write the cells file where a path is given.

    Cells whose chosen configuration does not fit the GPU's memory are left out: nobody could measure them; and so are
    those in which nothing keeps the floors of quality: nobody would use them. Where
    only pinned memory is short, the engine measures with sequences that share host blocks, at the same speed.
    """
    from sparda.explore.space import Space, enumerate_space, noise_of, pick

    space = Space.of_table(scenario.grid, scenario.config, predictor.resident_times)
    noise = noise_of(predictor.profile)
    cells = []
    for workload in scenario.cells:
        best = pick(enumerate_space(predictor, space, workload, scenario.config), noise).best
        each()
        if best.gpu_over_gib <= 0 and not best.broken.reason:
            cells.append(_cell(predictor, space.prefetch_ctas, space.lookahead, best.workload, best.config))
    if not cells:
        raise SpardaError(
            "no cell of the grid fits the GPU's memory and keeps the floors of quality; give smaller batches or "
            "contexts, or lower floors."
        )
    found = Cells(SCHEMA, predictor.profile.name, predictor.shape.name, tuple(cells))
    if path:
        write_json(path, found)
    return found


def _cell(
    predictor: Predictor, counts: Sequence[int], lookaheads: Sequence[int], workload: Workload, chosen: Config
) -> Cell:
    ctas = [replace(chosen, prefetch_ctas=n) for n in sorted({*counts, 16, 32})]
    ahead = [replace(chosen, lookahead=n) for n in lookaheads]
    configs = dict.fromkeys([chosen, *ctas, *ahead])
    runs = tuple(PlannedRun(c, predictor(workload, c).step_us) for c in configs)
    return Cell(workload, chosen, public_ctas(workload.batch), runs)


def read_cells(path: Path) -> Cells:
    """A cells file. Raises SpardaError where it is missing, damaged or of another schema."""
    data = read_json(path)
    if data.get("schema") != SCHEMA:
        raise SpardaError(f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA}; write the cells again.")
    return read(Cells, data, where=str(path))


def verdicts(cells: Cells, rows: Sequence[Row]) -> list[CellVerdict]:
    """A verdict on every cell: contradictions first (worst first), then confirmed cells, then those not measured."""
    order = {"no": 0, "yes": 1}
    found = [
        cell_verdict(c.workload, c.chosen, rows, [(r.config, r.predicted_us) for r in c.runs]) for c in cells.cells
    ]
    return sorted(found, key=lambda v: (order.get(v.confirmed, 2), -(v.regret or 0.0), _place(v)))


def _place(v: CellVerdict) -> tuple[int, int, float]:
    return v.workload.context_tokens, v.workload.batch, v.workload.miss_rate


def measure_cells(cells_path: Path, out: Path, budget_s: float) -> None:
    """Measure the cells on this machine's GPU; rows of kind "validation" go to the store in ``out``."""
    from sparda.calibrate.measure import validate as measuring

    measuring.run(cells_path, out, budget_s)


@dataclass(frozen=True, slots=True)
class Summary:
    """A validation in numbers. Errors and regrets are shares; None where nothing was measured."""

    confirmed: int
    contradicted: int
    not_run: int
    runs: int
    median_error: float | None
    max_error: float | None
    max_regret: float | None
    max_gain_public: float | None


def summary(found: Iterable[CellVerdict]) -> Summary:
    """Counts and extremes over all verdicts."""
    from statistics import median

    found = list(found)
    marks = [v.confirmed for v in found]
    errors = [abs(r.error) for v in found for r in v.runs if r.error is not None]
    regrets = [v.regret for v in found if v.regret is not None]
    gains = [v.gain_public for v in found if v.gain_public is not None]
    return Summary(
        confirmed=marks.count("yes"),
        contradicted=marks.count("no"),
        not_run=len(found) - marks.count("yes") - marks.count("no"),
        runs=sum(r.measured_us is not None for v in found for r in v.runs),
        median_error=median(errors) if errors else None,
        max_error=max(errors, default=None),
        max_regret=max(regrets, default=None),
        max_gain_public=max(gains, default=None),
    )


def verdict_dict(verdict: CellVerdict) -> dict[str, object]:
    """A verdict as plain values, properties included."""
    plain = to_plain(verdict)
    runs = cast(list[dict[str, object]], plain["runs"])
    for run, known in zip(runs, verdict.runs, strict=True):
        run["error"] = known.error
    return {**plain, "confirmed": verdict.confirmed, "error": verdict.error}
