"""Held-out errors: every measured whole step, simulated, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from sparda.calibrate.cases import config_of, workload_of
from sparda.calibrate.profile import ErrorBand
from sparda.calibrate.store import Row
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
