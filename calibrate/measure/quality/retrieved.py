"""Whether a model still finds a fact that lies far back, when it attends to chosen blocks only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

import torch

from sparda.calibrate.measure.quality.materials import Materials
from sparda.calibrate.measure.quality.selectors import chooser
from sparda.calibrate.measure.quality.window import read_prefix, run_window
from sparda.calibrate.quality import Choice, Retrieval
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import SparseSpec
from sparda.engine.weights import Weights

WINDOW = 256
"""Tokens before the answer that run under the choice, the question among them; those before are read densely."""

ALL_DEPTHS = -1.0


class Case(Protocol):
    """A prompt that ends in a question and its answer; the fact lies at ``depth``, 0 to 1.

    ``ids``: a row of integers, ``context`` of them. ``answers``: of each piece of the answer the first token and the
    one after the last, in order; what stands between two pieces is given.
    """

    @property
    def ids(self) -> Any: ...
    @property
    def answers(self) -> Sequence[tuple[int, int]]: ...
    @property
    def task(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def depth(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Answered:
    """Whether every token of an answer was the likeliest after those before it, and their mean loss.

    No choice: with full attention.
    """

    choice: Choice | None
    found: bool
    nats: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One case: the answer with full attention, and under each choice."""

    task: str
    context: int
    depth: float
    dense: Answered
    answers: tuple[Answered, ...]


def trial(
    weights: Weights,
    spec: SparseSpec,
    case: Case,
    choices: Sequence[Choice],
    materials: Materials,
    window: int = WINDOW,
) -> Trial:
    """Ask a case's question with full attention and under each choice, the answer's tokens given one by one.

    Raises SpardaError where the answer is empty or lies outside the prompt.
    """
    ids = torch.tensor([int(i) for i in case.ids], dtype=torch.int64)
    positions = [p for begin, end in case.answers for p in range(begin, end)]
    if not positions or not 2 <= positions[0] <= positions[-1] < len(ids):
        spans = ", ".join(f"{begin} to {end}" for begin, end in case.answers) or "nowhere"
        raise SpardaError(
            f"a case of {len(ids)} tokens with its answer at {spans}; the answer must be inside the prompt, two tokens "
            "or more after its beginning."
        )
    prefix = read_prefix(weights, ids[: max(1, positions[0] - 1 - window)])
    ours = materials.of_text(prefix.basis, {})
    # A window's first token is not predicted: what is found of position p stands one before it.
    asked = torch.tensor(positions, device=weights.embed.device) - prefix.tokens - 1

    def answered(choice: Choice | None) -> Answered:
        choose = chooser(choice, ours) if choice else lambda view: None
        found = run_window(weights, spec, prefix, ids[prefix.tokens : positions[-1] + 1], choose)
        return Answered(choice, bool(found.likeliest[asked].all()), float(found.nats[asked].mean()))

    return Trial(case.task, case.context, case.depth, answered(None), tuple(answered(c) for c in choices))


def retrieval_rows(trials: Sequence[Trial]) -> tuple[Retrieval, ...]:
    """Rows by choice, task, context and depth, and over all depths; of the trials that have the choice."""
    cells: dict[tuple[Choice, str, int, float], list[tuple[Answered, Answered]]] = {}
    for t in trials:
        for answer in t.answers:
            for depth in (ALL_DEPTHS, t.depth):
                assert answer.choice is not None
                cells.setdefault((answer.choice, t.task, t.context, depth), []).append((answer, t.dense))
    return tuple(
        Retrieval(
            choice=choice,
            task=task,
            context_tokens=context,
            depth=depth,
            trials=len(cell),
            found=fmean(answer.found for answer, _ in cell),
            nats=fmean(answer.nats for answer, _ in cell),
            dense_found=fmean(dense.found for _, dense in cell),
            dense_nats=fmean(dense.nats for _, dense in cell),
        )
        for (choice, task, context, depth), cell in cells.items()
    )
