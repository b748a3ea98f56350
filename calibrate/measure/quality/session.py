"""What one quality measurement has to do, as jobs that leave a file each; those whose file is there are done."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sparda.calibrate.measure.quality.dynamics import Counts, distance_counts, distance_shares, sparse_sets
from sparda.calibrate.measure.quality.materials import Materials
from sparda.calibrate.measure.quality.perplexity import run_means
from sparda.calibrate.measure.quality.recall import tallies
from sparda.calibrate.measure.quality.retrieved import Case, trial
from sparda.calibrate.measure.quality.scope import Scope
from sparda.calibrate.measure.quality.store import Store
from sparda.calibrate.measure.quality.window import Prefix, read_prefix
from sparda.calibrate.quality import Choice
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import SparseSpec
from sparda.engine.weights import Weights


class Text(Protocol):
    """A document: its token ids and how it is called."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def ids(self) -> Any: ...


@dataclass(frozen=True)
class Prepared:
    """The measured tokens of a document, int64 [context_tokens]; ``key`` names its files."""

    name: str
    kind: str
    key: str
    sha256: str
    ids: Tensor


def prepared(document: Text, tokens: int) -> Prepared:
    """The first ``tokens`` of a document. Raises SpardaError where it has fewer."""
    ids = np.asarray(document.ids)[:tokens].astype(np.int64)
    if len(ids) < tokens:
        raise SpardaError(
            f"document {document.name!r} has {len(ids)} tokens and {tokens} are measured on; give longer texts, or a "
            "shorter context."
        )
    return Prepared(document.name, document.kind, _key(document.name, ids), _sha256(ids), torch.from_numpy(ids))


def _sha256(ids: Any) -> str:
    return hashlib.sha256(np.asarray(ids).astype("<u4").tobytes()).hexdigest()


def _key(name: str, ids: Any) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_.]+', '-', name)[:40]}-{_sha256(ids)[:8]}"


@dataclass(frozen=True, slots=True)
class Job:
    """A piece of work of one ``kind``; ``of`` says on what."""

    kind: str
    of: str
    run: Callable[[], None]


@dataclass
class Session:
    """All jobs of a measurement. Dense keys and values of the document that was asked for last stay on the device."""

    weights: Weights
    spec: SparseSpec
    scope: Scope
    store: Store
    materials: Materials
    documents: Sequence[Prepared]
    cases: Sequence[Case]
    parts: Collection[str]
    _prefix: tuple[str, Prefix] | None = None
    _distances: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    _counts: dict[str, dict[int, tuple[Counts, Counts]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # What can be chosen, before any text was read: a text brings directions, the others their distances.
        scope, others = self.scope, len(self.documents) > 1
        top_ks = {*scope.top_ks, *scope.loss_top_ks} if others else set()
        nothing = torch.empty(0)
        planned = self.materials.of_text(nothing, dict.fromkeys(top_ks, nothing))
        self.recall_choices = scope.recall_choices(planned)
        self.loss_choices = scope.loss_choices(planned)
        self.retrieval_choices = scope.retrieval_choices(planned)

    def jobs(self) -> Iterator[Job]:
        """What is not there yet, in the order in which it must be done."""
        if self.needs_sets:
            for d in self.documents:
                if not self.store.has_sets(d.key):
                    yield Job("dynamics", d.name, partial(self._sets, d))
        for d in self.documents:
            if self.store.runs(d.key, None) is None:
                yield Job("loss", d.name, partial(self._loss, d, None))
            yield from self._of_document(d)
        if "retrieval" in self.parts:
            for key, case in self.keyed_cases():
                there = self.store.trial(key)
                if there is None or {a.choice for a in there.answers} < set(self.retrieval_choices):
                    yield Job("retrieval", key, partial(self._trial, key, case))

    @property
    def needs_sets(self) -> bool:
        distance = any(c.selector == "distance" for c in (*self.recall_choices, *self.loss_choices))
        return "dynamics" in self.parts or (distance and bool({"recall", "perplexity"} & set(self.parts)))

    def keyed_cases(self) -> list[tuple[str, Case]]:
        return [(f"{_key(case.task, case.ids)}", case) for case in self.cases]

    def _of_document(self, d: Prepared) -> Iterator[Job]:
        if "recall" in self.parts:
            there = self.store.tallies(d.key)
            missing = [c for c in self.recall_choices if c not in there]
            if missing:
                yield Job("recall", d.name, partial(self._recall, d, missing))
        if "perplexity" in self.parts:
            for choice in self.loss_choices:
                if self.store.runs(d.key, choice) is None:
                    yield Job("perplexity", f"{d.name}, {choice.label}", partial(self._loss, d, choice))

    def _sets(self, d: Prepared) -> None:
        prefix, ids = self._window(d, self.scope.recall_tokens)
        scope = self.scope
        top_k = max(*scope.top_ks, *scope.loss_top_ks, *scope.dynamics_top_ks, scope.trace_top_k)
        self.store.write_sets(d.key, sparse_sets(self.weights, self.spec, prefix, ids, top_k))

    def _recall(self, d: Prepared, choices: Sequence[Choice]) -> None:
        # One more query: the step before the first.
        prefix, ids = self._window(d, self.scope.recall_tokens + 1)
        found = tallies(self.weights, self.spec, prefix, ids, choices, self._materials(d, prefix))
        self.store.write_tallies(d.key, [*self.store.tallies(d.key).values(), *found])

    def _loss(self, d: Prepared, choice: Choice | None) -> None:
        # One more token: the first of a window is not predicted.
        prefix, ids = self._window(d, self.scope.loss_tokens + 1)
        materials = self._materials(d, prefix) if choice else self.materials
        self.store.write_runs(d.key, choice, run_means(self.weights, self.spec, prefix, ids, choice, materials))

    def _trial(self, key: str, case: Case) -> None:
        s = self.scope
        done = trial(self.weights, self.spec, case, self.retrieval_choices, self.materials, s.question_tokens)
        self.store.write_trial(key, done)

    def _window(self, d: Prepared, tokens: int) -> tuple[Prefix, Tensor]:
        if self._prefix is None or self._prefix[0] != d.key:
            self._prefix = None  # freed before the next is made
            self._prefix = (d.key, read_prefix(self.weights, d.ids))
        start = len(d.ids) - tokens
        return self._prefix[1].upto(start), d.ids[start:]

    def _materials(self, d: Prepared, prefix: Prefix) -> Materials:
        if d.key not in self._distances:
            others = [other for other in self.documents if other.key != d.key] if self.needs_sets else []
            counts = [self._distance_counts(other) for other in others]
            distances = {k: distance_shares([c[k] for c in counts]) for k in counts[0]} if counts else {}
            self._distances[d.key] = distances
        return self.materials.of_text(prefix.basis, self._distances[d.key])

    def _distance_counts(self, d: Prepared) -> dict[int, tuple[Counts, Counts]]:
        if d.key not in self._counts:
            sets, start = self.store.sets(d.key), len(d.ids) - self.scope.recall_tokens
            top_ks = sorted({*self.scope.top_ks, *self.scope.loss_top_ks})
            self._counts[d.key] = {k: distance_counts(sets, start, self.spec, k) for k in top_ks}
        return self._counts[d.key]
