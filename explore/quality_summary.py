"""A quality profile in one table: what each choice catches at one top-k, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping

from sparda.calibrate.quality import Choice, Perplexity, QualityProfile, Recall
from sparda.explore.quality_compare import by_choice, main_top_k
from sparda.explore.quality_retrieval import TASKS
from sparda.explore.text import columns, wrapped


def summary_text(q: QualityProfile) -> str:
    """The main choices at one top-k: blocks and attention caught, what that costs in text and in retrieval."""
    k = main_top_k(q)
    measured = [*(r.choice for r in q.recalls), *(p.choice for p in q.perplexities)]
    here = by_choice([c for c in measured if c.top_k == k])
    chosen = [c for c in here if c.heads <= 1 and (c.lookahead <= 1 or c.selector == "forecast")]
    contexts = {t: max((r.context_tokens for r in q.retrievals if r.task == t), default=0) for t in TASKS}
    asked = [t for t in TASKS if contexts[t]]
    rows = [[c.label, *_caught(q.recall_of(c)), _lost(q.perplexity_of(c)), *_answers(q, c, contexts)] for c in chosen]
    dense = [_dense(q, t, contexts[t]) for t in asked]
    if not rows:
        return ""
    title = (
        f"Top-k {k}: % of the blocks of sparse and of oracle, % of attention, nats per token more than full attention"
    )
    if asked:
        longest = " and ".join(f"{t}, {contexts[t]} tokens" for t in asked)
        title += f"; nats of an answer's token ({longest})"
    table = columns(
        ["choice", "blocks", "oracle", "mass", "nats", *asked], [["all blocks", *[""] * 3, "0", *dense], *rows]
    )
    return f"{wrapped(title)}\n{table}"


def _caught(row: Recall | None) -> list[str]:
    return [f"{100 * v:.1f}" for v in (row.recall, row.recall_oracle, row.mass)] if row else ["-"] * 3


def _lost(row: Perplexity | None) -> str:
    return f"{row.nats:.3f} ±{row.standard_error:.3f}" if row else "-"


def _answers(q: QualityProfile, choice: Choice, contexts: Mapping[str, int]) -> list[str]:
    found = {(r.task, r.context_tokens): r for r in q.retrievals if r.choice == choice and r.depth < 0}
    rows = [found.get((task, context)) for task, context in contexts.items() if context]
    return [f"{row.nats:.2f}" if row else "-" for row in rows]


def _dense(q: QualityProfile, task: str, context: int) -> str:
    rows = (r for r in q.retrievals if (r.task, r.context_tokens) == (task, context) and r.depth < 0)
    row = next(rows, None)
    return f"{row.dense_nats:.2f}" if row else "-"
