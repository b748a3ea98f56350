"""The first section of a report: what to use, by how much it is better, how sure that is, what was confirmed."""

from __future__ import annotations

from statistics import median

from sparda.explore.cells import NOT_RUN, TOLERANCE, CellVerdict, cell_verdict
from sparda.explore.notes import quality_notes, unfit_notes
from sparda.explore.predict import Prediction, prediction_label
from sparda.explore.report_data import Report
from sparda.explore.report_page import Html, count, html, lines, misses, paragraph, table, tag
from sparda.explore.table import TableRow
from sparda.explore.table_text import quality_cell
from sparda.explore.text import number, percent, tokens_label

MARKS = {"yes": tag("span", "✓", class_="yes"), "no": tag("span", "✗", class_="no"), NOT_RUN: Html("")}
HEADERS = (
    "context", "batch", "misses", "CTAs", "also tied", "lookahead", "step, ms", "tokens/s", "low", "high", "public",
    "gain", "measured gain", "confirmed", "memory",
)  # fmt: skip


def headline(r: Report) -> str:
    """The answer in a line."""
    best, public = r.answer.choice.best, r.answer.public.config.prefetch_ctas
    ctas = count(best.config.prefetch_ctas, "CTA")
    start = f"{ctas} for the prefetch kernel: {best.tokens_per_s:,.0f} tokens/s predicted"
    if best.config.prefetch_ctas == public:
        return f"{start}, the public rule's own count"
    # A fewest-CTAs tie may be slower than the rule by less than noise can tell.
    return f"{start}, {percent(abs(r.answer.gain))} {'above' if r.answer.gain >= 0 else 'below'} the public rule"


def answer(r: Report) -> Html:
    """Words, key numbers and the table."""
    best, rule = r.answer.choice.best, r.answer.public
    w, verdict = best.workload, _verdict(r)
    parts = [
        paragraph(
            f"{r.scenario.model_name} on {r.table.gpu}, batch {w.batch}, {tokens_label(w.context_tokens)} tokens of "
            f"context, {misses(w.miss_rate)} misses, policy {best.config.policy}: use "
            f"{prediction_label(best.config)}. A step then takes {best.step_us / 1e3:.2f} ms; with the public rule's "
            f"{count(rule.config.prefetch_ctas, 'CTA')}, all else equal, {rule.step_us / 1e3:.2f} ms.",
            kind="lead",
        ),
        paragraph(_measured(verdict), **({"kind": "warn"} if verdict.confirmed == "no" else {})),
        _figures(r, verdict),
        *(paragraph(text, kind="warn") for text in _warnings(r)),
        paragraph(_trust(r)),
        paragraph(_hardware(r)),
        tag("h3", "CTAs for every cell of the grid"),
        tag("div", *(_matrix(r, c) for c in r.scenario.grid.context_tokens), class_="pair"),
        paragraph(_legend(r), kind="note"),
        tag("details", tag("summary", "The same as a full table, with bands and ties"), _full(r)),
    ]
    return lines(parts)


def _verdict(r: Report) -> CellVerdict:
    """What validation says of the answer itself."""
    best = r.answer.choice.best
    return cell_verdict(best.workload, best.config, r.rows if r.scenario.model_name == r.profile.model else ())


def _measured(v: CellVerdict) -> str:
    """The answer on hardware, in a sentence or two."""
    own = next((run for run in v.runs if run.chosen and run.measured_us), None)
    if own is None or own.measured_us is None or v.best is None or v.regret is None:
        return "This configuration was not measured on this workload: the speed is a prediction only."
    gain = "" if v.gain_public is None else f", {percent(v.gain_public, sign=True)} over the public rule's count"
    text = f"measured as chosen, a step takes {own.measured_us / 1e3:.2f} ms{gain}"
    if v.confirmed == "no":
        return f"Hardware contradicts it: {text}; {prediction_label(v.best)} is {percent(v.regret)} faster."
    loss = "nothing measured there is faster" if v.regret == 0 else f"the fastest there saves {percent(v.regret)}"
    return f"Hardware confirms it: {text}; {loss}."


def _figures(r: Report, verdict: CellVerdict) -> Html:
    best, (yes, no, dash) = r.answer.choice.best, r.table.confirmed
    band = r.profile.band_of(best.config)
    known = band.count > 0
    items = [
        ("Predicted speed", f"{best.tokens_per_s:,.0f} tokens/s", _band(best)),
        (
            "Over the public rule",
            percent(r.answer.gain, sign=True),
            f"predicted; {_gain_text(verdict)}",
        ),
        (
            "Error band, p90",
            f"± {percent(band.p90)}" if known else "unknown",
            f"{count(band.count, 'measured step')} held out" if known else "no step was held out",
        ),
        ("Cells measured", f"{yes + no} of {yes + no + dash}", f"{yes} confirmed, {no} contradicted"),
    ]
    return tag(
        "dl",
        *(
            tag("div", tag("dt", n), tag("dd", tag("span", v, class_="big"), tag("span", s, class_="small")))
            for n, v, s in items
        ),
        class_="figures",
    )


def _band(p: Prediction) -> str:
    return "error unknown" if p.low is None or p.high is None else f"band {p.low:,.0f} to {p.high:,.0f}"


def _error(band: float | None) -> str:
    return "their error is not known" if band is None else f"± {percent(band)}, the p90 of held-out errors"


def _gain_text(verdict: CellVerdict) -> str:
    return "not measured" if verdict.gain_public is None else f"measured {percent(verdict.gain_public, sign=True)}"


def _warnings(r: Report) -> list[str]:
    best, found = r.answer.choice.best, []
    if not best.fits:
        found.append(f"Does not fit this machine: {best.limit_reason}. The speed holds where there is enough memory.")
    if best.broken.reason:
        found.append(f"Nothing in its cell keeps the floors of quality; this is nearest to them: {best.broken.reason}.")
    if not best.inside:
        found.append(f"An extrapolation: {'; '.join(best.outside_reasons)}.")
    return found


def _trust(r: Report) -> str:
    p, band = r.profile, r.profile.band_of(r.answer.choice.best.config)
    start = f"Profile {p.label}: {tier(r)}. "
    if not band.count:
        return start + "No measured step was held against its predictions, so their error is not known."
    return (
        f"{start}Of {count(band.count, 'measured whole step')}, none of which any cost was fitted to, 90 % lie within "
        f"{percent(band.p90)} of their prediction (median {percent(band.median)}, worst {percent(band.worst)}); the "
        f"same step measured again differs by {percent(band.spread)}."
    )


def tier(r: Report) -> str:
    """Where the profile's numbers are from, in words."""
    if r.profile.tier == "measured":
        return f"measured on {r.profile.machine.gpu}, {count(len(r.profile.sessions), 'session')}"
    return f"{r.profile.tier}, not measured on {r.profile.machine.gpu}"


def _hardware(r: Report) -> str:
    (yes, no, dash), m = r.table.confirmed, r.measured
    total = count(len(r.table.rows), "cell")
    if not yes + no:
        return f"Hardware has confirmed nothing yet: no validation measured any of the {total} below as chosen."
    text = (
        f"Hardware: of the {total} below, {yes} confirmed (measured within {percent(TOLERANCE, 0)} of the best "
        f"measured configuration), {no} contradicted, {dash} not measured."
    )
    if m.max_regret is not None:
        text += f" The largest measured loss against the best is {percent(m.max_regret)}."
    if m.max_gain_public is not None:
        text += f" The largest measured gain over the public rule is {percent(m.max_gain_public, sign=True)}."
    return text


def _matrix(r: Report, context: int) -> Html:
    grid = r.scenario.grid
    known = {b: [t for t in r.table.rows if (t.context_tokens, t.batch) == (context, b)] for b in grid.batch}
    top = max([0.01, *(t.gain for t in r.table.rows)])
    titles = ["by resident blocks"] if r.table.selection else [f"{misses(m)} misses" for m in grid.miss_rate]
    head = tag("tr", tag("th", "batch"), *(tag("th", title) for title in titles))
    body = [
        tag("tr", tag("th", str(b)), *(_cell(t, top, bool(r.table.selection)) for t in known[b])) for b in grid.batch
    ]
    found = tag("table", tag("thead", head), tag("tbody", *body))
    title = tag("h4", f"{tokens_label(context)} tokens of context")
    return tag("div", title, tag("div", found, class_="scroll", tabindex="0"), class_="matrix")


def _cell(t: TableRow, top: float, moving: bool) -> Html:
    heat = f"--heat:{0.36 * max(0.0, t.gain) / top:.3f}"
    marks = ("" if t.inside else "?") + ("" if t.fits else "*")
    gain = "" if t.measured_gain is None else f" {percent(t.measured_gain, sign=True)}"
    measured = [Html("<br>"), MARKS[t.confirmed], gain] if t.confirmed != NOT_RUN else []
    kept = [f"{t.resident_blocks or t.top_k} resident, {misses(t.miss_rate)} misses", Html("<br>")] if moving else []
    small = tag("small", *kept, f"{t.tokens_per_s:,.0f} tok/s", Html("<br>"), percent(t.gain, sign=True), *measured)
    return tag("td", tag("b", t.prefetch_ctas), html(marks), " ", small, style=heat)


def _legend(r: Report) -> str:
    t = r.table
    text = (
        f"In each cell: the CTAs to use, predicted tokens/s ({_error(t.band)}), and the "
        "predicted gain over the public launcher's count for an H100 (16 up to batch 16, else 32), all else equal; the "
        f"deeper the colour, the larger. Chosen are the fewest CTAs within {percent(t.noise)} (run-to-run spread) of "
        "the fastest. ✓ confirmed by a measurement, ✗ contradicted, each with the measured gain; no mark: not measured "
        "as chosen."
    )
    errors = t.gain_errors
    if errors:
        text += (
            f" Predicted gains are off by {100 * median(errors):.1f} points in the median, {100 * errors[-1]:.1f} at "
        )
        text += "most."
    text += "".join(f" {note}" for note in (*unfit_notes(t), *quality_notes(t)))
    if any(not row.inside for row in t.rows):
        text += " ? outside the measured range: an extrapolation."
    return text


def _full(r: Report) -> Html:
    rows = [
        [
            tokens_label(t.context_tokens),
            t.batch,
            misses(t.miss_rate),
            f"{t.prefetch_ctas}{'' if t.inside else ' ?'}",
            " ".join(str(n) for n in t.tied_ctas if n != t.prefetch_ctas) or "-",
            t.lookahead,
            f"{t.step_us / 1e3:.2f}",
            f"{t.tokens_per_s:,.0f}",
            number(t.low, ",.0f"),
            number(t.high, ",.0f"),
            t.public_ctas,
            percent(t.gain, sign=True),
            "-" if t.measured_gain is None else percent(t.measured_gain, sign=True),
            t.confirmed,
            "fits" if t.fits else t.limit_reason,
        ]
        for t in r.table.rows
    ]
    if not r.table.rated:
        return table(HEADERS, rows)
    more = [[t.top_k, _recall(t), quality_cell(t)] for t in r.table.rows]
    return table((*HEADERS, "top-k", "recall", "perplexity"), [[*a, *b] for a, b in zip(rows, more, strict=True)])


def _recall(t: TableRow) -> str:
    return "-" if t.quality is None or t.quality.recall is None else percent(t.quality.recall)
