"""Pieces of a report's HTML: escaped text, tables, plots, sections, and the page around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import plotly.io
import plotly.offline

from sparda.explore.text import count as count
from sparda.explore.text import misses as misses


class Html(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def html(text: object) -> Html:
    """``text`` as HTML, escaped unless it is HTML already; a percent sign stays with its number."""
    return text if isinstance(text, Html) else Html(escape(str(text)).replace(" %", "\u00a0%"))


def tag(name: str, *content: object, **attributes: str) -> Html:
    """An element; ``class_`` and ``data_from`` stand for class and data-from."""
    given = "".join(f' {k.rstrip("_").replace("_", "-")}="{escape(v)}"' for k, v in attributes.items())
    return Html(f"<{name}{given}>{''.join(map(html, content))}</{name}>")


def lines(parts: Iterable[Html]) -> Html:
    """Parts one below the other."""
    return Html("\n".join(parts))


def paragraph(*content: object, kind: str = "") -> Html:
    """A paragraph; ``kind`` is its class: lead, note, warn."""
    return tag("p", *content, **({"class_": kind} if kind else {}))


def table(headers: Sequence[object], rows: Sequence[Sequence[object]], left: int = 1) -> Html:
    """A table that scrolls by itself where it is too wide; the first ``left`` columns are flush left."""

    def cells(name: str, row: Sequence[object]) -> Html:
        kinds: list[dict[str, str]] = [{"class_": "l"} if i < left else {} for i in range(len(row))]
        return tag("tr", *(tag(name, c, **k) for c, k in zip(row, kinds, strict=True)))

    head = tag("thead", cells("th", headers))
    return tag("div", tag("table", head, tag("tbody", *(cells("td", r) for r in rows))), class_="scroll", tabindex="0")


def plot(figure: Any, name: str) -> Html:
    """A plot as a fragment that finds Plotly on the page; ``name`` is its fixed id."""
    config = {"responsive": True, "displayModeBar": False, "displaylogo": False}
    height = f"{figure.layout.height}px"
    text = plotly.io.to_html(
        figure, full_html=False, include_plotlyjs=False, config=config, div_id=f"plot-{name}", default_height=height
    )
    return Html(text)


def figure(content: Html, caption: str, more: str = "") -> Html:
    """A plot with words above it, so that nobody has to hover."""
    return tag("figure", tag("figcaption", tag("b", caption), tag("span", more)), content)


def section(name: str, title: str, *content: Html) -> Html:
    """A section with an anchor."""
    return tag("section", tag("h2", title), "\n", lines(content), id=name)


def page(title: str, body: Html) -> str:
    """The whole file: style, script and the one copy of Plotly inside it."""
    template = files("sparda.explore").joinpath("templates", "report.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=html(title), bundle=plotly.offline.get_plotlyjs(), body=body)
