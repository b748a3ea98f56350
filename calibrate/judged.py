"""What measured steps say about a profile's predictions: error bands, terms that earned their place, intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparda.calibrate.residuals import Residuals


@dataclass(frozen=True, slots=True)
class ErrorBand:
    """Held-out errors of whole steps, as shares of the measured time: |predicted / measured - 1|."""

    count: int
    median: float
    p90: float
    p95: float
    worst: float
    bias: float
    """Median signed error: above 0 where the model is too slow."""
    spread: float
    """Median run-to-run spread of the measured steps themselves."""


@dataclass(frozen=True, slots=True)
class Term:
    """One term of the model: median and 95th percentile of held-out errors with it, and of the simpler form without.

    ``winner``: whose sum of the two is smaller; "tie" where they hardly differ.
    """

    name: str
    about: str
    median: float
    p95: float
    simpler_median: float
    simpler_p95: float
    winner: Literal["term", "simpler", "tie"]


NO_BAND = ErrorBand(count=0, median=0.0, p90=0.0, p95=0.0, worst=0.0, bias=0.0, spread=0.0)


@dataclass(frozen=True, slots=True)
class Judged:
    """Besides the error band of steps that the GPU does by itself.

    ``by_host``: the band of steps that have work of the host in them. ``coverage``: the share of the former that lie
    inside the interval of their prediction; None where there are none. ``residuals``: what intervals are drawn from.
    """

    by_host: ErrorBand
    residuals: Residuals
    coverage: float | None
    terms: tuple[Term, ...]
    by_machine: ErrorBand = NO_BAND
    """Of steps with part of the GPU taken away, predicted by the rules that carry costs to another machine."""
    by_shape: ErrorBand = NO_BAND
    """Of steps of other models' shapes, predicted by the rules that carry costs to another shape."""


UNJUDGED = Judged(NO_BAND, Residuals({}, (), {}, {}), None, ())
