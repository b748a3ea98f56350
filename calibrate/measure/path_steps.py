"""Whole steps of sparda by every transfer path of the host: the hold-out for a simulator of these paths."""

from __future__ import annotations

from collections.abc import Iterator

from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.measure.parts import Case
from sparda.calibrate.measure.steps import FULL, measure_step, step
from sparda.engine.config import Config, Workload
from sparda.engine.shapes import ModelShape

BATCHES = (4, 16, 64)
MISSES = (0.03, 0.06, 0.12)
TRANSFERS = ("gather", "blocks", "batch")
REPEATS = 8


def path_cases() -> Iterator[tuple[Workload, Config]]:
    """Grouped by what costs time to set up. Steps that read host memory in place are in the part ``steps``."""
    for batch in BATCHES:
        for miss in MISSES:
            for transfer in TRANSFERS:
                yield Workload(batch, FULL, miss), Config(transfer=transfer)


def cases(shape: ModelShape) -> Iterator[Case]:
    """Every row of ``measure_path_steps``."""
    return (step("step", workload, config) for workload, config in path_cases())


def measure_path_steps(bench: Bench) -> None:
    """Rows of kind ``step``, as those of ``measure_steps``: sparda by every path of the host."""
    for workload, config in path_cases():
        if bench.due(step("step", workload, config)):
            measure_step(bench, workload, config, repeats=REPEATS)
