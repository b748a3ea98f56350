"""A quality profile of the parts that are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from sparda.calibrate.measure.quality.dynamics import choices_of, dynamics_row
from sparda.calibrate.measure.quality.perplexity import DRAWS, RUN, perplexity_row
from sparda.calibrate.measure.quality.recall import recall_row
from sparda.calibrate.measure.quality.retrieved import retrieval_rows
from sparda.calibrate.measure.quality.session import Session
from sparda.calibrate.quality import Choice, Document, Dynamics, Perplexity, QualityProfile, Recall
from sparda.engine.dynamics.choices import Choices
from sparda.engine.dynamics.choices_file import write_choices


def assemble(session: Session, out: Path, name: str, provenance: Mapping[str, str | int | float]) -> QualityProfile:
    """The profile of all rows that every document has; of retrieval, of the cases that were tried.

    Its selection traces are written to ``out``.
    """
    tried = [session.store.trial(key) for key, _ in session.keyed_cases()] if "retrieval" in session.parts else []
    return QualityProfile(
        name=name,
        model=session.weights.shape.name,
        context_tokens=session.scope.context_tokens,
        spec=session.spec,
        documents=_documents(session),
        recalls=_recalls(session) if "recall" in session.parts else (),
        perplexities=_perplexities(session) if "perplexity" in session.parts else (),
        retrievals=retrieval_rows([t for t in tried if t is not None]),
        dynamics=_dynamics(session) if "dynamics" in session.parts else (),
        conditions=_conditions(session),
        traces=write_traces(session, out) if "dynamics" in session.parts else (),
        provenance=provenance,
    )


def traces(session: Session, top_k: int) -> dict[str, Choices]:
    """What ``sparse`` chose on each document whose choices were recorded, by the document's key."""
    scope = session.scope
    return {
        d.key: choices_of(
            session.store.sets(d.key),
            scope.context_tokens - scope.recall_tokens,
            session.spec,
            top_k,
            session.weights.shape.name,
            f"{d.name} ({d.kind}), read densely",
        )
        for d in session.documents
        if session.store.has_sets(d.key)
    }


def write_traces(session: Session, out: Path) -> tuple[str, ...]:
    """Write what ``sparse`` chose on each document to ``out``, if it is not there; the files' names."""
    names = []
    for key, choices in traces(session, session.scope.trace_top_k).items():
        names.append(f"sparse-k{session.scope.trace_top_k}-{key}.choices")
        if not (out / names[-1]).exists():
            write_choices(out / names[-1], choices)
    return tuple(names)


def _documents(session: Session) -> tuple[Document, ...]:
    found = []
    for d in session.documents:
        runs = session.store.runs(d.key, None)
        if runs is not None:
            found.append(Document(d.name, d.kind, len(d.ids), d.sha256, fmean(runs)))
    return tuple(found)


def _recalls(session: Session) -> tuple[Recall, ...]:
    there = [session.store.tallies(d.key) for d in session.documents]
    found = []
    for choice in session.recall_choices:
        own, sparse = ([t[c] for t in there if c in t] for c in (choice, Choice("sparse", choice.top_k)))
        if len(own) == len(there):
            found.append(recall_row(own, sparse if len(sparse) == len(there) else ()))
    return tuple(found)


def _perplexities(session: Session) -> tuple[Perplexity, ...]:
    store, names = session.store, {d.name: d.key for d in session.documents}
    dense = {name: store.runs(key, None) for name, key in names.items()}
    found = []
    for choice in session.loss_choices:
        sparse = {name: store.runs(key, choice) for name, key in names.items()}
        both = {n: (dense[n], sparse[n]) for n in names}
        if all(a is not None and b is not None for a, b in both.values()):
            row = perplexity_row(
                choice, {n: a or () for n, (a, _) in both.items()}, {n: b or () for n, (_, b) in both.items()}
            )
            # The forced blocks are the same at every top-k: they were run at one.
            top_ks = session.scope.loss_top_ks if choice.selector == "forced" else (choice.top_k,)
            found += [replace(row, choice=replace(choice, top_k=top_k)) for top_k in top_ks]
    return tuple(found)


def _dynamics(session: Session) -> tuple[Dynamics, ...]:
    scope, found = session.scope, []
    skip = min(scope.skip_steps, scope.recall_tokens // 2)
    for top_k in scope.dynamics_top_ks:
        choices = traces(session, top_k)
        if len(choices) == len(session.documents):
            named = {d.name: choices[d.key] for d in session.documents}
            found.append(dynamics_row(named, skip))
    return tuple(found)


def _conditions(session: Session) -> dict[str, str | int | float]:
    s = session.scope
    return {
        "recall_tokens": s.recall_tokens,
        "loss_tokens": s.loss_tokens,
        "question_tokens": s.question_tokens,
        "skip_steps": min(s.skip_steps, s.recall_tokens // 2),
        "sharing_layer": s.sharing_layer,
        "refresh_steps": s.refresh_steps,
        "seed": s.seed,
        "weight_bytes_of_a_value": session.weights.shape.value_bytes,
        "recall": "of a dense run, over the layers that the selector itself chooses in",
        "mass": "over all layers, sparse choosing where the selector does not; so is recall of the oracle",
        "perplexity": "every layer sparse, of shallow those above sharing_layer; what comes before the window is dense",
        "standard_error": f"bootstrap of documents, then of runs of {RUN} tokens; {DRAWS} draws",
    }
