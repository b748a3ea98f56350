"""A quality profile for a reader: tables of at most 80 columns by selector and top-k, and answers in sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sparda.calibrate.quality import (
    Choice,
    Dynamics,
    Perplexity,
    QualityProfile,
    Recall,
    Retrieval,
    Spread,
    quality_names,
)
from sparda.engine.loader import to_plain
from sparda.explore.quality_answers import CRITERION, answers
from sparda.explore.quality_compare import at_top_k, by_choice, main_top_k
from sparda.explore.quality_retrieval import TASKS
from sparda.explore.quality_summary import summary_text
from sparda.explore.text import columns, count, wrapped

MEASURE = "Measure your model with `sparda quality measure --checkpoint DIR --text FILES`."
NARROW, WIDE, SPREADS = 9, 4, 3
"""Columns that 80 characters have room for: of bare numbers, of numbers with errors, of those with least and most."""


def text_of_quality(q: QualityProfile) -> str:
    """All of it: what was measured on, recall, mass, perplexity, retrieval, misses, answers."""
    sections = [
        _head(q),
        summary_text(q),
        recall_text(q),
        *_more(q),
        perplexity_text(q),
        *(retrieval_text(q, t) for t in TASKS),
    ]
    told = [CRITERION, *answers(q)]
    return "\n\n".join(s for s in [*sections, misses_text(q), "\n".join(map(wrapped, told))] if s)


def plain_quality(q: QualityProfile) -> dict[str, object]:
    """The profile as plain data, with ``answers`` and the ``top_k`` that they are about."""
    return {"quality": q.name, **to_plain(q), "top_k": main_top_k(q), "answers": answers(q)}


def list_text(profiles: Sequence[QualityProfile]) -> str:
    """The quality profiles that come with the package."""
    if not profiles:
        return wrapped(f"No quality profile comes with this package. {MEASURE}")
    rows = [[q.name, q.model, str(q.context_tokens), str(len(q.documents)), str(len(q.recalls))] for q in profiles]
    return columns(["quality", "model", "tokens", "documents", "recall rows"], rows, left=2)


def default_name() -> str:
    """The profile that is shown where none is named: the first that comes with the package, if there is any."""
    return next(iter(quality_names()), "")


def _head(q: QualityProfile) -> str:
    p = q.spec
    texts = ", ".join(f"{d.name} ({d.kind})" for d in q.documents)
    lines = [
        f"{q.name}: {q.model} at {q.context_tokens} tokens, {q.blocks} blocks of {p.block}, {p.forced} of them always "
        f"chosen. {count(len(q.documents), 'document')}: {texts or 'none'}.",
        *(_facts(name, facts) for name, facts in _about(q) if facts),
    ]
    return "\n".join(map(wrapped, lines))


def _about(q: QualityProfile) -> list[tuple[str, Mapping[str, str | int | float]]]:
    return [("Conditions", q.conditions), ("Training", q.training), ("Measured", q.provenance)]


def _facts(name: str, facts: Mapping[str, str | int | float]) -> str:
    """Facts in a sentence; what a training was judged at stands in the file, for those who train."""
    told = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items() if "judged" not in k)
    return f"{name}: {', '.join(told)}."


def _grid(
    title: str, choices: Sequence[Choice], top_ks: Sequence[int], cell: Callable[[Choice], str | None], most: int
) -> str:
    """A line for each choice and a column for each top-k; one table below the other where it were too wide."""
    tables = []
    for start in range(0, len(top_ks), most):
        here = top_ks[start : start + most]
        rows = [[c.label, *((cell(at_top_k(c, k)) or "-") for k in here)] for c in by_choice(choices)]
        tables.append(columns(["top-k", *map(str, here)], rows))
    return "\n".join([title, *tables]) if tables else ""


def recall_text(q: QualityProfile) -> str:
    """Recall of what ``sparse`` chooses, by choice and top-k."""

    def cell(c: Choice) -> str | None:
        row = q.recall_of(c)
        return f"{100 * row.recall:.1f}" if row else None

    choices = [r.choice for r in q.recalls]
    title = "Recall of the free blocks that sparse chooses, %, by top-k"
    return _grid(title, choices, sorted({c.top_k for c in choices}), cell, NARROW)


def _more(q: QualityProfile) -> list[str]:
    """Attention mass by top-k; and at one top-k the spreads, and what is recalled of far and of absent blocks."""
    choices, k = [r.choice for r in q.recalls], main_top_k(q)

    def cell(c: Choice) -> str | None:
        row = q.recall_of(c)
        return f"{100 * row.mass:.1f}" if row else None

    mass = _grid(
        "Attention on the chosen blocks, %, by top-k", choices, sorted({c.top_k for c in choices}), cell, NARROW
    )
    rows = [_spreads(r) for c in by_choice(choices) if (r := q.recall_of(at_top_k(c, k)))]
    headers = ["choice", "recall", "layers", "documents", "far", "absent", "mass", "layers", "outside"]
    detail = (
        f"Top-k {k} in detail, %\n{columns(headers, rows)}\n"
        + wrapped(
            "layers, documents: least and most over their means. far: recall of blocks more than 15 back; absent: of "
            "blocks not chosen in the step before. outside: of the attention outside the forced blocks."
        )
        if rows
        else ""
    )
    return [mass, detail]


def _spreads(r: Recall) -> list[str]:
    def of(s: Spread) -> str:
        return f"{100 * s.low:.0f}-{100 * s.high:.0f}"

    shares = [f"{100 * v:.1f}" for v in (r.far, r.absent, r.mass)]
    own = [r.choice.label, f"{100 * r.recall:.1f}", of(r.layers), of(r.documents)]
    return [*own, *shares, of(r.mass_layers), f"{100 * r.mass_free:.1f}"]


def perplexity_text(q: QualityProfile) -> str:
    """Nats per token over full attention with their standard errors, by choice and top-k."""

    def cell(c: Choice) -> str | None:
        row: Perplexity | None = q.perplexity_of(c)
        return f"{row.nats:.3f} ±{row.standard_error:.3f}" if row else None

    choices = [p.choice for p in q.perplexities]
    title = "Nats per token over full attention's, with standard errors, by top-k"
    return _grid(title, choices, sorted({c.top_k for c in choices}), cell, WIDE)


def retrieval_text(q: QualityProfile, task: str) -> str:
    """Facts found, percent of the trials, and nats of an answer's token, by choice and context; a table a top-k."""
    rows = [r for r in q.retrievals if r.task == task and r.depth < 0]
    contexts = sorted({r.context_tokens for r in rows})
    parts = []
    for k in sorted({r.choice.top_k for r in rows}):
        here = [r for r in rows if r.choice.top_k == k]
        known = {(r.choice, r.context_tokens): r for r in here}
        first = {r.context_tokens: r for r in here}
        dense = [(100 * first[c].dense_found, first[c].dense_nats) for c in contexts if c in first]
        lines = [["full attention", *(f"{found:.0f} {nats:5.2f}" for found, nats in dense)]]
        lines += [
            [c.label, *(_found(known.get((at_top_k(c, k), t))) for t in contexts)]
            for c in by_choice([r.choice for r in here])
        ]
        parts.append(columns([f"top-k {k}", *map(str, contexts)], lines))
    trials = sorted({r.trials for r in rows})
    title = (
        f"{task}: facts found, % of {' or '.join(map(str, trials))} trials, and nats of an answer's token, by tokens "
        "of context"
    )
    return "\n".join([wrapped(title), *parts]) if parts else ""


def _found(row: Retrieval | None) -> str:
    return f"{100 * row.found:.0f} {row.nats:5.2f}" if row else "-"


def misses_text(q: QualityProfile) -> str:
    """Misses by resident blocks and top-k, means over layers with the least and the most."""
    rows = sorted(q.dynamics, key=lambda d: d.top_k)
    if not rows:
        return ""
    title = "Free picks of sparse that are missed in a step, %, by resident blocks and top-k"
    note = (
        "In brackets the least and the most over layers. Of the free picks of a KV head, chosen in the step before "
        "too: reuse; by every KV head: all heads; by the same head of the next layer: next layer. any head: blocks "
        "that a head or another chooses, over the free picks of one."
    )
    tables = [_misses_table(rows[start : start + SPREADS]) for start in range(0, len(rows), SPREADS)]
    return "\n".join([title, *tables, wrapped(note)])


def _misses_table(rows: Sequence[Dynamics]) -> str:
    lines = []
    for t in sorted({float(t) for d in rows for t in d.at_top_k}):
        found = [next((s for key, s in d.at_top_k.items() if float(key) == t), None) for d in rows]
        lines.append([f"{t:g} x top-k", *(_share(s) for s in found)])
    lines.append(["reuse", *(_share(d.reuse) for d in rows)])
    lines.append(["all heads", *(f"{100 * d.same:.1f}" for d in rows)])
    lines.append(["next layer", *(f"{100 * d.next_layer:.1f}" for d in rows)])
    lines.append(["any head", *(f"{d.union:.2f} x" for d in rows)])
    return columns(["resident", *(str(d.top_k) for d in rows)], lines)


def _share(s: Spread | None) -> str:
    return f"{100 * s.mean:.1f} [{100 * s.low:.1f}-{100 * s.high:.1f}]" if s else "-"
