"""Facts hidden in texts: what finding them costs under each choice, over all lengths and depths that were tried."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

from sparda.calibrate.quality import Choice, QualityProfile, Retrieval
from sparda.explore.quality_compare import Difference
from sparda.explore.text import percent

TASKS = ("needle", "multihop")
MISSING = "not measured"
PLAIN = "recency"
"""The control that reads the question alone, wherever the fact lies."""


def cells_of(q: QualityProfile, task: str, choice: Choice) -> dict[tuple[int, float], Retrieval]:
    """The choice's rows by context and depth; by context alone where no single depth was kept."""
    rows = [r for r in q.retrievals if r.task == task and r.choice == choice]
    single = [r for r in rows if r.depth >= 0]
    return {(r.context_tokens, r.depth): r for r in single or rows}


def asked(q: QualityProfile, task: str, top_k: int) -> list[Choice]:
    """Choices that were tried on a task, in the order of the rows."""
    rows = (r.choice for r in q.retrievals if r.task == task and r.choice.top_k == top_k)
    return list(dict.fromkeys(rows))


def nats_more(q: QualityProfile, task: str, choice: Choice, than: Choice | None = None) -> Difference | None:
    """Nats of an answer's token over those of another choice, or of full attention; None where none is in both.

    Means over cells of context and depth; the error is of the cells' differences, in which the same trials meet.
    """
    own, other = cells_of(q, task, choice), cells_of(q, task, than) if than else {}
    pairs = [
        (row.nats, other[cell].nats if than else row.dense_nats)
        for cell, row in own.items()
        if not than or cell in other
    ]
    if not pairs:
        return None
    apart = [a - b for a, b in pairs]
    error = stdev(apart) / sqrt(len(apart)) if len(apart) > 1 else None
    return Difference(fmean(a for a, _ in pairs), fmean(b for _, b in pairs), error)


def retrieval_answers(q: QualityProfile, top_k: int) -> list[str]:
    """A sentence on what each task costs, and one on what was found."""
    return [sentence for task in TASKS for sentence in _task(q, task, top_k)]


def _task(q: QualityProfile, task: str, k: int) -> list[str]:
    choices = asked(q, task, k)
    rows = [r for r in q.retrievals if r.task == task and r.choice in choices and r.depth < 0]
    if not rows:
        return [f"{task}, top-k {k}: {MISSING}."]
    contexts = sorted({r.context_tokens for r in rows})
    over = f"{contexts[0]} to {contexts[-1]} tokens" if len(contexts) > 1 else f"{contexts[0]} tokens"
    dense = fmean(r.dense_nats for r in cells_of(q, task, choices[0]).values())
    more = [(c, nats_more(q, task, c)) for c in choices]
    found = ", ".join(f"{c.label} {percent(_share(rows, c), 0)}" for c in choices)
    sentences = [
        f"{task}, {over}, top-k {k}: a token of the answer costs {dense:.2f} nats with full attention; "
        f"{', '.join(f'{c.label} {_said(d)}' for c, d in more)}.",
        f"All tokens of the answer the likeliest: with full attention in {percent(_dense(rows, choices[0]), 0)} of "
        f"{sum(r.trials for r in rows if r.choice == choices[0])} trials, {found}.",
    ]
    return sentences + _against_plain(q, task, choices)


def _against_plain(q: QualityProfile, task: str, choices: Sequence[Choice]) -> list[str]:
    plain = next((c for c in choices if c.selector == PLAIN), None)
    rest = [c for c in choices if c != plain and c.selector != "oracle"]
    if plain is None or not rest:
        return []
    told = ", ".join(f"{c.label} {_said(nats_more(q, task, c, plain))}" for c in rest)
    return [f"Against a plain window of the newest blocks, {task}: {told}."]


def _said(d: Difference | None) -> str:
    if d is None:
        return MISSING
    return f"{d.value:+.2f}" if d.told else "no difference"


def _share(rows: Sequence[Retrieval], choice: Choice) -> float:
    own = [r for r in rows if r.choice == choice]
    return sum(r.found * r.trials for r in own) / max(1, sum(r.trials for r in own))


def _dense(rows: Sequence[Retrieval], choice: Choice) -> float:
    own = [r for r in rows if r.choice == choice]
    return sum(r.dense_found * r.trials for r in own) / max(1, sum(r.trials for r in own))
