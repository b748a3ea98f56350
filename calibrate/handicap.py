"""The rules that carry costs over, tried on the measured GPU itself with part of it taken away."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from sparda.calibrate.cases import config_of, workload_of
from sparda.calibrate.costs import FittedCosts
from sparda.calibrate.holdout import HeldOut
from sparda.calibrate.store import Row
from sparda.calibrate.transfer import carried
from sparda.engine.policies import make_plan
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.sim.costs import Machine
from sparda.sim.fair import max_min_share
from sparda.sim.player import play


@dataclass(frozen=True, slots=True)
class Handicapped:
    """A step with part of the GPU taken away, measured and predicted, microseconds."""

    row: Row
    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """Signed, as a share of the measured time: above 0 where the model is too slow."""
        return self.predicted_us / self.measured_us - 1.0

    @property
    def held(self) -> HeldOut:
        """As any other step that had no part in the fit."""
        return HeldOut(workload_of(self.row), config_of(self.row), self.measured_us, self.predicted_us, self.row.spread)

    @property
    def taken(self) -> str:
        """What was taken away, in words."""
        case = self.row.case
        if case["held_sms"]:
            return f"{case['held_sms']} multiprocessors"
        if case["hbm_ctas"]:
            return f"GPU memory read by {case['hbm_ctas']} multiprocessors"
        return "a copy engine on the link" if case["link_rival"] != "none" else "nothing"


def left_of(machine: Machine, held_sms: int, hbm_ctas: int, copied: bool) -> Machine:
    """What is left of a machine beside rivals, whose demands are known before anything is measured beside them.

    A copy engine asks for all it can get of the link, which is shared max-min fair. GPU memory serves what is asked of
    it in the order of asking, so readers that ask for more than there is left get a share in proportion to what they
    ask for: each for what a multiprocessor reads alone.
    """
    link, hbm = machine.link_h2d_gb_s, machine.hbm_gb_s
    if copied:
        link, _ = max_min_share([link, machine.engine_h2d_gb_s], machine.engine_h2d_gb_s)
    hbm *= machine.hbm_gb_s / (machine.hbm_gb_s + hbm_ctas * machine.sm_read_gb_s)
    return replace(machine, sms=machine.sms - held_sms - hbm_ctas, link_h2d_gb_s=link, hbm_gb_s=hbm)


def handicapped(rows: Iterable[Row], costs: FittedCosts, shape: ModelShape, spec: SparseSpec) -> list[Handicapped]:
    """Every row of kind ``handicap`` with something taken away, predicted. None had a part in ``costs``."""
    found = []
    for row in rows:
        held, readers, copied = (
            int(row.number("held_sms")),
            int(row.number("hbm_ctas")),
            row.case["link_rival"] != "none",
        )
        if not (held or readers or copied):
            continue
        plan = make_plan(shape, spec, workload_of(row), config_of(row))
        left = carried(costs, left_of(costs.machine, held, readers, copied), shape)
        found.append(Handicapped(row, row.us, play(plan, left).step_us))
    return found
