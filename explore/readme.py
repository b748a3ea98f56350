"""The parts of the README that are computed: evidence, excerpts of the CTA table and of quality, the policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparda.calibrate.quality import QualityProfile
from sparda.explore.figures import LIVE, Figure
from sparda.explore.policies import Comparison
from sparda.explore.policies_text import grid_text
from sparda.explore.quality import tier_of
from sparda.explore.quality_summary import summary_text
from sparda.explore.table import CtaTable
from sparda.explore.table_text import table_text
from sparda.explore.text import count

YOURS = "measured where you run it"
"""Stands for the value of a figure that belongs to the reader's machine, not to the profile's."""
COUNTS = ("steps", "policies", "prompts", "tokens", "sequences", "machines")
"""Units of figures that are whole numbers."""

WORDS = {True: "met", False: "**not met**", None: ""}


def evidence_block(figures: Mapping[str, Figure]) -> str:
    """The figures as a Markdown table: id, value, target, met or not, conditions."""
    lines = ["| figure | value | target | | conditions |", "|---|---|---|---|---|"]
    for name, f in figures.items():
        live = f.provenance == LIVE
        missing = "none" if f.rows else "not measured"
        value = YOURS if live else missing if f.value is None else _value(f.value, f.unit)
        sign = "" if f.target is None else "≥ " if f.higher_is_better else "≤ "
        target = "" if f.target is None else sign + _value(f.target, f.unit)
        lines.append(
            f"| `{name}` | {value} | {target} | {'' if live else WORDS[f.met]} | {'' if live else f.conditions} |"
        )
    return "\n".join(lines)


def _value(value: float, unit: str) -> str:
    if unit == "ms":
        return f"{value:.2f} ms"
    if unit in ("times", "s"):
        return f"{value:.2f} {unit}"
    if unit == "GiB":
        return f"{value:.1f} GiB"
    if unit == "Kendall's tau":
        return f"{value:.2f}"
    if unit.endswith("/s"):
        return f"{value:.0f} {unit}"
    return f"{value:.0f}" if unit in COUNTS else f"{value:.1%}"


def table_block(table: CtaTable, context_tokens: int, batches: Sequence[int]) -> str:
    """The text table's head and its rows of one context and some batches, as ``sparda table`` prints them."""
    printed = table_text(table).splitlines()
    rows = dict(zip(((r.context_tokens, r.batch, r.miss_rate) for r in table.rows), printed[2:], strict=False))
    kept = [line for (context, batch, _), line in rows.items() if context == context_tokens and batch in batches]
    return "\n".join([*printed[:2], *kept])


def policies_block(comparison: Comparison, context_tokens: int) -> str:
    """Tokens/s of every policy at one context, as ``sparda policies --tokens`` prints them."""
    rates = [rate for context, rate in comparison.grids if context == context_tokens]
    return "\n\n".join(grid_text(comparison, context_tokens, rate, True) for rate in rates)


def quality_block(profile: QualityProfile) -> str:
    """What choices catch and cost at one top-k, as ``sparda quality show`` begins, and what that is of."""
    tier = tier_of(profile, profile.model, profile.context_tokens)
    parts = [text for text in (summary_text(profile),) if text]
    return "\n\n".join([f"{tier[0].upper()}{tier[1:]}, {count(len(profile.documents), 'document')}", *parts])
