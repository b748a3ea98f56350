"""Costs fitted to one GPU's kernel, link and co-run rows; what the simulator plays a plan with."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparda.engine.plan import Op, Plan
from sparda.sim.costs import Machine


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear through (xs, ys), xs ascending; the end values outside."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1]
    i = bisect_right(xs, x)
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Time of one kind alone, measured over batch and, for some kinds, a second axis.

    ``ns[i][j]`` at ``batches[i]`` and ``seconds[j]``; ``hbm_bytes[i][j]`` the least bytes moved there. A measured
    point is returned exactly; between points time is linear in either axis, since bytes are; outside, the
    boundary's share of HBM bandwidth is held.
    """

    second: str
    batches: tuple[float, ...]
    seconds: tuple[float, ...]
    ns: tuple[tuple[float, ...], ...]
    hbm_bytes: tuple[tuple[float, ...], ...]

    def at(self, batch: float, second: float, hbm_bytes: float) -> float:
        def surface(table: tuple[tuple[float, ...], ...]) -> float:
            across = [interpolate(self.seconds, row, second) for row in table]
            return interpolate(self.batches, across, batch)

        known = surface(self.hbm_bytes)
        # Launch and latency do not shrink with the bytes, so only growth beyond the table is scaled.
        return surface(self.ns) * max(1.0, hbm_bytes / known if known else 1.0)
