"""Costs that stand on other costs: what is not overridden is theirs."""

from __future__ import annotations

from dataclasses import dataclass

from sparda.engine.plan import Op, Plan
from sparda.sim.costs import CostModel, Machine


@dataclass(frozen=True)
class Wrapped:
    """``costs`` themselves, for others to change in part."""

    costs: CostModel

    @property
    def machine(self) -> Machine:
        return self.costs.machine

    def alone_ns(self, op: Op, plan: Plan) -> float:
        return self.costs.alone_ns(op, plan)

    def slowdown(self, op: Op, plan: Plan, ctas: int) -> float:
        return self.costs.slowdown(op, plan, ctas)

    def transfer_start_ns(self, plan: Plan) -> float:
        return self.costs.transfer_start_ns(plan)

    def transfer_gb_s(self, plan: Plan, ctas: int) -> float:
        return self.costs.transfer_gb_s(plan, ctas)

    def transfer_share(self, op: Op, plan: Plan, ctas: int) -> float:
        return self.costs.transfer_share(op, plan, ctas)

    def places(self, op: Op, plan: Plan) -> int | None:
        return self.costs.places(op, plan)

    def join_ns(self, op: Op, plan: Plan) -> float:
        return self.costs.join_ns(op, plan)

    def issue_ns(self, op: Op, plan: Plan) -> float:
        return self.costs.issue_ns(op, plan)

    def step_ns(self, plan: Plan) -> float:
        return self.costs.step_ns(plan)
