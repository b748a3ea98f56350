"""Retrieval tasks: facts hidden in a long text, and a question at its end whose answer is a number of five digits."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sparda.calibrate.measure.quality.documents import Document, encode, read_arrays, write_arrays
from sparda.calibrate.measure.quality.wordings import Wording
from sparda.engine.errors import SpardaError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SCHEMA = 1
DISTRACTORS = 3
"""Chains of the same form, about other things, elsewhere in the text."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A prompt of exactly ``context`` tokens, its question and answer included, and where in it is what.

    ``ids`` uint32 [context]. Spans are a first token and the one after the last: ``answers`` of what is scored, in the
    order of the chain (a middle that is asked for comes before the number, which is the last tokens of all), and
    ``facts`` of each fact that the answer takes. ``depth`` is where the first fact was put, from 0 (the beginning) to 1.
    ``filler`` names the document around them.
    """

    task: str
    wording: str
    context: int
    depth: float
    seed: int
    filler: str
    answers: tuple[tuple[int, int], ...]
    facts: tuple[tuple[int, int], ...]
    ids: NDArray[np.uint32]

    @property
    def scored(self) -> NDArray[np.int64]:
        """Positions of the tokens that are scored, in order: position p is foretold by the logits at p - 1."""
        return np.concatenate([np.arange(*span) for span in self.answers])


class Maker:
    """Makes cases of one tokenizer out of documents of filler text."""

    def __init__(self, documents: Sequence[Document], tokenizer: Tokenizer) -> None:
        if not documents:
            raise SpardaError("no documents to hide facts in; give at least one.")
        self.documents, self.tokenizer = tuple(documents), tokenizer
        self._line_ends: dict[int, bool] = {}

    def case(self, wording: Wording, context: int, depth: float, seed: int) -> Case:
        """The same arguments make the same case.

        Of two links the second stands half a context from the first, before it where there is no room after it.
        Raises SpardaError for a depth outside 0 to 1 and a context that facts and question do not leave room in.
        """
        if not 0 <= depth <= 1:
            raise SpardaError(f"a depth of {depth}; 0 (the beginning) to 1 (the end) is allowed.")
        rng = np.random.default_rng([seed, context, round(depth * 1000), zlib.crc32(wording.name.encode())])
        chains = wording.chains(1 + DISTRACTORS, rng)
        ending, answers = self._ending(wording, chains[0])
        facts = [self._ids("\n" + link.format(**c) + "\n") for c in chains for link in wording.links]
        room = context - len(ending) - sum(len(f) for f in facts)
        filler, name = self._filler(room, rng)
        depths = [(depth + i / 2) % 1 if i else depth for i in range(len(wording.links))]
        depths += list(rng.random(len(facts) - len(depths)))
        parts, spans = self._hide(filler, facts, depths)
        ids = np.concatenate([*parts, ending]).astype(np.uint32)
        assert len(ids) == context
        start = context - len(ending)
        scored = tuple((start + a, start + b) for a, b in answers)
        kept = tuple(spans[: len(wording.links)])
        return Case(wording.task, wording.name, context, depth, seed, name, scored, kept, ids)

    def _ending(self, wording: Wording, chain: dict[str, str]) -> tuple[NDArray[np.uint32], list[tuple[int, int]]]:
        """Question and answer, and where in them what is scored is: a token that is only a space is not."""
        parts, spans = [self._ids("\n" + wording.question.format(**chain))], []
        for i, piece in enumerate(wording.answer):
            text = piece.format(**chain)
            ids = self._ids(text if i % 2 else " " + text)
            if i % 2 == 0:
                start = sum(len(p) for p in parts)
                lead = int(self.tokenizer.decode([int(ids[0])]) == " ")
                spans.append((start + lead, start + len(ids)))
            parts.append(ids)
        return np.concatenate(parts), spans

    def _filler(self, tokens: int, rng: np.random.Generator) -> tuple[NDArray[np.uint32], str]:
        fit = [d for d in self.documents if len(d) >= tokens]
        if tokens < 1 or not fit:
            longest = max(len(d) for d in self.documents)
            raise SpardaError(
                f"{tokens} tokens of text are wanted around the facts and the longest document has {longest}; "
                "give another context or longer documents."
            )
        document = fit[int(rng.integers(len(fit)))]
        start = int(rng.integers(len(document) - tokens + 1))
        return document.ids[start : start + tokens].astype(np.uint32), document.name

    def _hide(
        self, filler: NDArray[np.uint32], facts: Sequence[NDArray[np.uint32]], depths: Sequence[float]
    ) -> tuple[list[NDArray[np.uint32]], list[tuple[int, int]]]:
        """The filler with each fact after the line end nearest to its depth, and where each fact is then."""
        ends = np.flatnonzero([self._ends_line(int(t)) for t in filler]) + 1
        places = np.unique(np.concatenate([[0], ends, [len(filler)]]))
        at = [int(places[np.abs(places - d * len(filler)).argmin()]) for d in depths]
        parts, spans, last, written = [], [(0, 0)] * len(facts), 0, 0
        for i in sorted(range(len(facts)), key=lambda i: at[i]):
            parts += [filler[last : at[i]], facts[i]]
            written += at[i] - last
            spans[i] = (written, written + len(facts[i]))
            written, last = spans[i][1], at[i]
        return [*parts, filler[last:]], spans

    def _ends_line(self, token: int) -> bool:
        if token not in self._line_ends:
            self._line_ends[token] = self.tokenizer.decode([token]).endswith("\n")
        return self._line_ends[token]

    def _ids(self, text: str) -> NDArray[np.uint32]:
        return encode(text, self.tokenizer).astype(np.uint32)
