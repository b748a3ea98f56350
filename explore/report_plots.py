"""The plots of a report, in colours that read on light and on dark; the page sets text and grid colours itself."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from sparda.explore.predict import Prediction
from sparda.explore.report_data import Curve, Held, undominated
from sparda.explore.report_page import count, misses
from sparda.explore.text import percent, tokens_label

BLUE, ORANGE, GREEN, PURPLE, PINK, TEAL = "#3f7fbf", "#d0703a", "#3a9a72", "#8b6bc4", "#c2577f", "#2f97a5"
GREY = "#868c94"
CYCLE = (BLUE, GREEN, PURPLE, TEAL, PINK, ORANGE)
POLICY = {"sparda": BLUE, "sparda-on-demand": GREEN, "sparse": PURPLE, "sparse-resident": PINK}
Figure = Any
"""A plotly figure; plotly comes without types."""


def conditions(h: Held) -> str:
    """What a row was measured under, in a line for hovering."""
    w, c = h.workload, h.config
    return (
        f"{h.row.kind}, {c.policy}<br>batch {w.batch}, {tokens_label(w.context_tokens)} tokens, "
        f"{misses(w.miss_rate)} misses, top-k {c.top_k}, {c.slots} slots<br>"
        f"{c.prefetch_ctas} CTAs x {c.prefetch_warps} warps x {c.prefetch_stages} stages, lookahead {c.lookahead}<br>"
        f"predicted {h.predicted_us / 1e3:.3f} ms, measured {h.row.us / 1e3:.3f} ms: {percent(h.error, sign=True)}<br>"
        f"run to run {percent(h.row.spread)}, session {escape(h.row.session)}"
    )


def blank(height: int, **layout: object) -> Figure:
    """A plot without traces, on no background of its own."""
    figure = go.Figure()
    figure.update_layout(
        template=go.layout.Template(),
        height=height,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12.5, "color": GREY},
        margin={"l": 56, "r": 16, "t": 12, "b": 48},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "title": {"text": ""}},
        hoverlabel={"align": "left"},
        dragmode=False,
    )
    figure.update_yaxes(automargin=True)
    return figure.update_layout(**layout)


def _log_axis(ticks: Sequence[float], title: str) -> dict[str, object]:
    texts = [f"{t:g}" for t in ticks]
    return {"type": "log", "tickvals": list(ticks), "ticktext": texts, "title": {"text": title}}


def errors(held: Sequence[Held]) -> Figure:
    """Predicted against measured step times on logarithmic axes, with the identity and bands of 5 and 15 %."""
    figure = blank(520)
    times = [t for h in held for t in (h.row.us / 1e3, h.predicted_us / 1e3)]
    low, high = min(times) / 1.1, max(times) * 1.1
    for share, alpha in ((0.15, 0.10), (0.05, 0.20)):
        figure.add_scatter(
            x=[low, high, high, low],
            y=[low * (1 - share), high * (1 - share), high * (1 + share), low * (1 + share)],
            fill="toself",
            fillcolor=f"rgba(134,140,148,{alpha})",
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            name=f"± {share * 100:.0f} %",
        )
    figure.add_scatter(
        x=[low, high], y=[low, high], mode="lines", line={"color": GREY, "width": 1}, hoverinfo="skip", name="equal"
    )
    for kind, symbol in (("step", "circle"), ("validation", "diamond")):
        for policy, colour in POLICY.items():
            own = [h for h in held if (h.row.kind, h.config.policy) == (kind, policy)]
            if own:
                figure.add_scatter(
                    x=[round(h.row.us / 1e3, 4) for h in own],
                    y=[round(h.predicted_us / 1e3, 4) for h in own],
                    mode="markers",
                    marker={"color": colour, "symbol": symbol, "size": 7, "opacity": 0.75},
                    text=[conditions(h) for h in own],
                    hovertemplate="%{text}<extra></extra>",
                    name=policy if kind == "step" else f"{policy}, {kind}",
                )
    ticks = [t for t in (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500) if low <= t <= high]
    figure.update_xaxes(**_log_axis(ticks, "measured step, ms"))
    figure.update_yaxes(**_log_axis(ticks, "predicted step, ms"))
    return figure


def histogram(held: Sequence[Held]) -> Figure:
    """How the signed errors are spread."""
    figure = blank(240, barmode="stack", bargap=0.06, legend={"y": 1.04})
    worst = max(0.05, *(abs(h.error) for h in held))
    size = 0.01 if worst <= 0.25 else 0.05
    edge = (int(worst / size) + 1) * size
    for kind, colour in (("step", BLUE), ("validation", ORANGE)):
        own = [round(h.error * 100, 3) for h in held if h.row.kind == kind]
        if own:
            bins = {"start": -edge * 100, "end": edge * 100, "size": size * 100}
            figure.add_histogram(x=own, xbins=bins, marker={"color": colour}, name=kind)
    figure.update_xaxes(title={"text": "predicted over measured, less 1, %"})
    return figure.update_yaxes(title={"text": "steps"})


def curve(c: Curve, band: float | None) -> Figure:
    """Predicted step time over the CTA count: its band if known, what was measured, the choice, the rule."""
    figure = blank(250, margin={"l": 52, "r": 10, "t": 8, "b": 40}, showlegend=False)
    counts = [p.config.prefetch_ctas for p in c.points]
    times = [p.step_us / 1e3 for p in c.points]
    if band is not None:
        figure.add_scatter(
            x=[*counts, *reversed(counts)],
            y=[*(t / (1 + band) for t in times), *(t / max(0.05, 1 - band) for t in reversed(times))],
            fill="toself",
            fillcolor="rgba(63,127,191,0.13)",
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
        )
    hover = "%{x} CTAs: %{y:.3f} ms<extra>predicted</extra>"
    figure.add_scatter(x=counts, y=times, mode="lines+markers", line={"color": BLUE}, hovertemplate=hover)
    for kind, symbol in (("step", "circle-open"), ("validation", "diamond-open")):
        own = sorted((m.prefetch_ctas, row.us / 1e3, row.spread) for m, row in c.measured if row.kind == kind)
        if own:
            figure.add_scatter(
                x=[n for n, _, _ in own],
                y=[t for _, t, _ in own],
                error_y={"array": [t * s for _, t, s in own], "thickness": 1, "width": 2},
                mode="markers",
                marker={"color": GREEN, "symbol": symbol, "size": 8, "line": {"width": 2}},
                hovertemplate=f"%{{x}} CTAs: %{{y:.3f}} ms<extra>measured, {kind}</extra>",
            )
    for p, symbol, colour in ((c.public, "square-open", GREY), (c.choice.best, "circle-open", ORANGE)):
        figure.add_scatter(
            x=[p.config.prefetch_ctas],
            y=[p.step_us / 1e3],
            mode="markers",
            marker={"symbol": symbol, "size": 15, "color": colour, "line": {"width": 2.5}},
            hoverinfo="skip",
        )
    powers = [2**i for i in range(11) if counts[0] <= 2**i <= counts[-1]]
    figure.update_xaxes(**_log_axis(powers, "CTAs"))
    return figure.update_yaxes(title={"text": "step, ms"}, nticks=5)


def fronts(found: Sequence[tuple[float, Sequence[Prediction]]], own: float) -> Figure:
    """Tokens per second against the block budget, a line for each miss rate, the scenario's one in bold."""
    figure = blank(420)
    for number, (miss, points) in enumerate(found):
        best = undominated(points)
        ctas = [p.config.prefetch_ctas for p in best]
        bold = miss == own
        figure.add_scatter(
            x=[p.config.top_k for p in best],
            y=[p.tokens_per_s for p in best],
            mode="lines+markers+text" if bold else "lines+markers",
            line={"color": CYCLE[number % len(CYCLE)], "width": 3 if bold else 1.3},
            marker={"size": 8 if bold else 6, "symbol": ["circle" if p.inside else "circle-open" for p in best]},
            text=[count(n, "CTA") if n != before else "" for before, n in pairwise([0, *ctas])],
            customdata=ctas,
            textposition="bottom center",
            textfont={"size": 11},
            cliponaxis=False,
            hovertemplate="top-k %{x}: %{y:,.0f} tokens/s, %{customdata} CTAs<extra></extra>",
            name=f"{misses(miss)} misses",
        )
    figure.update_xaxes(title={"text": "top-k, blocks for each KV head"}, nticks=8)
    return figure.update_yaxes(title={"text": "predicted tokens/s"}, tickformat=",.0f", rangemode="normal")
