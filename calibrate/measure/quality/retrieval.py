"""Retrieval tasks: facts hidden in a long text, and a question at its end whose answer is a number of five digits."""

from __future__ import annotations

import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sparda.calibrate.measure.quality.command import Parser
from sparda.calibrate.measure.quality.documents import (
    Documents,
    damaged,
    encode,
    ids_sha256,
    read_arrays,
    vocabulary_sha256,
    write_arrays,
)
from sparda.calibrate.measure.quality.documents import (
    read as read_documents,
)
from sparda.calibrate.measure.quality.wordings import WORDINGS, Wording, wording
from sparda.engine.errors import SpardaError
from sparda.engine.tokenizer import tokenizer_of

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
    ``facts`` of each fact that the answer takes. ``depth``: where the first fact was put, from 0 (the beginning) to 1.
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
    """Makes cases out of the documents of one role, with the tokenizer that made them.

    Raises SpardaError where there are no such documents and for another tokenizer.
    """

    def __init__(self, documents: Documents, tokenizer: Tokenizer, role: str = "eval") -> None:
        self.documents, self.tokenizer = documents.of_role(role), tokenizer
        self.tokenizer_sha256 = documents.tokenizer_sha256
        if not self.documents:
            raise SpardaError(f"no document of role {role!r} to hide facts in; give a token file that has some.")
        if vocabulary_sha256(tokenizer) != self.tokenizer_sha256:
            raise SpardaError("the documents are of another tokenizer; give the one that the token file was made with.")
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


PLAN: dict[str, tuple[tuple[int, ...], tuple[float, ...]]] = {
    "needle": ((2048, 4096, 8192), (0.0, 0.25, 0.5, 0.75, 1.0)),
    "multihop": ((2048, 4096, 8192), (0.1, 0.5, 0.9)),
}
"""Contexts and depths by task. Of two hops the depths leave room on one side or the other for the second fact."""

TRIALS = 8


def planned(maker: Maker, wordings: Iterable[Wording] = WORDINGS, *, trials: int = TRIALS) -> list[Case]:
    """Every case of ``PLAN``, ``trials`` of each with seeds from 0 on."""
    return [
        maker.case(w, context, depth, seed)
        for w in wordings
        for context in PLAN[w.task][0]
        for depth in PLAN[w.task][1]
        for seed in range(trials)
    ]


def write(path: Path, cases: Sequence[Case], tokenizer_sha256: str) -> None:
    """Write cases of one tokenizer: a compressed ``.npz`` of all ids, one case after another, and a JSON header."""
    ids = np.concatenate([c.ids for c in cases]) if cases else np.empty(0, np.uint32)
    rows = [{f.name: getattr(c, f.name) for f in fields(c) if f.name != "ids"} for c in cases]
    header = {"schema": SCHEMA, "tokenizer_sha256": tokenizer_sha256, "sha256": ids_sha256(ids), "cases": rows}
    write_arrays(path, header, {"ids": ids})


def read(path: Path) -> tuple[list[Case], str]:
    """The cases of a file and the hash of their tokenizer's vocabulary.

    Raises SpardaError for a file that is missing, damaged or of another kind.
    """
    header, arrays = read_arrays(path, ("ids",), SCHEMA)
    ids, at, cases = arrays["ids"], 0, []
    try:
        if ids.dtype != np.uint32 or ids_sha256(ids) != header["sha256"]:
            raise ValueError("its ids do not have the hash that they were written with")
        for row in header["cases"]:
            for name in ("answers", "facts"):
                row[name] = tuple((int(a), int(b)) for a, b in row[name])
            cases.append(Case(**row, ids=ids[at : at + row["context"]]))
            at += row["context"]
        if at != len(ids):
            raise ValueError(f"{len(ids)} ids, where its cases have {at}")
        return cases, str(header["tokenizer_sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, error) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: ``TOKENS TOKENIZER FILE``; returns its exit code."""
    parser = Parser("retrieval", __doc__)
    parser.add_argument("tokens", type=Path, help="the token file whose eval documents the facts are hidden in")
    parser.add_argument("tokenizer", type=Path, help="the model's folder, its tokenizer.json, or a GGUF file")
    parser.add_argument("file", type=Path, help="the file of cases to write")
    parser.add_argument("--wording", action="append", metavar="NAME", help="only this one (repeatable)")
    parser.add_argument("--trials", type=int, default=TRIALS, help=f"cases of each context and depth ({TRIALS})")
    try:
        given = parser.parse_args(arguments)
        if given.trials < 1:
            raise SpardaError(f"--trials {given.trials}; give at least 1.")
        maker = Maker(read_documents(given.tokens), tokenizer_of(given.tokenizer))
        chosen = [wording(name) for name in given.wording] if given.wording else WORDINGS
        cases = planned(maker, chosen, trials=given.trials)
        write(given.file, cases, maker.tokenizer_sha256)
    except SpardaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    counts = Counter((c.task, c.wording, c.context) for c in cases)
    if given.json:
        rows = [{"task": t, "wording": w, "context": n, "cases": count} for (t, w, n), count in counts.items()]
        print(json.dumps({"file": str(given.file), "cases": rows}, indent=2))
        return 0
    for (task, name, context), count in counts.items():
        print(f"{task:8}  {name:13}  {context:>6,} tokens  {count} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
