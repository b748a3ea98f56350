"""Held-out errors: every measured whole step, simulated, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from sparda.calibrate.cases import config_of, workload_of
from sparda.calibrate.interval import Intervals
from sparda.calibrate.judged import NO_BAND, ErrorBand
from sparda.calibrate.store import Row, Store
from sparda.engine.config import Config, Workload
from sparda.engine.policies import make_plan
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.sim.costs import CostModel
from sparda.sim.player import play


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One measured step and its prediction, microseconds. ``spread``: relative, run to run."""

    workload: Workload
    config: Config
    measured_us: float
    predicted_us: float
    spread: float

    @property
    def error(self) -> float:
        """Signed, as a share of the measured time: above 0 where the model is too slow."""
        return self.predicted_us / self.measured_us - 1.0


HELD_OUT = ("step", "policy")
"""Kinds of rows that are whole steps and never fitted."""


def by_host(row: Row) -> bool:
    """Whether the host carries the step's blocks: in Python, with a spread of its own."""
    return config_of(row).path not in ("", "uva")


def held_out_rows(store: Store) -> tuple[list[Row], list[Row]]:
    """Every measured whole step: those that the GPU does by itself, and those with work of the host in them."""
    rows = [r for kind in HELD_OUT for r in store.latest(kind) if r.us > 0]
    return [r for r in rows if not by_host(r)], [r for r in rows if by_host(r)]


def held_out(rows: Iterable[Row], costs: CostModel, shape: ModelShape, spec: SparseSpec) -> list[HeldOut]:
    """Simulate every row's configuration. None of these rows had a part in ``costs``."""
    found = []
    for row in rows:
        workload, config = workload_of(row), config_of(row)
        predicted = play(make_plan(shape, spec, workload, config), costs).step_us
        found.append(HeldOut(workload, config, row.us, predicted, row.spread))
    return found


def error_band(steps: Sequence[HeldOut]) -> ErrorBand:
    """Errors over all steps; quantiles by rank, nothing interpolated away."""
    if not steps:
        return NO_BAND
    errors = sorted(abs(s.error) for s in steps)

    def rank(share: float) -> float:
        return errors[min(len(errors) - 1, int(share * len(errors)))]

    return ErrorBand(
        count=len(errors),
        median=median(errors),
        p90=rank(0.9),
        p95=rank(0.95),
        worst=errors[-1],
        bias=median(s.error for s in steps),
        spread=median(s.spread for s in steps),
    )


def coverage(
    steps: Sequence[HeldOut],
    intervals: Intervals,
    shape: ModelShape,
    spec: SparseSpec,
    each: Callable[[int, int], None] = lambda done, total: None,
) -> float | None:
    """The share of steps that lie inside the interval of their prediction; None without steps.

    ``each`` is told (steps done, of how many).
    """
    inside = 0
    for done, step in enumerate(steps, 1):
        low, high = intervals.of(make_plan(shape, spec, step.workload, step.config))
        inside += low <= step.measured_us <= high
        each(done, len(steps))
    return inside / len(steps) if steps else None
