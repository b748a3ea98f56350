"""The table of a report that shows how well the profile's own tables predict points left out of them."""

from __future__ import annotations

from sparda.calibrate.leave_one_out import Duel, LeftOut
from sparda.calibrate.profile import Profile
from sparda.explore.report_page import Html, lines, paragraph, table
from sparda.explore.text import percent

HEADERS = (
    "kind", "alone: by batch", "by context or top-k", "law", "better", "run to run", "slow-down: by CTAs", "by batch",
    "run to run", "copy's GB/s: by CTAs", "by batch", "law", "better", "run to run",
)  # fmt: skip
NONE = LeftOut(0, None, None, None)


def left_out(profile: Profile) -> Html:
    """Leave-one-out errors: a line for each kind of operation and for each depth of the copy alone."""
    errors = profile.errors
    if not (errors.kernels or errors.corun or errors.copies):
        return paragraph("The profile has no tables with points that could be left out.")
    rows = []
    for kind in dict.fromkeys([*errors.kernels, *errors.corun]):
        alone, beside = errors.kernels.get(kind), errors.corun.get(kind)
        own = [_pair(alone.batch), _pair(alone.second), *_law(alone.duel, alone.batch, alone.second)] if alone else []
        slow = [beside.slowdown_ctas, beside.slowdown_batch] if beside else [NONE, NONE]
        copy = [beside.gb_s_ctas, beside.gb_s_batch] if beside else [NONE, NONE]
        cells = [*(own or ["-"] * 5), *map(_pair, slow), _spread(*slow), *map(_pair, copy)]
        rows.append([kind, *cells, "-", "-", _spread(*copy)])
    for e in errors.copies:
        rows.append([f"copy alone, {e.stages} stages", *["-"] * 8, _pair(e.ctas), "-", *_law(e.duel, e.ctas)])
    return lines(
        [
            paragraph(
                "Each inner point of the tables behind a prediction was left out in turn and predicted from the "
                "points left, across a wider gap than predictions find there: median / worst error, as a share of the "
                "measured value, tells from above what a table loses between its points; below the spread from run to "
                "run beside it, it is noise."
            ),
            table(HEADERS, rows),
            paragraph(
                "law: median error, on the same points, of launch + bytes / rate, and for the copy alone of the "
                "lesser of the link and a rate per CTA; better: which of table and law is closer, a tie where they "
                "differ by less than run to run. Slow-downs are worst where many CTAs all but stop a kernel, from one "
                "count to the next. Rows beside a copy keep no repeats of its GB/s.",
                kind="note",
            ),
        ]
    )


def _law(duel: Duel, *parts: LeftOut) -> list[str]:
    return ["-" if duel.law is None else percent(duel.law), duel.winner, _spread(*parts)]


def _pair(e: LeftOut) -> str:
    if e.median is None or e.worst is None:
        return "-"
    return f"{percent(e.median)} / {percent(e.worst)}"


def _spread(*parts: LeftOut) -> str:
    return next((percent(p.spread) for p in parts if p.spread is not None), "-")
