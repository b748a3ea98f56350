"""How well predictions order the CTA counts of one cell: Kendall's tau over the pairs that measuring can tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from sparda.calibrate.holdout import HeldOut
from sparda.engine.config import Config, Workload

FEWEST_PAIRS = 3
"""Pairs without which an order says nothing."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """One cell: steps that differ in ``prefetch_ctas`` alone. ``pairs``: those further apart than their spreads."""

    workload: Workload
    pairs: int
    tau: float


def rankings(steps: Sequence[HeldOut]) -> list[Ranking]:
    """Every cell with enough pairs to tell, the worst first."""
    cells: dict[tuple[Workload, Config], list[HeldOut]] = {}
    for step in steps:
        cells.setdefault((step.workload, replace(step.config, prefetch_ctas=1)), []).append(step)
    found = []
    for (workload, _), members in cells.items():
        agree = [_agree(a, b) for a, b in combinations(members, 2) if _apart(a, b)]
        if len(agree) >= FEWEST_PAIRS:
            found.append(Ranking(workload, len(agree), sum(1 if a else -1 for a in agree) / len(agree)))
    return sorted(found, key=lambda r: r.tau)


def _apart(a: HeldOut, b: HeldOut) -> bool:
    """Whether measuring tells the two apart."""
    return abs(a.measured_us / b.measured_us - 1.0) > max(a.spread, b.spread)


def _agree(a: HeldOut, b: HeldOut) -> bool:
    return (a.measured_us - b.measured_us) * (a.predicted_us - b.predicted_us) > 0
