"""The last section of a report: every session's provenance, the envelope, the methods, and how to do it again."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from sparda.calibrate.profile import Profile, profile_names
from sparda.calibrate.store import KINDS
from sparda.engine.config import Config
from sparda.engine.loader import to_plain
from sparda.explore.predict import config_dict
from sparda.explore.report_answer import tier
from sparda.explore.report_data import Report
from sparda.explore.report_errors import left_out
from sparda.explore.report_page import Html, count, lines, paragraph, table, tag
from sparda.explore.scenario import Grid, Scenario
from sparda.explore.text import GIB

FACTS = {"GPU": "gpu", "driver": "driver", "torch": "torch", "triton": "triton", "CUDA": "cuda"}
WHAT = {
    "link": "the link alone: copies by CTA, warp and stage count",
    "kernel": "one kernel alone, over batch and a second axis",
    "corun": "a kernel beside a prefetch: how far each slows the other",
    "step": "whole decode steps, held out from every fit",
    "validation": "whole decode steps of what the search chose, and of its neighbours",
    "policy": "whole decode steps of every policy, side by side",
    "residency": "whole decode steps by resident blocks, where blocks that were chosen come back",
    "handicap": "whole decode steps on a GPU with part of it taken away meanwhile",
    "training": "steps of training a Forecast, which no decode step is predicted from",
}
WHOLE = ("step", "validation", "policy", "residency", "handicap")
"""Kinds of rows that are whole steps."""


def sources(r: Report) -> Html:
    """Provenance, methods, aliasing, the tables' own errors, envelope and commands."""
    m = r.profile.machine
    return lines(
        [
            paragraph(
                f"Profile {r.profile.label}: {tier(r)}; kernels of {r.profile.model}. The simulator works with "
                f"{m.sms} SMs, {m.hbm_gb_s:,.0f} GB/s of GPU memory, a link of {m.link_h2d_gb_s:.1f} GB/s to and "
                f"{m.link_d2h_gb_s:.1f} GB/s from the GPU, {m.hbm_capacity_bytes / GIB:.0f} GiB on the GPU and "
                f"{m.host_pinned_bytes / GIB:.0f} GiB of pinned host memory (1 GB is 1e9 bytes, 1 GiB is 2**30)."
            ),
            tag("h3", "Sessions"),
            _sessions(r),
            tag("h3", "How it was measured"),
            _methods(r),
            paragraph(_aliased(r)),
            tag("h3", "Left out and predicted"),
            left_out(r.profile),
            tag("h3", "Measured range"),
            _envelope(r.profile),
            tag("h3", "Do it again"),
            paragraph("Without a GPU, from the rows that come with the profile:"),
            tag("pre", tag("code", "\n".join(commands(r)))),
            paragraph(_note(r.profile), kind="note"),
        ]
    )


def _sessions(r: Report) -> Html:
    known = r.profile.store.provenance
    names = list(dict.fromkeys([*r.profile.sessions, *known, *(row.session for row in r.rows)]))
    if not names:
        return paragraph("The profile names no session and has no rows: nothing in it was measured.")
    facts = [known.get(name, {}) for name in names]
    counts = [Counter(row.kind for row in r.rows if row.session == name) for name in names]
    rows = [
        ["UTC", *(_fact(f, "utc") for f in facts)],
        *([title, *(_fact(f, key) for f in facts)] for title, key in FACTS.items()),
        ["PCIe", *map(_pcie, facts)],
        ["clocks, MHz", *map(_clocks, facts)],
        ["host", *(_fact(f, "host_cpu") for f in facts)],
        ["commit", *(_fact(f, "commit") for f in facts)],
        *([f"{kind} rows", *(f"{c[kind]:,}" for c in counts)] for kind in KINDS),
    ]
    # Sessions side by side: what differs between two is seen along a line.
    return table(["session", *names], rows, left=1 + len(names))


def _fact(facts: Mapping[str, object], key: str) -> str:
    return str(facts.get(key) or "-")


def _pcie(facts: Mapping[str, object]) -> str:
    if "pcie_gen" not in facts and "pcie_width" not in facts:
        return "-"
    return f"gen {_fact(facts, 'pcie_gen')} x{_fact(facts, 'pcie_width')}"


def _clocks(facts: Mapping[str, object]) -> str:
    parts = (("SM", "sm_clock_mhz"), ("of", "sm_clock_max_mhz"), ("memory", "memory_clock_mhz"))
    return " ".join(f"{name} {facts[key]}" for name, key in parts if facts.get(key)) or "-"


def _methods(r: Report) -> Html:
    if not r.rows:
        return paragraph("The profile has no measurement rows.")
    found: dict[tuple[str, str], list[int]] = {}
    for row in r.rows:
        found.setdefault((row.kind, row.method), []).append(len(row.samples_us))
    order = sorted(found, key=lambda key: (KINDS.index(key[0]) if key[0] in KINDS else len(KINDS), key))
    rows = [
        [
            kind,
            tag("span", WHAT.get(kind, ""), class_="wide"),
            tag("span", method, class_="wide"),
            f"{len(found[kind, method]):,}",
            f"{sum(found[kind, method]):,}",
        ]
        for kind, method in order
    ]
    return table(["kind", "what", "timed by", "rows", "samples"], rows, left=3)


def _aliased(r: Report) -> str:
    whole = [row for row in r.rows if row.kind in WHOLE]
    shared = [row for row in whole if row.values.get("pool_aliased")]
    if not whole:
        return "No whole step was measured, so none shared blocks of the host pool."
    if not shared:
        return f"Of {count(len(whole), 'whole step')} none shared host blocks: every KV cache was there in full."
    parts = sorted({(int(row.case.get("batch", 0)), int(row.case.get("context_tokens", 0))) for row in shared})
    cells = ", ".join(f"batch {b} at {t:,} tokens" for b, t in parts)
    return (
        f"Of {count(len(whole), 'whole step')} {len(shared):,} ran with a pinned host pool smaller than the KV cache, "
        f"where sequences share host blocks ({cells}). As many bytes cross the link; only the addresses they come from "
        "repeat."
    )


def _envelope(profile: Profile) -> Html:
    if not profile.envelope:
        return paragraph("The profile states no range, so nothing is marked as an extrapolation.")
    rows = [[axis, f"{low:,g}", f"{high:,g}"] for axis, (low, high) in profile.envelope.items()]
    return table(["axis", "from", "to"], rows)


def commands(r: Report) -> list[str]:
    """Command lines that make this report, its step and its claims again."""
    name = shlex.quote(_profile(r.profile))
    sets = _overrides(r.scenario)
    chosen = config_dict(r.answer.choice.best.config)
    step = _overrides(replace(r.scenario, config=Config(), grid=Grid()))
    step += [_set(f"config.{k}", v) for k, v in chosen.items() if v != to_plain(Scenario().config)[k]]

    def line(command: str, more: list[str]) -> str:
        return " \\\n    ".join([f"sparda {command} --profile {name}", *more])

    return [
        line("report", [*sets, "--out report.html"]),
        line("table", sets),
        line("simulate", [*step, "--trace step.json"]),
        line("evidence", []),
    ]


def _overrides(scenario: Scenario) -> list[str]:
    """``--set`` for everything in which ``scenario`` differs from the default one, the profile apart."""
    own, default = to_plain(scenario), to_plain(Scenario())
    found = []
    for key, value in own.items():
        usual = default[key]
        if isinstance(value, dict) and isinstance(usual, dict):
            found += [_set(f"{key}.{k}", v) for k, v in value.items() if v != usual[k]]
        elif key != "profile" and value != usual:
            found.append(_set(key, value))
    return found


def _set(key: str, value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return "--set " + shlex.quote(f"{key}={text or '[]'}")


def _profile(profile: Profile) -> str:
    return profile.name if profile.name in profile_names() else f"./{profile.folder.name}"


def _note(profile: Profile) -> str:
    text = "evidence recomputes every figure that the documentation claims; the trace opens in ui.perfetto.dev."
    if profile.name in profile_names():
        return text
    return f"{text} This profile does not come with the package: run them beside its folder, {profile.folder.name}."
