"""A profile whose kernels or copies are so many times as slow or fast: other kernels on the same machine."""

from __future__ import annotations

from dataclasses import replace

from sparda.calibrate.costs import CtaCurve
from sparda.calibrate.profile import Profile


def scaled(profile: Profile, kernel_factor: float, copy_factor: float) -> Profile:
    """``profile`` with every kernel's time alone times the first factor and every copy's rate times the second.

    What kernels and copies do to each other stays as it is: shares, not times.
    """
    if kernel_factor == 1.0 and copy_factor == 1.0:
        return profile
    fitted = profile.costs.fitted
    kernels = {
        kind: replace(cost, ns=tuple(tuple(ns * kernel_factor for ns in row) for row in cost.ns))
        for kind, cost in fitted.kernels.items()
    }
    # The copy's rate beside a kernel is kept as a rate; scaled with the rate alone it stays the same share.
    beside = {
        kind: tuple(replace(b, gb_s=_times(b.gb_s, copy_factor)) for b in batches)
        for kind, batches in fitted.beside.items()
    }
    made = replace(fitted, kernels=kernels, transfer=_times(fitted.transfer, copy_factor), beside=beside)
    return replace(profile, costs=replace(profile.costs, fitted=made, _memo={}))


def _times(curves: tuple[CtaCurve, ...], factor: float) -> tuple[CtaCurve, ...]:
    return tuple(replace(c, values=tuple(v * factor for v in c.values)) for c in curves)
