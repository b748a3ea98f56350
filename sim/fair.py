"""Max-min fairness: how flows that ask for more than there is share one capacity."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum


def max_min_share(demands: Sequence[float], capacity: float) -> list[float]:
    """What each demand gets of ``capacity``, in the order and the unit of ``demands``.

    Progressive filling: the smallest demands are met whole while an equal split of the rest covers them; those
    left over get equal shares. Where all demands fit, each gets exactly what it asked for. The order of the
    flows changes nothing. A capacity below zero counts as zero.
    """
    # fsum, not sum: its result does not depend on the order of the demands.
    if fsum(demands) <= capacity:
        return list(demands)
    left = max(0.0, capacity)
    by_size = sorted(range(len(demands)), key=demands.__getitem__)
    given = [0.0] * len(demands)
    for place, flow in enumerate(by_size):
        equal = left / (len(demands) - place)
        if demands[flow] > equal:
            # Every flow from here on asks for more: one value for all, so that equals get bitwise the same.
            for unmet in by_size[place:]:
                given[unmet] = equal
            break
        given[flow] = demands[flow]
        left -= demands[flow]
    return given
