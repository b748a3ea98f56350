"""How fast the simulator itself is."""

from __future__ import annotations

from time import perf_counter

from sparda.engine.plan import Plan
from sparda.sim.costs import CostModel
from sparda.sim.player import play


def steps_per_second(plan: Plan, costs: CostModel, seconds: float = 1.0) -> float:
    """Simulated steps per wall-clock second on one core, over at least ``seconds``; the first play is not counted."""
    play(plan, costs)
    steps, begun = 0, perf_counter()
    while (taken := perf_counter() - begun) < seconds or not steps:
        play(plan, costs)
        steps += 1
    return steps / taken
