"""How far off a profile is, for a reader: its held-out steps, and its tables' own errors kind by kind."""

from __future__ import annotations

from sparda.calibrate.judged import ErrorBand
from sparda.calibrate.leave_one_out import CorunErrors, Duel, Errors, LeftOut
from sparda.explore.text import columns, percent, wrapped


def band_text(band: ErrorBand) -> str:
    """The held-out errors in a sentence."""
    if not band.count:
        return "Held-out steps: none, so the error of its predictions is not known."
    return (
        f"Held-out steps: {band.count}, errors median {percent(band.median)}, p90 {percent(band.p90)}, "
        f"worst {percent(band.worst)}, bias {percent(band.bias, sign=True)}; run to run {percent(band.spread)}."
    )


def errors_text(errors: Errors) -> str:
    """The tables' own errors in percent, kind by kind, and what they mean."""
    kernels = [
        [kind, _counts(e.batch, e.second), _pair(e.batch), _pair(e.second), *_law(e.duel, e.batch, e.second)]
        for kind, e in errors.kernels.items()
    ]
    copies = [[f"{e.stages} stages", _counts(e.ctas), _pair(e.ctas), *_law(e.duel, e.ctas)] for e in errors.copies]
    corun = [[kind, *_corun(e)] for kind, e in errors.corun.items()]
    return "\n\n".join(
        [
            wrapped(
                "Left out and predicted from the points left, % of the measured value, median/worst. law: median "
                "error of launch + bytes / rate (copies: the lesser of link and CTAs * rate) on the same points; "
                "better: tie where the medians differ by less than the spread from run to run."
            ),
            columns(["kernel alone", "points", "by batch", "by 2nd axis", "law", "better", "run to run"], kernels),
            columns(["copy alone", "points", "by CTAs", "law", "better", "run to run"], copies),
            wrapped(
                "Beside a copy: the kind's slow-down, worst where many CTAs all but stop it, with its spread from run "
                "to run, and the copy's GB/s, of which rows keep no repeats."
            ),
            columns(["kernel", "points", "by CTAs", "by batch", "spread", "GB/s, CTAs", "by batch"], corun),
        ]
    )


def _corun(e: CorunErrors) -> list[str]:
    slow, gb_s = (e.slowdown_ctas, e.slowdown_batch), (e.gb_s_ctas, e.gb_s_batch)
    return [_counts(*slow), *map(_pair, slow), _spread(*slow), *map(_pair, gb_s)]


def _law(duel: Duel, *parts: LeftOut) -> list[str]:
    return [_share(duel.law), duel.winner, _spread(*parts)]


def _spread(*parts: LeftOut) -> str:
    return _share(next((p.spread for p in parts if p.spread is not None), None))


def _counts(*parts: LeftOut) -> str:
    return "+".join(str(p.count) for p in parts)


def _pair(e: LeftOut) -> str:
    return f"{_share(e.median)}/{_share(e.worst)}" if e.count else "-"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
