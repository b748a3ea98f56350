"""Two measured choices beside each other: their difference, and whether it is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import stdev

from sparda.calibrate.quality import SELECTORS, Choice, Perplexity, QualityProfile
from sparda.explore.quality import choices_of

SURE = 2.0
"""A difference of fewer standard errors is called none."""


@dataclass(frozen=True, slots=True)
class Difference:
    """``first`` and ``second`` as measured, and the standard error of first less second; None where it is not known."""

    first: float
    second: float
    error: float | None

    @property
    def value(self) -> float:
        return self.first - self.second

    @property
    def told(self) -> bool:
        """Whether it is more than ``SURE`` standard errors; so it is taken to be where no error is known."""
        return self.error is None or abs(self.value) > SURE * self.error


def main_top_k(profile: QualityProfile) -> int:
    """The top-k that answers are about: 16 where it was measured, else the middle one; 0 where none was."""
    known = sorted({c.top_k for c in choices_of(profile)})
    return 16 if 16 in known or not known else known[len(known) // 2]


def choice_of(profile: QualityProfile, selector: str, top_k: int, lookahead: int = 0, heads: int = 0) -> Choice:
    """The measured choice of a selector; lookahead and heads of 0 stand for the least that was measured."""
    known = sorted(
        (c.lookahead, c.heads)
        for c in choices_of(profile)
        if (c.selector, c.top_k) == (selector, top_k) and lookahead in (0, c.lookahead) and heads in (0, c.heads)
    )
    ahead, count = known[0] if known else (lookahead, heads)
    return Choice(selector, top_k, ahead, count)


def by_choice(choices: Sequence[Choice]) -> list[Choice]:
    """One choice of each selector, lookahead and number of heads, in the order of ``SELECTORS``; its top-k is left."""
    order = list(SELECTORS)
    kinds = {(order.index(c.selector), c.lookahead, c.heads): c for c in choices}
    return [kinds[key] for key in sorted(kinds)]


def at_top_k(choice: Choice, top_k: int) -> Choice:
    """The same choice of so many blocks."""
    return Choice(choice.selector, top_k, choice.lookahead, choice.heads)


def share_difference(profile: QualityProfile, a: Choice, b: Choice, name: str = "recall") -> Difference | None:
    """Of two choices in ``recall``, ``mass`` or ``absent``, paired by document; None where one was not measured."""
    first, second = profile.recall_of(a), profile.recall_of(b)
    if first is None or second is None:
        return None
    pairs = zip(first.by_document.get(name, ()), second.by_document.get(name, ()), strict=False)
    return Difference(getattr(first, name), getattr(second, name), _error_of([x - y for x, y in pairs]))


def nats_difference(profile: QualityProfile, a: Choice, b: Choice) -> Difference | None:
    """Of two choices in nats per token, paired by document; None where one was not measured.

    Without documents in common the errors of both are added up as those of independent measurements.
    """
    first, second = profile.perplexity_of(a), profile.perplexity_of(b)
    if first is None or second is None:
        return None
    return Difference(first.nats, second.nats, _paired_error(first, second))


def _paired_error(a: Perplexity, b: Perplexity) -> float:
    both = [a.documents[name] - b.documents[name] for name in a.documents if name in b.documents]
    paired = _error_of(both)
    return hypot(a.standard_error, b.standard_error) if paired is None else paired


def _error_of(differences: Sequence[float]) -> float | None:
    """Standard error of the mean of differences; None of fewer than two."""
    return stdev(differences) / sqrt(len(differences)) if len(differences) > 1 else None
