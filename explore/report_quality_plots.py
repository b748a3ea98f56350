"""Plots of a quality profile: recall, nats, misses and facts found; and speed against what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from sparda.calibrate.quality import Choice, QualityProfile
from sparda.explore.predict import Prediction
from sparda.explore.quality_compare import at_top_k, by_choice, main_top_k
from sparda.explore.report_plots import BLUE, CYCLE, GREEN, GREY, ORANGE, PINK, PURPLE, TEAL, Figure, blank
from sparda.explore.text import percent

COLOURS = {
    "oracle": GREY,
    "sparse": PURPLE,
    "forecast": BLUE,
    "infinigen": ORANGE,
    "previous": GREEN,
    "shared": TEAL,
    "recency": PINK,
}
"""Selectors that are drawn: the best, the trained, what it stands in for, and a control. The tables have them all."""
DASHES = ("solid", "dash", "dot", "dashdot")
SMALL = {"margin": {"l": 52, "r": 10, "t": 8, "b": 40}, "legend": {"y": 1.0}}


def _drawn(choices: Sequence[Choice]) -> list[Choice]:
    """One choice of each drawn selector by lookahead, of one Forecast head."""
    return [c for c in by_choice(choices) if c.selector in COLOURS and c.heads <= 1]


def _line(c: Choice) -> dict[str, object]:
    return {"color": COLOURS[c.selector], "width": 2, "dash": DASHES[max(0, c.lookahead - 1) % len(DASHES)]}


def _log_top_k(figure: Figure, top_ks: Sequence[int]) -> Figure:
    ticks = sorted(set(top_ks))
    title = {"text": "top-k"}
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[str(t) for t in ticks], title=title)
    return figure


def recalls(q: QualityProfile) -> Figure:
    """Recall of what ``sparse`` chooses against top-k, a line for each choice."""
    figure = blank(340, **SMALL)
    top_ks = [r.choice.top_k for r in q.recalls]
    for c in _drawn([r.choice for r in q.recalls]):
        found = [(k, row.recall) for k in sorted(set(top_ks)) if (row := q.recall_of(at_top_k(c, k)))]
        figure.add_scatter(
            x=[k for k, _ in found],
            y=[round(100 * r, 2) for _, r in found],
            mode="lines+markers",
            line=_line(c),
            hovertemplate="top-k %{x}: %{y} %<extra>" + c.label + "</extra>",
            name=c.label,
        )
    return _log_top_k(figure, top_ks).update_yaxes(title={"text": "recall, %"})


def nats(q: QualityProfile) -> Figure:
    """Nats per token over full attention's against top-k, with standard errors."""
    figure = blank(340, **SMALL)
    top_ks = [p.choice.top_k for p in q.perplexities]
    for c in _drawn([p.choice for p in q.perplexities]):
        found = [(k, row) for k in sorted(set(top_ks)) if (row := q.perplexity_of(at_top_k(c, k)))]
        figure.add_scatter(
            x=[k for k, _ in found],
            y=[round(row.nats, 4) for _, row in found],
            error_y={"array": [round(row.standard_error, 4) for _, row in found], "thickness": 1, "width": 2},
            mode="lines+markers",
            line=_line(c),
            hovertemplate="top-k %{x}: %{y} nats<extra>" + c.label + "</extra>",
            name=c.label,
        )
    return _log_top_k(figure, top_ks).update_yaxes(title={"text": "nats per token"})


def misses(q: QualityProfile) -> Figure:
    """Missed free picks against resident slots, a line for each top-k, both axes logarithmic."""
    figure = blank(340, **SMALL)
    for colour, d in zip(CYCLE * len(q.dynamics), sorted(q.dynamics, key=lambda d: d.top_k), strict=False):
        # A share of 0 has no place on a logarithmic axis.
        points = [(r, m) for r, m in zip(d.curve.ratio, d.curve.missed, strict=True) if m > 0]
        figure.add_scatter(
            x=[round(r, 4) for r, _ in points],
            y=[round(100 * m, 4) for _, m in points],
            mode="lines",
            line={"color": colour, "width": 2},
            hovertemplate="%{x} times: %{y} % missed<extra>top-k " + str(d.top_k) + "</extra>",
            name=f"top-k {d.top_k}",
        )
    figure.update_xaxes(type="log", title={"text": "slots over free picks"})
    return figure.update_yaxes(type="log", title={"text": "free picks missed, %"})


def depths(q: QualityProfile) -> Figure | None:
    """Nats of an answer's token by where the fact lies, means over contexts; None where that was not measured."""
    k = main_top_k(q)
    rows = [r for r in q.retrievals if (r.task, r.choice.top_k) == ("needle", k) and r.depth >= 0]
    if not rows:
        return None
    figure = blank(340, **SMALL)
    places = sorted({r.depth for r in rows})
    dense = [fmean(r.dense_nats for r in rows if r.depth == depth) for depth in places]
    line = {"color": GREY, "dash": "dot"}
    figure.add_scatter(x=places, y=[round(v, 4) for v in dense], mode="lines", line=line, name="full attention")
    for c in _drawn([r.choice for r in rows]):
        own = [r for r in rows if r.choice == at_top_k(c, k)]
        at = [(d, fmean(r.nats for r in own if r.depth == d)) for d in places if any(r.depth == d for r in own)]
        figure.add_scatter(
            x=[depth for depth, _ in at],
            y=[round(nats, 4) for _, nats in at],
            mode="lines+markers",
            line=_line(c),
            name=c.label,
        )
    figure.update_xaxes(title={"text": "depth of the fact, share of the context"}, range=[-0.05, 1.05])
    return figure.update_yaxes(title={"text": "nats of an answer's token"}, rangemode="tozero")


def trade(points: Sequence[Prediction], answer: Prediction) -> Figure:
    """Predicted tokens/s against the increase of perplexity; hollow where a prediction is outside of what was
    measured, ringed the answer of the report.
    """
    figure = blank(400, showlegend=False)
    shown = [(p, p.quality.ppl_increase) for p in points if p.quality and p.quality.ppl_increase is not None]
    figure.add_scatter(
        x=[round(100 * ppl, 3) for _, ppl in shown],
        y=[round(p.tokens_per_s, 1) for p, _ in shown],
        mode="lines+markers+text",
        line={"color": BLUE, "width": 2},
        marker={"size": 8, "symbol": ["circle" if p.inside else "circle-open" for p, _ in shown]},
        text=[f"{p.config.top_k} d={p.config.lookahead}" for p, _ in shown],
        textposition="bottom right",
        textfont={"size": 11},
        cliponaxis=False,
        hovertext=[f"{p.config.prefetch_ctas} CTAs, {p.config.slots} resident" for p, _ in shown],
        hovertemplate="%{text}: %{y:,.0f} tokens/s at %{x} %, %{hovertext}<extra></extra>",
    )
    if answer.quality and answer.quality.ppl_increase is not None:
        figure.add_scatter(
            x=[round(100 * answer.quality.ppl_increase, 3)],
            y=[round(answer.tokens_per_s, 1)],
            mode="markers",
            marker={"symbol": "circle-open", "size": 16, "color": ORANGE, "line": {"width": 2.5}},
            hovertext=[f"the answer, {percent(answer.quality.ppl_increase, sign=True)}"],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    figure.update_xaxes(title={"text": "increase of perplexity, %"}, rangemode="tozero")
    return figure.update_yaxes(title={"text": "predicted tokens/s"}, tickformat=",.0f")
