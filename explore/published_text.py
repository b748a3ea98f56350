"""The comparison with published figures as text of 80 columns, and as a section of a document."""

from __future__ import annotations

from collections.abc import Sequence

from sparda.explore.published_case import Case, conclusions
from sparda.explore.published_ratios import Ratio
from sparda.explore.text import columns, percent, tokens_label, wrapped


def text_of(case: Case) -> str:
    """Tables, assumptions and conclusions for a terminal."""
    parts = [wrapped(_intro(case))]
    for title, (headers, rows) in _tables(case).items():
        parts += ["", wrapped(f"{title}:"), columns(headers, rows, left=2)]
    parts += ["", "Assumed:", *(wrapped(a, "  ") for a in assumed(case))]
    parts += ["", "It comes to:", *(wrapped(c, "  ") for c in conclusions(case))]
    return "\n".join(parts)


def markdown_of(case: Case) -> str:
    """The same as a section of a document."""
    parts = ["### Published figures beside the model", "", _intro(case)]
    for title, (headers, rows) in _tables(case).items():
        parts += ["", f"{title}:", "", _markdown(headers, rows, left=2)]
    parts += ["", "Assumed:", "", *(f"* {a}" for a in assumed(case))]
    parts += ["", "It comes to:", "", *(f"* {c}" for c in conclusions(case))]
    return "\n".join(parts)


def _tables(case: Case) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Headers and rows by title: speeds of each machine, then each ratio."""
    return {**_cells(case), **_ratios(case.ratios)}


def _intro(case: Case) -> str:
    played = ", ".join(f"{machine} on {name} ({tier})" for machine, (name, tier) in case.profiles.items())
    return (
        f"Decode figures of {case.published.paper} beside the model, for {case.published.model}. Played: {played}. "
        "The published cells are second hand; the model's range is over all that is not known, and nothing is fitted "
        "to the cells."
    )


def assumed(case: Case) -> list[str]:
    """Every assumption in words, with its value."""
    a, launches = case.assumptions, case.published.launches
    counts = ", ".join(f"{policy} {n}" for policy, n in launches.per_layer.items())
    host = (
        f"The host launches every kernel from Python, at {_list(a.launch_us)} us each; launches per layer: {counts} "
        f"({launches.source}). Read elsewhere: {launches.host_us}."
        if a.eager
        else "The whole step is one CUDA graph: the host launches nothing during it (eager = false)."
    )
    alike = "the same on both sides of a ratio" if a.same_misses else "any on either side of a ratio"
    ctas = "the public launcher's rule" if a.public_ctas else "two, as this project's default"
    return [
        host,
        f"Miss rates are not published: played at {', '.join(map(percent, a.miss_rates))} of top-k, {alike}.",
        f"Prefetch CTAs: {ctas}; {a.prefetch_warps} warps, pipeline depth {a.prefetch_stages}; a copy that the main "
        f"stream waits for has {a.blocking_ctas} CTAs.",
        f"Kernels take {a.kernel_factor:g} times ours and copies run at {a.copy_factor:g} times our rate: the public "
        "kernels are not ours and nobody here measured them.",
        "Not modelled: Sparse there offloads layer 0 too, the prefetch of a layer is issued only after the layer "
        "before it, and the copy walks every slot instead of a list of misses.",
    ]


def _cells(case: Case) -> dict[str, tuple[list[str], list[list[str]]]]:
    headers = ["system", "context", "batch", "published", "model", "published/model"]
    tables: dict[str, tuple[list[str], list[list[str]]]] = {}
    for c in case.cells:
        row = [
            case.published.headings[c.cell.policy],
            tokens_label(c.cell.context_tokens),
            str(c.cell.batch),
            f"{c.cell.tokens_per_s:.0f}",
            f"{c.low:.0f}-{c.high:.0f}",
            f"{c.ratio_low:.2f}-{c.ratio_high:.2f}",
        ]
        title = f"Tokens/s, {c.cell.machine}"
        tables.setdefault(title, (headers, []))[1].append(row)
    return tables


def _ratios(found: Sequence[Ratio]) -> dict[str, tuple[list[str], list[list[str]]]]:
    headers = ["machine", "context", "batch", "published", "model", "same order in", "verdict"]
    tables: dict[str, tuple[list[str], list[list[str]]]] = {}
    for r in found:
        row = [
            r.machine,
            tokens_label(r.context_tokens),
            str(r.batch),
            f"{r.published:.2f}",
            f"{r.low:.2f}-{r.high:.2f}",
            f"{r.agree} of {r.plays}",
            r.verdict,
        ]
        tables.setdefault(r.about[0].upper() + r.about[1:], (headers, []))[1].append(row)
    return tables


def _markdown(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    rule = ["---" if i < left else "---:" for i in range(len(headers))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [headers, rule, *rows])


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{v:g}" for v in values)
