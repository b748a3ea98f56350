"""Misses against resident blocks: what a choice that moves from step to step costs, by how many blocks are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from sparda.engine.errors import SpardaError


@dataclass(frozen=True, slots=True)
class MissCurve:
    """Missed blocks per step, as a share of the free picks, against slots of a (layer, sequence, KV head).

    A free pick is a chosen block that is not forced; forced blocks hold slots and never miss. ``ratio`` is slots less
    forced blocks over free picks, ascending from 1.0: in these terms a curve is carried from one top-k to another.
    ``missed`` never rises. Evictions are least recently chosen first.
    """

    ratio: tuple[float, ...]
    missed: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.ratio) != len(self.missed) or not self.ratio or self.ratio[0] != 1.0:
            raise SpardaError(
                f"a miss curve of {len(self.ratio)} ratios from {self.ratio[:1]} and {len(self.missed)} shares; give "
                "as many of one as of the other, the first ratio 1."
            )
        if any(b <= a for a, b in pairwise(self.ratio)):
            raise SpardaError(f"a miss curve's ratios must ascend; given {list(self.ratio)}.")
        if any(b > a for a, b in pairwise(self.missed)) or not all(0.0 <= m <= 1.0 for m in self.missed):
            raise SpardaError(
                f"a miss curve's shares lie between 0 and 1 and do not rise with more slots; given {list(self.missed)}."
            )

    def at(self, ratio: float) -> float:
        """Missed share of the free picks with slots for ``ratio`` (at least 1) times the free picks.

        A measured point is returned exactly. Between two, along the power law through both (the straight line where one
        is 0). Beyond the last, its own share: an upper bound.
        """
        if ratio < 1.0:
            raise SpardaError(
                f"slots for {ratio:g} times the free picks; every chosen block needs one: give 1 or more."
            )
        if ratio >= self.ratio[-1]:
            return self.missed[-1]
        points = zip(self.ratio, self.missed, strict=True)
        for (low, first), (high, last) in pairwise(points):
            if low <= ratio < high:
                if first <= 0.0 or last <= 0.0:
                    return first + (last - first) * (ratio - low) / (high - low)
                # `first` comes back exactly at `low`: the power is then 0.
                return float(first * (last / first) ** (math.log(ratio / low) / math.log(high / low)))
        return self.missed[-1]

    def measured_to(self, top_k: int, slots: int, forced: int) -> bool:
        """Whether the curve reaches as far as so many slots."""
        return _ratio(top_k, slots, forced) <= self.ratio[-1]

    def miss_rate(self, top_k: int, slots: int, forced: int) -> float:
        """Missed blocks per step as a share of ``top_k``, as ``Workload.miss_rate`` states it."""
        free = top_k - forced
        return self.at(_ratio(top_k, slots, forced)) * free / top_k if free > 0 else 0.0


def _ratio(top_k: int, slots: int, forced: int) -> float:
    return (slots - forced) / (top_k - forced) if top_k > forced else math.inf
