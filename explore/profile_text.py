"""A profile for a reader: its machine, where and how it was measured, how far off it is, and where it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from sparda.calibrate.profile import BASE, MEASURED, Profile
from sparda.calibrate.transfer import RULES
from sparda.engine.loader import to_plain
from sparda.explore.errors_text import band_text, errors_text
from sparda.explore.text import GIB, columns, wrapped


def text_of_profile(profile: Profile) -> str:
    """Machine, sessions, held-out errors, envelope and the tables' own errors, in 80 columns."""
    m = profile.machine
    envelope = [[axis, f"{low:g}", f"{high:g}"] for axis, (low, high) in profile.envelope.items()]
    return "\n".join(
        [
            f"{profile.label}: {m.gpu}, model {profile.model}.",
            *([f"Folder: {profile.folder}"] if profile.tier == MEASURED else []),
            wrapped(
                f"Machine: {m.sms} SMs, HBM {m.hbm_gb_s:,.0f} GB/s, link {m.link_h2d_gb_s:.1f} GB/s to the GPU and "
                f"{m.link_d2h_gb_s:.1f} GB/s back, {m.hbm_capacity_bytes / GIB:.0f} GiB of GPU memory, "
                f"{m.host_pinned_bytes / GIB:.0f} GiB of host memory."
            ),
            wrapped(band_text(profile.band)),
            "",
            _origin(profile),
            "",
            columns(["measured", "from", "to"], envelope),
            *(["", errors_text(profile.errors)] if profile.tier == MEASURED else []),
        ]
    )


def plain_profile(profile: Profile) -> dict[str, object]:
    """The same as plain data: sessions with their whole provenance and counts of rows."""
    counts = _counts(profile)
    return {
        "profile": profile.name,
        "tier": profile.tier,
        "model": profile.model,
        "folder": str(profile.folder),
        "machine": to_plain(profile.machine),
        "band": to_plain(profile.band),
        "errors": to_plain(profile.errors),
        "envelope": {axis: list(ends) for axis, ends in profile.envelope.items()},
        "sessions": {
            name: {**facts, "rows": dict(counts.get(name, {}))} for name, facts in profile.store.provenance.items()
        },
    }


def _counts(profile: Profile) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for r in profile.store.rows():
        found.setdefault(r.session, Counter())[r.kind] += 1
    return found


def _origin(profile: Profile) -> str:
    """The sessions that measured it, or by what rules another machine's costs were carried over."""
    if profile.tier == MEASURED:
        return _sessions(profile)
    start = f"Nothing was measured on it: costs and envelope are those of {BASE}, carried over."
    return "\n".join(wrapped(sentence) for sentence in (start, *(f"{rule[0].upper()}{rule[1:]}." for rule in RULES)))


def _sessions(profile: Profile) -> str:
    counts = _counts(profile)
    rows = [
        [
            name,
            str(facts.get("utc", "-"))[:16],
            str(facts.get("driver", "-")),
            str(facts.get("torch", "-")),
            str(facts.get("commit", "-"))[:10],
            _clock(facts),
            f"{counts[name].total():,}" if name in counts else "0",
        ]
        for name, facts in profile.store.provenance.items()
    ]
    return columns(["session", "UTC", "driver", "torch", "commit", "SM MHz", "rows"], rows, left=5)


def _clock(facts: Mapping[str, object]) -> str:
    """The clock throughout where it was watched, marked where the GPU throttled."""
    watched = facts.get("watched")
    if not isinstance(watched, Mapping) or not isinstance(watched.get("sm_clock_mhz"), Mapping):
        return "-"
    return f"{watched['sm_clock_mhz']['median']:.0f}{'!' if watched.get('throttled_s') else ''}"
