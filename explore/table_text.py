"""A CTA table for a terminal and as Markdown, its notes below."""

from __future__ import annotations

from collections.abc import Callable

from sparda.explore.cells import NOT_RUN
from sparda.explore.notes import table_notes
from sparda.explore.table import CtaTable, TableRow
from sparda.explore.text import columns, misses, number, percent, tokens_label, wrapped


def table_text(table: CtaTable) -> str:
    """The table for a terminal, 80 columns at most: what there is no room for stands in the other formats."""
    shown = _columns(table)
    cells = [[make(r) for make in shown.values()] for r in table.rows]
    return columns(list(shown), cells) + "\n" + "\n".join(wrapped(n) for n in table_notes(table))


def _columns(table: CtaTable) -> dict[str, Callable[[TableRow], str]]:
    """Headers and cells. Quality and resident blocks take the room of the band, and of verdicts if need be."""
    top_ks = len({r.top_k for r in table.rows}) > 1
    plain = not table.rated and not table.selection
    shown: dict[str, Callable[[TableRow], str]] = {
        "ctx": lambda r: tokens_label(r.context_tokens),
        "batch": lambda r: str(r.batch),
        "miss": lambda r: misses(r.miss_rate),
    }
    if top_ks and not plain:
        shown["top-k"] = lambda r: str(r.top_k)
    if table.selection:
        shown["slots"] = lambda r: str(r.resident_blocks or r.top_k)
    shown["CTAs"] = lambda r: str(r.prefetch_ctas) + ("" if r.inside else "?")
    shown["ahead"] = lambda r: str(r.lookahead)
    shown["tokens/s"] = lambda r: f"{r.tokens_per_s:.0f}" + ("" if r.fits else "*")
    if plain:
        shown["low"], shown["high"] = (lambda r: number(r.low)), (lambda r: number(r.high))
    shown["gain"] = lambda r: percent(r.gain, 1, sign=True)
    if table.rated:
        shown["ppl"] = quality_cell
    if plain or not (top_ks or table.selection):
        shown["confirmed"] = _confirmed
    return shown


def quality_cell(r: TableRow) -> str:
    """The increase of perplexity, a dash where it is not known, a mark where a floor is broken."""
    known = r.quality.ppl_increase if r.quality else None
    return (NOT_RUN if known is None else percent(known, 1, sign=True)) + ("!" if r.floor_reason else "")


def _confirmed(r: TableRow) -> str:
    """The verdict with the measured gain, "-" where the public count was not measured."""
    if r.confirmed == NOT_RUN:
        return NOT_RUN
    gain = NOT_RUN if r.measured_gain is None else percent(r.measured_gain, 1, sign=True)
    return f"{r.confirmed} {gain:>7}"


def table_markdown(table: CtaTable) -> str:
    """The table as GitHub Markdown with its notes below."""
    more = [*(["resident"] if table.selection else []), *(["top-k", "recall", "perplexity"] if table.rated else [])]
    lines = [
        "| context | batch | misses | CTAs | lookahead | tokens/s | band | gain | confirmed | measured gain |"
        + "".join(f" {name} |" for name in more),
        "|---:|---:|---:|---:|---:|---:|---:|---:|:---:|---:|" + "---:|" * len(more),
    ]
    for r in table.rows:
        measured = "" if r.measured_gain is None else percent(r.measured_gain, 1, sign=True)
        ctas = f"{r.prefetch_ctas}{'' if r.inside else ' ?'}"
        speed = f"{r.tokens_per_s:.0f}" + ("" if r.fits else " \\*")
        band = NOT_RUN if r.low is None else f"{number(r.low)} to {number(r.high)}"
        lines.append(
            f"| {tokens_label(r.context_tokens)} | {r.batch} | {misses(r.miss_rate)} | {ctas} | {r.lookahead} "
            f"| {speed} | {band} | {percent(r.gain, 1, sign=True)} | {r.confirmed} | {measured} |"
            + "".join(f" {text} |" for text in _extra(table, r))
        )
    notes = [n.replace("*", "\\*") for n in table_notes(table)]
    return "\n".join([*lines, "", *(f"{n}\n" for n in notes)])


def _extra(table: CtaTable, r: TableRow) -> list[str]:
    """Cells of the columns that a selection and a quality profile add."""
    resident = [str(r.resident_blocks or r.top_k)] if table.selection else []
    if not table.rated:
        return resident
    recall = r.quality.recall if r.quality else None
    return [*resident, str(r.top_k), NOT_RUN if recall is None else percent(recall), quality_cell(r)]
