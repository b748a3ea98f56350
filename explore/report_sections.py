"""The middle sections of a report: errors, CTA curves, one step, and the top-k front."""

from __future__ import annotations

from collections.abc import Sequence

from sparda.calibrate.judged import ErrorBand
from sparda.explore import report_plots as plots
from sparda.explore.blame import JOIN, exposed_ns
from sparda.explore.predict import Prediction, prediction_label
from sparda.explore.report_data import Curve, Held, Report, band_of, undominated
from sparda.explore.report_page import Html, count, figure, html, lines, misses, paragraph, plot, table, tag
from sparda.explore.report_timeline import family_of, streams, window
from sparda.explore.text import number, percent, tokens_label

WORST = 10


def held_out(r: Report) -> Html:
    """Every measured whole step beside its prediction."""
    if not r.held:
        return paragraph(
            f"Profile {r.profile.label} has no measured whole steps, so nothing can be held against its predictions. "
            "`sparda measure` and `sparda validate` add them."
        )
    bands = [(kind, band_of([h for h in r.held if h.row.kind == kind])) for kind in ("step", "validation")]
    rows = [_band_row(kind, band) for kind, band in bands if band]
    rows.append(_band_row("the profile's band", r.profile.band))
    band = next(b for _, b in bands if b)
    parts = [
        paragraph(
            f"{count(len(r.held), 'measured whole step')}, each simulated from kernel, link and co-run measurements "
            f"alone. Median error {percent(band.median)}, p90 {percent(band.p90)}, worst {percent(band.worst)}; the "
            f"median prediction is {percent(abs(band.bias))} too {'slow' if band.bias > 0 else 'fast'}. "
            f"The same step measured again differs by {percent(band.spread)}, which no model can beat."
        ),
        table(["", "steps", "median", "p90", "worst", "bias", "run to run"], rows),
        paragraph(
            "Errors are shares of the measured time: predicted over measured, less 1. Bias is the median signed error, "
            "above 0 where predictions are too slow. step: the hold-out of the calibration; validation: what the "
            "search chose and its neighbours, measured afterwards; the profile's band: what the calibration found, and "
            "what every band in this report is made of.",
            kind="note",
        ),
        figure(
            plot(plots.errors(r.held), "errors"),
            "Predicted over measured step time",
            "One mark per measured step; on the line they are equal, the bands are ± 5 % and ± 15 %.",
        ),
        figure(plot(plots.histogram(r.held), "histogram"), "How the errors are spread", "Signed, in percent."),
        tag("h3", f"The {min(WORST, len(r.held))} worst"),
        _worst(r.held),
    ]
    return lines(parts)


def _band_row(name: str, b: ErrorBand) -> list[str]:
    shares = [percent(b.median), percent(b.p90), percent(b.worst), percent(b.bias, sign=True), percent(b.spread)]
    return [name, f"{b.count:,}", *(shares if b.count else ["-"] * 5)]


def _worst(held: Sequence[Held]) -> Html:
    rows = [
        [
            h.row.kind,
            h.config.policy,
            percent(h.error, sign=True),
            f"{h.predicted_us / 1e3:.2f}",
            f"{h.row.us / 1e3:.2f}",
            percent(h.row.spread),
            f"{h.workload.batch} x {tokens_label(h.workload.context_tokens)}",
            misses(h.workload.miss_rate),
            h.config.top_k,
            h.config.lookahead,
            f"{h.config.prefetch_ctas} x {h.config.prefetch_warps} x {h.config.prefetch_stages}",
            h.row.session,
        ]
        for h in sorted(held, key=lambda h: (-abs(h.error), h.row.key))[:WORST]
    ]
    headers = ["kind", "policy", "error", "predicted, ms", "measured, ms", "run to run", "batch x context", "misses"]
    return table([*headers, "top\u2011k", "ahead", "CTAs x warps x stages", "session"], rows, left=2)


def cta_curves(r: Report) -> Html:
    """A panel for each batch."""
    w, rows = r.scenario.workload, sum(len(c.measured) for c in r.curves)
    seen = (
        f"{count(rows, 'measured step')} of just these conditions in green, circles from the calibration's hold-out, "
        "diamonds from validation, bars their run-to-run spread."
        if rows
        else "No step was measured under just these conditions, so no measured points are shown."
    )
    shade = "blue" if r.table.band is None else "blue, shaded by the error band"
    panels = [
        figure(plot(plots.curve(c, r.table.band), f"curve-{_batch(c)}"), f"Batch {_batch(c)}", _curve_text(c))
        for c in r.curves
    ]
    return lines(
        [
            paragraph(
                f"Predicted step time ({shade}) at {tokens_label(w.context_tokens)} tokens of "
                f"context and {r.misses(w.miss_rate)}, all else as chosen for that batch. Ringed in orange is "
                f"the choice, boxed in grey the public rule's count. {seen}"
            ),
            paragraph("The axes of milliseconds differ from panel to panel and do not start at 0.", kind="note"),
            tag("div", *panels, class_="panels"),
        ]
    )


def _batch(c: Curve) -> int:
    return c.choice.best.workload.batch


def _curve_text(c: Curve) -> str:
    best, rule = c.choice.best, c.public.config.prefetch_ctas
    text = f"{count(best.config.prefetch_ctas, 'CTA')}, {best.step_us / 1e3:.2f} ms"
    if rule == best.config.prefetch_ctas:
        return f"{text}; the public rule's own count"
    return f"{text}; {percent(c.gain, sign=True)} predicted over {rule} CTAs"


def one_step(r: Report) -> Html:
    """The timeline of the chosen configuration, and its time by kind beside the public rule's."""
    step, best = r.step, r.answer.choice.best
    exposed, busy = step.exposed_ns, step.busy_ns
    middle = step.plan.shape.layers // 2
    spans = {
        "1 layer": window(step, middle, 1),
        "3 layers": window(step, middle, 3),
        "whole step": (0.0, step.step_us),
    }
    buttons = [
        tag("button", name, type="button", data_plot="plot-step", data_from=f"{a:.1f}", data_to=f"{b:.1f}")
        for name, (a, b) in spans.items()
    ]
    return lines(
        [
            paragraph(
                f"One simulated step of the answer: batch {best.workload.batch}, "
                f"{tokens_label(best.workload.context_tokens)} tokens, {misses(best.workload.miss_rate)} misses, "
                f"{prediction_label(best.config)}. Of {step.step_us / 1e3:.2f} ms the main stream stands still for "
                f"{exposed / 1e6:.2f} ms ({percent(exposed / step.makespan_ns)}), waiting for another stream; the link "
                f"is busy {percent(step.link_busy_ns / step.makespan_ns)} of the time and carries "
                f"{step.link_bytes / 1e6:,.0f} MB."
            ),
            paragraph(
                "Busy: " + ", ".join(f"{s} {percent(ns / step.makespan_ns)}" for s, ns in busy.items()) + ". Dotted: "
                f"the most the link ({r.profile.machine.link_h2d_gb_s:.1f} GB/s) and the GPU's memory "
                f"({r.profile.machine.hbm_gb_s:,.0f} GB/s) do; memory traffic counts the least bytes "
                "an operation needs.",
                kind="note",
            ),
            tag("div", *buttons, class_="zoom", role="group", aria_label="What the timeline shows"),
            plot(streams(step, r.profile.machine), "step"),
            tag("h3", "Time by kind of operation"),
            _kinds(r),
            paragraph(
                "Exposed: what makes the step as long as it is; the column adds up to the step. On the main stream "
                "that is all the time an operation takes; elsewhere only what main stands still for. Stream joins: "
                "from the end of what main waits for to its own start; step overhead: outside all operations. A "
                "second exposed column is the public rule's.",
                kind="note",
            ),
        ]
    )


def _kinds(r: Report) -> Html:
    own, rule = exposed_ns(r.step), exposed_ns(r.rule_step)
    totals, streams = r.step.by_kind(), {s.kind: s.stream for s in r.step.spans}
    names = sorted({*totals, *own, *rule}, key=lambda n: (-own.get(n, 0), n))
    same = r.step.plan.config == r.rule_step.plan.config
    whole = r.step.makespan_ns

    def us(ns: int | None) -> str:
        return f"{ns / 1e3:,.0f}" if ns else "-"

    rows: list[list[object]] = []
    for name in names:
        total = totals.get(name)
        swatch = tag("i", style=f"background:{family_of(name)[1]}", class_="swatch") if total else html("")
        row: list[object] = [Html(swatch + html(name)), streams.get(name, "main" if name == JOIN else "-")]
        row += [total.count if total else "-", us(total.ns if total else None), us(own.get(name))]
        row += [percent(own.get(name, 0) / whole), *([] if same else [us(rule.get(name))])]
        rows.append(row)
    last: list[object] = ["whole step", "", "", "", us(whole), percent(1.0)]
    rows.append([tag("b", c) for c in [*last, *([] if same else [us(r.rule_step.makespan_ns)])]])
    ctas = r.rule_step.plan.config.prefetch_ctas
    other = [] if same else [f"exposed, {ctas} CTAs, us"]
    return table(["kind", "stream", "count", "busy, us", "exposed, us", "of the step", *other], rows, left=2)


def front(r: Report) -> Html:
    """Tokens per second for each block budget, and what that does not say."""
    own = r.scenario.workload.miss_rate
    points = next(p for m, p in r.fronts if m == own)
    if not points:
        return paragraph("No block budget of the grid is possible at this context.")
    kept, base = undominated(points), r.answer.choice.best
    w = base.workload
    drop = [_front_row(p, base, p in kept) for p in points]
    others = "." if r.table.selection else " (bold) and the grid's other miss rates. A miss rate is a share of "
    if not r.table.selection:
        others += (
            "top-k, so a larger top-k moves more blocks; which rate a model has at another top-k was not measured."
        )
    text = (
        f"Batch {w.batch}, {tokens_label(w.context_tokens)} tokens; for each top-k the fewest CTAs within noise of "
        f"the fastest, at {r.misses(own)}{others}"
    )
    proxy = ("Top-k is only a proxy of quality", "the next section has what it costs, as measured of another model.")
    if r.quality is None:
        proxy = ("Top-k is only a proxy of quality: no accuracy was measured", "what it costs this report cannot say.")
    elif r.quality.model == r.scenario.model_name:
        proxy = (proxy[0], "the next section has what it costs.")
    return lines(
        [
            paragraph(tag("b", f"{proxy[0]}."), f" Reading fewer blocks is faster; {proxy[1]}"),
            paragraph(text),
            figure(
                plot(plots.fronts(r.fronts, own), "front"),
                "The Pareto front",
                "Labels: where the CTA count changes. Hollow: outside what was measured.",
            ),
            table(
                ["top-k", "tokens/s", "low", "high", f"over top-k {base.config.top_k}", "CTAs", "lookahead", ""], drop
            ),
        ]
    )


def _front_row(p: Prediction, base: Prediction, kept: bool) -> list[str]:
    remarks = [*([] if kept else ["a larger top-k is as fast"]), *([] if p.inside else ["extrapolation"])]
    return [
        str(p.config.top_k),
        f"{p.tokens_per_s:,.0f}",
        number(p.low, ",.0f"),
        number(p.high, ",.0f"),
        percent(p.tokens_per_s / base.tokens_per_s - 1, sign=True),
        str(p.config.prefetch_ctas),
        str(p.config.lookahead),
        "; ".join([*remarks, *([] if p.fits else ["does not fit in memory"])]),
    ]
