"""A quality profile: what choosing blocks costs a model, measured on texts, by selector, lookahead and top-k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from sparda.engine.dynamics.curve import MissCurve
from sparda.engine.dynamics.overlap import Spread as Spread
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, read_json, to_plain, write_json
from sparda.engine.shapes import SparseSpec

SCHEMA = 1
FILE = "quality.json"
SHIPPED = Path(__file__).parent / "qualities"

SELECTORS: dict[str, str] = {
    "oracle": "the blocks with most attention mass of the KV group, known only after the attention: an upper bound",
    "sparse": "InfLLM-V2: every query head's softmax over compressed keys, summed over the group",
    "forecast": "a trained Forecast, one or more heads per KV head",
    "untrained": "the Forecast before training: the mean of the later layer's query projections over each group",
    "proxy": "the later layer's own queries, all heads, guessed from the earlier layer's input, scored as `sparse` is",
    "infinigen": "the same guess, summed over the group and scored along partial keys of every token",
    "previous": "what `sparse` chose in the step before",
    "shared": "what `sparse` chose in the layer `lookahead` before",
    "early": "what `sparse` chose in one early layer, for all later ones",
    "shallow": "a trained scorer in one early layer, for all later ones",
    "recency": "control: the newest blocks",
    "distance": "control: how often each distance from the newest block is chosen, on other texts",
    "random": "control: blocks drawn at random",
    "forced": "control: the forced blocks alone, whatever the top-k",
}
"""Ways of choosing blocks, in the order in which they are shown."""

CONTROLS = ("recency", "distance", "random", "forced")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which blocks: by a selector of ``SELECTORS``, ``lookahead`` layers ahead, ``heads`` Forecast heads per KV head.

    ``lookahead`` and ``heads`` are 0 for a selector that has none.
    """

    selector: str
    top_k: int
    lookahead: int = 0
    heads: int = 0

    def __post_init__(self) -> None:
        if self.selector not in SELECTORS:
            raise SpardaError(f"selector {self.selector!r} is not known; allowed are {', '.join(SELECTORS)}.")

    @property
    def label(self) -> str:
        ahead = f" d={self.lookahead}" if self.lookahead else ""
        return f"{self.selector}{ahead}" + (f" x{self.heads}" if self.heads > 1 else "")


@dataclass(frozen=True, slots=True)
class Recall:
    """What share of blocks and of attention a choice catches, means over documents, layers, KV heads and queries.

    Blocks of ``sparse`` are counted in the layers that the selector itself chooses in; attention, and blocks of the
    oracle, in all layers, ``sparse`` choosing in the others.
    ``recall``: of the free blocks of ``sparse``. ``recall_oracle``: of those of ``oracle``. ``mass``: of the attention
    of all query heads. ``mass_free``: of what lies outside the forced blocks. ``far``: as ``recall``, of blocks more
    than ``FAR`` blocks back. ``absent``: as ``recall``, of blocks that were not chosen in the step before.
    ``layers`` and ``documents``: the spread of ``recall`` over their means; ``mass_layers``: that of ``mass``.
    ``by_document``: ``recall``, ``mass`` and ``absent`` of each document, in the order of the profile's; two choices
    are compared on each document by itself, for documents differ more than choices do.
    """

    choice: Choice
    recall: float
    recall_oracle: float
    mass: float
    mass_free: float
    far: float
    absent: float
    layers: Spread
    documents: Spread
    mass_layers: Spread
    by_document: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


FAR = 15
"""Blocks: one farther back than this is far."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Nats per token that a choice in all layers adds to the model's own loss, on the same tokens.

    ``documents``: by name; ``standard_error``: of the mean of paired differences, over tokens and documents.
    """

    choice: Choice
    nats: float
    standard_error: float
    documents: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Facts hidden in a text and asked for at its end. ``task``: ``needle`` (one fact) or ``multihop`` (a chain).

    ``found``: share of trials in which each token of the answer was the likeliest. ``nats``: mean loss of an answer's
    token. ``dense_found`` and ``dense_nats``: of the model with full attention, on the same trials.
    """

    choice: Choice
    task: str
    context_tokens: int
    depth: float
    """Where the fact lies, as a share of the context; -1 for the mean over all depths."""
    trials: int
    found: float
    nats: float
    dense_found: float
    dense_nats: float


@dataclass(frozen=True, slots=True)
class Dynamics:
    """How the choice of ``sparse`` moves from step to step, with ``forced`` blocks always chosen.

    ``reuse``: free blocks that were chosen in the step before. ``by_lag``: overlap with the choice so many steps ago.
    ``at_top_k``: misses as a share of free picks with slots for 1, 1.5, 2, 3, 4 times top-k (forced blocks included).
    ``per_step``: quantiles 0.5, 0.95, 0.99 and 1.0 of the misses of a step, all layers and heads together, by slots
    as a multiple of top-k. ``union``: blocks chosen by any KV head, over the free picks of one. ``same``: share of
    free picks that all heads have. ``next_layer``: share that the next layer has too.
    """

    top_k: int
    forced: int
    reuse: Spread
    by_lag: Mapping[str, float]
    curve: MissCurve
    at_top_k: Mapping[str, Spread]
    documents: Mapping[str, Spread]
    """As ``at_top_k``, over documents."""
    per_step: Mapping[str, tuple[float, ...]]
    union: float
    same: float
    next_layer: float


@dataclass(frozen=True, slots=True)
class Document:
    """A text that was measured on; ``sha256`` of its tokens, ``kind`` as its owner calls it."""

    name: str
    kind: str
    tokens: int
    sha256: str
    dense_nats: float
    """The model's own loss on the measured tokens, full attention."""


@dataclass(frozen=True, slots=True)
class QualityProfile:
    """What was measured of one model. ``conditions`` and ``training``: plain values that a reader may want to know."""

    name: str
    model: str
    context_tokens: int
    spec: SparseSpec
    documents: tuple[Document, ...]
    recalls: tuple[Recall, ...] = ()
    perplexities: tuple[Perplexity, ...] = ()
    retrievals: tuple[Retrieval, ...] = ()
    dynamics: tuple[Dynamics, ...] = ()
    conditions: Mapping[str, str | int | float] = field(default_factory=dict)
    training: Mapping[str, str | int | float] = field(default_factory=dict)
    provenance: Mapping[str, str | int | float] = field(default_factory=dict)
    traces: tuple[str, ...] = ()
    """Names of recorded selection traces beside the file."""

    @property
    def blocks(self) -> int:
        """Blocks of the measured context."""
        return self.spec.blocks(self.context_tokens)

    def recall_of(self, choice: Choice) -> Recall | None:
        return next((r for r in self.recalls if r.choice == choice), None)

    def perplexity_of(self, choice: Choice) -> Perplexity | None:
        return next((p for p in self.perplexities if p.choice == choice), None)

    def dynamics_of(self, top_k: int) -> Dynamics | None:
        return next((d for d in self.dynamics if d.top_k == top_k), None)


def quality_names() -> list[str]:
    """Quality profiles that come with the package."""
    return sorted(p.parent.name for p in SHIPPED.glob(f"*/{FILE}"))


def load_quality(name: str) -> QualityProfile:
    """A shipped quality profile by name, or one in a folder (or its file) by path.

    Raises SpardaError for an unknown name and for a damaged or newer file.
    """
    path = SHIPPED / name / FILE
    if not path.exists():
        path = Path(name) / FILE if Path(name).is_dir() else Path(name)
    if not path.is_file():
        known = ", ".join(quality_names()) or "none"
        raise SpardaError(
            f"no quality profile {name!r}: it is neither shipped (known: {known}) nor a folder with a {FILE}. Measure "
            "your model with `sparda quality measure --checkpoint DIR --text FILES`."
        )
    data = read_json(path)
    schema = data.pop("schema", None)
    if schema != SCHEMA:
        newer = isinstance(schema, int) and schema > SCHEMA
        do = "it was written by a newer version of sparda: update" if newer else "measure again"
        raise SpardaError(f"{path}: schema {schema!r}, this version reads {SCHEMA}; {do}.")
    return read(QualityProfile, cast(Mapping[str, object], data), where=str(path))


def write_quality(path: Path, profile: QualityProfile) -> None:
    """Write a quality profile as JSON, whole or not at all."""
    write_json(path, {"schema": SCHEMA, **to_plain(profile)})
