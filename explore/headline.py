"""What every account of one predicted step begins and ends with: how long it takes, how sure that is, what is amiss."""

from __future__ import annotations

from sparda.calibrate.profile import Profile
from sparda.explore.predict import Prediction, prediction_label
from sparda.explore.quality import Quality
from sparda.explore.text import count, percent, wrapped


def opening(profile: Profile, p: Prediction, model: str, misses: str = "") -> list[str]:
    """What was asked, the step's time and speed with their band, the memory, the quality if it is known.

    ``misses``: what the miss rate rests on where it was not stated.
    """
    w = p.workload
    return [
        wrapped(
            f"{model}, batch {w.batch}, {w.context_tokens} tokens, {percent(w.miss_rate)} misses; {p.config.policy}: "
            f"{prediction_label(p.config)}. Profile {profile.label}."
        ),
        wrapped(f"Step {p.step_us / 1e3:.3f} ms, {p.tokens_per_s:.0f} tokens/s ({_band(profile, p)})."),
        f"GPU memory {p.gpu_gib:.1f} GiB, pinned memory {p.pinned_gib:.1f} GiB.",
        *([wrapped(f"Misses by resident blocks: {misses}.")] if misses else []),
        *(wrapped(line) for line in (quality_lines(p.quality) if p.quality else [])),
    ]


def quality_lines(q: Quality) -> list[str]:
    """A quality and what it was measured on, in sentences."""
    known = []
    if q.recall is not None:
        over = f" ({percent(q.spread.low)} to {percent(q.spread.high)} over documents)" if q.spread else ""
        known.append(f"recall of what sparse chooses {percent(q.recall)}{over}")
    if q.mass is not None:
        known.append(f"{percent(q.mass)} of the attention")
    if q.ppl_increase is not None:
        error = "" if q.standard_error is None else f" (standard error {100 * q.standard_error:.1f} points)"
        known.append(f"perplexity {percent(q.ppl_increase, sign=True)}{error}")
    lines = [f"Quality of {q.choice}: {', '.join(known)}; {q.tier}." if known else f"Quality: {q.tier}."]
    if q.as_many:
        lines.append(
            f"By number instead of share: {count(q.as_many.blocks, 'block')} cost perplexity "
            f"{percent(q.as_many.ppl_increase, sign=True)} where they were measured. Which way carries is not known."
        )
    return [*lines, f"Not known, {q.reason}."] if q.reason else lines


def warnings(p: Prediction) -> list[str]:
    """That it does not fit, breaks a floor of quality or lies outside the measured range; empty where none is so."""
    found = [] if p.fits else [wrapped(f"Does not fit: {p.limit_reason}.")]
    if p.broken.reason:
        found.append(wrapped(f"Breaks a floor of quality: {p.broken.reason}."))
    return found if p.inside else [*found, wrapped(f"Outside the measured range: {'; '.join(p.outside_reasons)}.")]


def _band(profile: Profile, p: Prediction) -> str:
    if p.low is None or p.high is None:
        return "error unknown, no step was held out"
    band = profile.band_of(p.config)
    return f"{p.low:.0f} to {p.high:.0f}: -/+ {percent(band.p90)}, {profile.band_says(p.config)}"
