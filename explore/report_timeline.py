"""One simulated step in a report: its operations over time, and which of them make it as long as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from sparda.engine.plan import MAIN
from sparda.explore.report_plots import BLUE, GREEN, GREY, ORANGE, PURPLE, Figure, blank
from sparda.sim.costs import Machine
from sparda.sim.timeline import Timeline

CHOOSING = ("score", "headscore", "select")
FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "linear layers": (BLUE, ("qkv", "oproj", "gateup", "down", "lm_head")),
    "attention": (GREEN, ("attention",)),
    "choosing blocks": (PURPLE, CHOOSING),
    "moving blocks": (ORANGE, ("prefetch", "writeback")),
}
SMALL = "small kernels"


def family_of(kind: str) -> tuple[str, str]:
    """The family of an operation's kind, and its colour."""
    for name, (colour, kinds) in FAMILIES.items():
        if kind in kinds:
            return name, colour
    return SMALL, GREY


def window(step: Timeline, first: int, layers: int) -> tuple[float, float]:
    """Microseconds of some layers on the main stream; the whole step where there are none.

    A layer's blocks may be chosen layers earlier, so that is no sign of where it begins.
    """
    wanted = range(first, first + layers)
    spans = [s for s in step.spans if s.stream == MAIN and s.layer in wanted and s.kind not in CHOOSING]
    return (spans[0].start_ns / 1e3, spans[-1].end_ns / 1e3) if spans else (0.0, step.step_us)


def streams(step: Timeline, machine: Machine) -> Figure:
    """Every operation on its stream, and below it what the link and the GPU's memory carry."""
    figure = blank(560, barmode="overlay", margin={"l": 74, "r": 16, "t": 12, "b": 44}, legend={"y": 1.0})
    for name, colour in [*((n, c) for n, (c, _) in FAMILIES.items()), (SMALL, GREY)]:
        spans = [s for s in step.spans if family_of(s.kind)[0] == name]
        if spans:
            figure.add_bar(
                y=[s.stream for s in spans],
                base=[s.start_ns / 1e3 for s in spans],
                x=[s.ns / 1e3 for s in spans],
                orientation="h",
                width=0.78,
                marker={"color": colour, "line": {"width": 0.6, "color": colour}},
                text=[s.kind for s in spans],
                textposition="inside",
                insidetextanchor="middle",
                insidetextfont={"color": "#fff", "size": 12},
                textangle=0,
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
        xaxis={"title": {"text": "microseconds of the step"}, "anchor": "y3", "domain": [0, 1]},
        yaxis={
            "domain": [0.5, 1],
            "categoryorder": "array",
            "categoryarray": list(reversed(step.plan.streams)),
            "fixedrange": True,
        },
        yaxis2={"domain": [0.26, 0.44], "title": {"text": "link GB/s"}, "rangemode": "tozero", "fixedrange": True},
        yaxis3={"domain": [0, 0.18], "title": {"text": "HBM GB/s"}, "rangemode": "tozero", "fixedrange": True},
        uniformtext={"mode": "hide", "minsize": 10.5},
        dragmode="pan",
    )
    return figure


def _corners(at: Sequence[float], ends: Sequence[float], rates: Sequence[float]) -> tuple[list[float], list[float]]:
    """The points where a rate changes, and its end."""
    if not at:
        return [], []
    kept = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(rates)) if a != b)]
    return [*(at[i] for i in kept), ends[-1]], [*(rates[i] for i in kept), rates[-1]]
