"""Whether each term of the model earns its place: held-out steps predicted with it and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sparda.calibrate.costs import FittedCosts
from sparda.calibrate.holdout import error_band, held_out
from sparda.calibrate.judged import Term
from sparda.calibrate.store import Row
from sparda.engine.plan import Op, Plan
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.sim.costs import CostModel, Machine
from sparda.sim.wrapped import Wrapped

TERMS = {
    "slow-down": "compute beside a copy is slowed by its CTAs",
    "copy's share": "a copy is slowed by what computes beside it",
    "late CTAs": "CTAs that find no place beside attention start when it ends",
    "in order": "attention beside the CTAs that came after it is not slowed as by those before it",
    "copy's start": "a copy takes a while to its first byte",
    "join": "attention loses time to the choice beside it",
    "launches": "a graph with side streams launches its main stream's kernels later",
    "shared HBM": "what runs side by side shares the memory's bandwidth",
    "graph": "a step costs something beyond its kernels",
}
"""Terms by name; the simpler form is that there is no such thing."""

TIE = 0.001
"""Difference of the summed errors below which neither form is better."""


@dataclass(frozen=True)
class Without(Wrapped):
    """``costs`` but for one term."""

    term: str

    @property
    def machine(self) -> Machine:
        machine = self.costs.machine
        return replace(machine, hbm_gb_s=1e3 * machine.hbm_gb_s) if self.term == "shared HBM" else machine

    def slowdown(self, op: Op, plan: Plan, ctas: int) -> float:
        return 1.0 if self.term == "slow-down" else self.costs.slowdown(op, plan, ctas)

    def transfer_start_ns(self, plan: Plan) -> float:
        return 0.0 if self.term == "copy's start" else self.costs.transfer_start_ns(plan)

    def transfer_share(self, op: Op, plan: Plan, ctas: int) -> float:
        return 1.0 if self.term == "copy's share" else self.costs.transfer_share(op, plan, ctas)

    def places(self, op: Op, plan: Plan) -> int | None:
        return None if self.term == "late CTAs" else self.costs.places(op, plan)

    def join_ns(self, op: Op, plan: Plan) -> float:
        return 0.0 if self.term == "join" else self.costs.join_ns(op, plan)

    def step_ns(self, plan: Plan) -> float:
        return 0.0 if self.term == "graph" else self.costs.step_ns(plan)


def _without(costs: FittedCosts, term: str) -> CostModel:
    fitted = costs.fitted
    if term == "in order":
        return FittedCosts(costs.machine, replace(fitted, in_order=fitted.beside["attention"]))
    if term == "launches":
        return FittedCosts(costs.machine, replace(fitted, launches=tuple((b, 0.0) for b, _ in fitted.launches)))
    return Without(costs, term)


def terms(rows: Sequence[Row], costs: FittedCosts, shape: ModelShape, spec: SparseSpec) -> tuple[Term, ...]:
    """The duel of every term on the same steps."""
    whole = error_band(held_out(rows, costs, shape, spec))
    found = []
    for term in TERMS:
        simpler = error_band(held_out(rows, _without(costs, term), shape, spec))
        winner: Literal["term", "simpler", "tie"] = "tie"
        # By the sum of median and 95th percentile: a term may matter in a few steps alone.
        ours, theirs = whole.median + whole.p95, simpler.median + simpler.p95
        if abs(ours - theirs) > TIE:
            winner = "term" if ours < theirs else "simpler"
        found.append(Term(term, TERMS[term], whole.median, whole.p95, simpler.median, simpler.p95, winner))
    return tuple(found)
