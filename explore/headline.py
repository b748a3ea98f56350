"""What every account of one predicted step begins and ends with: how long it takes, how sure that is, what is amiss."""

from __future__ import annotations

from sparda.calibrate.profile import Profile
from sparda.explore.predict import Prediction, prediction_label
from sparda.explore.text import count, percent, wrapped


def opening(profile: Profile, p: Prediction, model: str) -> list[str]:
    """What was asked, the step's time and speed with their band, the memory."""
    w = p.workload
    return [
        wrapped(
            f"{model}, batch {w.batch}, {w.context_tokens} tokens, {percent(w.miss_rate)} misses; {p.config.policy}: "
            f"{prediction_label(p.config)}. Profile {profile.label}."
        ),
        wrapped(f"Step {p.step_us / 1e3:.3f} ms, {p.tokens_per_s:.0f} tokens/s ({_band(profile, p)})."),
        f"GPU memory {p.gpu_gib:.1f} GiB, pinned memory {p.pinned_gib:.1f} GiB.",
    ]


def warnings(p: Prediction) -> list[str]:
    """That it does not fit the machine, and that it lies outside the measured range; empty where neither is so."""
    found = [] if p.fits else [wrapped(f"Does not fit: {p.limit_reason}.")]
    return found if p.inside else [*found, wrapped(f"Outside the measured range: {'; '.join(p.outside_reasons)}.")]


def _band(profile: Profile, p: Prediction) -> str:
    band = profile.band_of(p.config)
    if p.low is None or p.high is None:
        return "error unknown, no step was held out"
    return (
        f"{p.low:.0f} to {p.high:.0f}: -/+ {percent(band.p90)}, the p90 error of {count(band.count, 'held-out step')}"
    )
