"""Prediction intervals: a step played on costs drawn anew from what the calibration left unexplained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp
from random import Random

from sparda.calibrate.costs import Beside, CtaCurve, FittedCosts, KernelCost
from sparda.calibrate.residuals import CLASSES, Residuals, class_of
from sparda.engine.plan import Plan
from sparda.sim.player import play

DRAWS = 40
COVERED = 0.9
"""Share of measured steps that an interval should hold."""


@dataclass(frozen=True)
class Intervals:
    """Intervals of one profile's predictions; the same for the same residuals and seed.

    Each draw takes one residual of whole layers alone for all kernels, for every kind one of its own table, and for
    copies by class of CTAs one of whole layers beside them; a step is played on each.
    """

    costs: FittedCosts
    residuals: Residuals
    seed: int = 0
    draws: int = DRAWS

    @cached_property
    def drawn(self) -> tuple[FittedCosts, ...]:
        """The costs of every draw."""
        random = Random(self.seed)
        return tuple(self._draw(random) for _ in range(self.draws))

    def of(self, plan: Plan) -> tuple[float, float]:
        """Microseconds between which a measured step should lie with a chance of COVERED."""
        return covered(sorted(play(plan, costs).step_us for costs in self.drawn))

    def _draw(self, random: Random) -> FittedCosts:
        fitted, left = self.costs.fitted, self.residuals
        # Kinds in order of name: a dictionary read back from a file may have another.
        all_alike = _one(random, left.layers)
        kernels = {kind: exp(-all_alike - _one(random, left.kernels.get(kind, ()))) for kind in sorted(fitted.kernels)}
        slowed = {name: exp(-_one(random, left.slowed.get(name, ()))) for name in sorted(CLASSES)}
        moved = {name: exp(-_one(random, left.moved.get(name, ()))) for name in sorted(CLASSES)}
        made = replace(
            fitted,
            kernels={kind: _times(cost, kernels[kind]) for kind, cost in fitted.kernels.items()},
            beside={kind: tuple(_disturbed(b, slowed, moved) for b in rows) for kind, rows in fitted.beside.items()},
            in_order=tuple(_disturbed(b, slowed, moved) for b in fitted.in_order),
        )
        return FittedCosts(self.costs.machine, made)


def covered(ordered: Sequence[float]) -> tuple[float, float]:
    """The values between which COVERED of ``ordered`` lie, as many left out on either side."""
    # A further value falls into each of the n + 1 gaps around n values with the same chance.
    out = int((len(ordered) - 1 - COVERED * (len(ordered) + 1)) / 2)
    return ordered[out], ordered[-1 - out]


def _one(random: Random, found: Sequence[float]) -> float:
    """One of ``found``, its sign at random: a table is as often too high as too low. 0 without any."""
    if not found:
        return 0.0
    return random.choice(found) * random.choice((-1.0, 1.0))


def _times(cost: KernelCost, factor: float) -> KernelCost:
    return replace(cost, ns=tuple(tuple(ns * factor for ns in row) for row in cost.ns))


def _disturbed(beside: Beside, slowed: dict[str, float], moved: dict[str, float]) -> Beside:
    def curve(c: CtaCurve, factors: dict[str, float]) -> CtaCurve:
        return replace(c, values=tuple(v * factors[class_of(n)] for n, v in zip(c.ctas, c.values, strict=True)))

    return replace(
        beside,
        slowdown=tuple(curve(c, slowed) for c in beside.slowdown),
        gb_s=tuple(curve(c, moved) for c in beside.gb_s),
    )
