"""The plots of a report, in colours that read on light and on dark; the page sets text and grid colours itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from sparda.explore.predict import Prediction
from sparda.explore.report_data import Curve, Held, undominated
from sparda.explore.text import percent, tokens_label
from sparda.sim.costs import Machine
from sparda.sim.timeline import Timeline

BLUE, ORANGE, GREEN, PURPLE, PINK, TEAL = "#3f7fbf", "#d0703a", "#3a9a72", "#8b6bc4", "#c2577f", "#2f97a5"
GREY = "#868c94"
CYCLE = (BLUE, GREEN, PURPLE, TEAL, PINK, ORANGE)
POLICY = {"sparda": BLUE, "sparda-on-demand": GREEN, "sparse": PURPLE, "sparse-resident": PINK}
FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "linear layers": (BLUE, ("qkv", "oproj", "gateup", "down", "lm_head")),
    "attention": (GREEN, ("attention",)),
    "choosing blocks": (PURPLE, ("score", "headscore", "select")),
    "moving blocks": (ORANGE, ("prefetch", "writeback")),
}
SMALL = "small kernels"

Figure = Any
"""A plotly figure; plotly comes without types."""


def family_of(kind: str) -> tuple[str, str]:
    """The family of an operation's kind, and its colour."""
    for name, (colour, kinds) in FAMILIES.items():
        if kind in kinds:
            return name, colour
    return SMALL, GREY


def conditions(h: Held) -> str:
    """What a row was measured under, in a line for hovering."""
    w, c = h.workload, h.config
    return (
        f"{h.row.kind}, {c.policy}<br>batch {w.batch}, {tokens_label(w.context_tokens)} tokens, "
        f"{percent(w.miss_rate)} misses, top-k {c.top_k}, {c.slots} slots<br>"
        f"{c.prefetch_ctas} CTAs x {c.prefetch_warps} warps x {c.prefetch_stages} stages, lookahead {c.lookahead}<br>"
        f"predicted {h.predicted_us / 1e3:.3f} ms, measured {h.row.us / 1e3:.3f} ms: {percent(h.error, sign=True)}<br>"
        f"run to run {percent(h.row.spread)}, session {escape(h.row.session)}"
    )


def _figure(height: int, **layout: object) -> Figure:
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
    return figure.update_layout(**layout)


def _log_axis(ticks: Sequence[float], title: str) -> dict[str, object]:
    texts = [f"{t:g}" for t in ticks]
    return {"type": "log", "tickvals": list(ticks), "ticktext": texts, "title": {"text": title}}


def errors(held: Sequence[Held]) -> Figure:
    """Predicted against measured step times on logarithmic axes, with the identity and bands of 5 and 15 %."""
    figure = _figure(520)
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
            name=f"within {share:.0%}",
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
    figure = _figure(240, barmode="stack", bargap=0.06, legend={"y": 1.04})
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


def curve(c: Curve, band: float) -> Figure:
    """Predicted step time over the CTA count, with its band, what was measured, the choice and the public rule."""
    figure = _figure(250, margin={"l": 52, "r": 10, "t": 8, "b": 40}, showlegend=False)
    counts = [p.config.prefetch_ctas for p in c.points]
    times = [p.step_us / 1e3 for p in c.points]
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


def streams(step: Timeline, machine: Machine) -> Figure:
    """Every operation on its stream, and below it what the link and the GPU's memory carry."""
    figure = _figure(560, barmode="overlay", margin={"l": 74, "r": 16, "t": 12, "b": 44}, legend={"y": 1.0})
    lanes: dict[str, str] = {s: s for s in step.plan.streams}
    for name, colour in [*((n, c) for n, (c, _) in FAMILIES.items()), (SMALL, GREY)]:
        spans = [s for s in step.spans if family_of(s.kind)[0] == name]
        if spans:
            figure.add_bar(
                y=[lanes[s.stream] for s in spans],
                base=[s.start_ns / 1e3 for s in spans],
                x=[s.ns / 1e3 for s in spans],
                orientation="h",
                width=0.78,
                marker={"color": colour, "line": {"width": 0.6, "color": "rgba(255,255,255,0.55)"}},
                text=[s.kind for s in spans],
                textposition="inside",
                insidetextanchor="middle",
                insidetextfont={"color": "#fff", "size": 12},
                textangle=0,
                constraintext="none",
                hovertext=[f"{s.name}: {s.start_ns / 1e3:.1f} to {s.end_ns / 1e3:.1f} us" for s in spans],
                hovertemplate="%{hovertext}, %{x:.1f} us<extra></extra>",
                name=name,
            )
    at = [s[0] / 1e3 for s in step.samples]
    ends = [*at[1:], step.step_us]
    for axis, name, column, most, colour in (
        ("y2", "link", 1, machine.link_h2d_gb_s, ORANGE),
        ("y3", "HBM", 2, machine.hbm_gb_s, BLUE),
    ):
        rates = [round(float(s[column]), 2) for s in step.samples]
        x, y = _corners(at, ends, rates)
        line = {"color": colour, "width": 1.2, "shape": "hv"}
        figure.add_scatter(
            x=x, y=y, yaxis=axis, mode="lines", line=line, fill="tozeroy", name=f"{name} GB/s", showlegend=False
        )
        dashed = {"color": GREY, "width": 1, "dash": "dot"}
        figure.add_scatter(
            x=[0, step.step_us], y=[most, most], yaxis=axis, mode="lines", line=dashed, hoverinfo="skip", name="limit",
            showlegend=False,
        )  # fmt: skip
    figure.update_layout(
        xaxis={"title": {"text": "microseconds from the start of the step"}, "anchor": "y3", "domain": [0, 1]},
        yaxis={
            "domain": [0.5, 1],
            "categoryorder": "array",
            "categoryarray": list(reversed(lanes)),
            "fixedrange": True,
        },
        yaxis2={"domain": [0.26, 0.44], "title": {"text": "link GB/s"}, "rangemode": "tozero", "fixedrange": True},
        yaxis3={"domain": [0, 0.18], "title": {"text": "HBM GB/s"}, "rangemode": "tozero", "fixedrange": True},
        uniformtext={"mode": "hide", "minsize": 9},
        dragmode="pan",
    )
    return figure


def _corners(at: Sequence[float], ends: Sequence[float], rates: Sequence[float]) -> tuple[list[float], list[float]]:
    """The points where a rate changes, and its end."""
    if not at:
        return [], []
    kept = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(rates)) if a != b)]
    return [*(at[i] for i in kept), ends[-1]], [*(rates[i] for i in kept), rates[-1]]


def fronts(found: Sequence[tuple[float, Sequence[Prediction]]], own: float) -> Figure:
    """Tokens per second against the block budget, a line for each miss rate, the scenario's one in bold."""
    figure = _figure(420)
    for number, (miss, points) in enumerate(found):
        best = undominated(points)
        bold = miss == own
        figure.add_scatter(
            x=[p.config.top_k for p in best],
            y=[p.tokens_per_s for p in best],
            mode="lines+markers+text" if bold else "lines+markers",
            line={"color": CYCLE[number % len(CYCLE)], "width": 3 if bold else 1.3},
            marker={"size": 8 if bold else 6, "symbol": ["circle" if p.inside else "circle-open" for p in best]},
            text=[f"{p.config.prefetch_ctas} CTAs" for p in best],
            textposition="top right",
            textfont={"size": 11},
            cliponaxis=False,
            hovertemplate="top-k %{x}: %{y:,.0f} tokens/s, %{text}<extra></extra>",
            name=f"{percent(miss)} misses",
        )
    figure.update_xaxes(title={"text": "top-k: blocks read by each KV head (proxy of quality)"}, nticks=8)
    return figure.update_yaxes(title={"text": "predicted tokens/s"}, tickformat=",.0f", rangemode="normal")
