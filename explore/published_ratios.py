"""Ratios and trends of published figures: which the model gives too, which it gives the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sparda.engine.loader import to_plain
from sparda.explore.published import Model

RATIOS = (
    ("sparda", "sparse", "SparDA over Sparse, both offloaded"),
    ("sparda", "sparda-on-demand", "prefetch over no prefetch"),
    ("sparda-on-demand", "sparse", "Forecast selection over Sparse's, no prefetch"),
    ("sparda", "sparse-resident", "offloaded SparDA over Sparse without offload"),
)
"""Policies whose tokens/s are divided, and what that says."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One published ratio of two policies in one cell, and the model's over all that is not known.

    ``agree`` of ``plays`` are on the published side of 1: the published order of the two policies.
    """

    machine: str
    policy: str
    over: str
    about: str
    context_tokens: int
    batch: int
    published: float
    low: float
    high: float
    agree: int
    plays: int

    @property
    def verdict(self) -> str:
        """Said from the numbers: the value lies inside, or only its side of 1 is given, or not even that."""
        if self.low <= self.published <= self.high:
            return "inside"
        if self.agree == self.plays:
            return "order only"
        return "order in some" if self.agree else "opposite"

    def to_dict(self) -> dict[str, object]:
        return {**to_plain(self), "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class Trend:
    """How one ratio moves along batch or context: the published values, and in how many plays each step goes alike."""

    machine: str
    about: str
    axis: str
    at: tuple[int, ...]
    fixed: int
    published: tuple[float, ...]
    agree: int
    plays: int

    @property
    def verdict(self) -> str:
        if self.agree == self.plays:
            return "holds"
        return "holds in some" if self.agree else "does not hold"

    @property
    def direction(self) -> str:
        """Of the published values."""
        steps = [b > a for a, b in pairwise(self.published)]
        return "rises" if all(steps) else "falls" if not any(steps) else "rises and falls"

    def to_dict(self) -> dict[str, object]:
        return {**to_plain(self), "verdict": self.verdict, "direction": self.direction}


def ratios(model: Model) -> list[Ratio]:
    """Every ratio of RATIOS at every cell where both its figures were published, ratio by ratio."""
    found: list[Ratio] = []
    for policy, over, about in RATIOS:
        for context, batch in _places(model):
            top = model.published.cell(model.name, context, batch, policy)
            bottom = model.published.cell(model.name, context, batch, over)
            if top and bottom:
                value = top.tokens_per_s / bottom.tokens_per_s
                plays = modelled(model, context, batch, policy, over)
                agree = sum((m > 1) == (value > 1) for m in plays)
                low, high = min(plays), max(plays)
                found.append(
                    Ratio(model.name, policy, over, about, context, batch, value, low, high, agree, len(plays))
                )
    return found


def _places(model: Model) -> list[tuple[int, int]]:
    """(context, batch) of the published cells of the model's machine."""
    return sorted({(c.context_tokens, c.batch) for c in model.published.cells if c.machine == model.name})


def modelled(model: Model, context: int, batch: int, policy: str, over: str) -> list[float]:
    """The model's ratios, one for each pair of combinations that the two sides may have."""
    return [
        model.tokens_per_s(context, batch, policy, a) / model.tokens_per_s(context, batch, over, b)
        for a, b in model.assumptions.pairs
    ]


def trends(model: Model, found: Sequence[Ratio]) -> list[Trend]:
    """How each ratio moves with the batch at one context and with the context at one batch, where two are known."""
    made: list[Trend] = []
    for policy, over, _ in RATIOS:
        own = [r for r in found if (r.policy, r.over) == (policy, over)]
        for context in sorted({r.context_tokens for r in own}):
            made += _trend(model, "batch", context, sorted((r for r in own if r.context_tokens == context), key=_batch))
        for batch in sorted({r.batch for r in own}):
            made += _trend(model, "context", batch, sorted((r for r in own if r.batch == batch), key=_context))
    return made


def _batch(ratio: Ratio) -> int:
    return ratio.batch


def _context(ratio: Ratio) -> int:
    return ratio.context_tokens


def _trend(model: Model, axis: str, fixed: int, points: Sequence[Ratio]) -> list[Trend]:
    if len(points) < 2:
        return []
    first = points[0]
    published = tuple(p.published for p in points)
    # One play is one pair of combinations held along the whole axis.
    plays = list(zip(*(modelled(model, p.context_tokens, p.batch, p.policy, p.over) for p in points), strict=True))
    wanted = [b > a for a, b in pairwise(published)]
    agree = sum([b > a for a, b in pairwise(play)] == wanted for play in plays)
    at = tuple(_batch(p) if axis == "batch" else _context(p) for p in points)
    return [Trend(model.name, first.about, axis, at, fixed, published, agree, len(plays))]
