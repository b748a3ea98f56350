"""The objectives of a study, the front of those with two, and how far what was found is from an enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sparda.engine.config import Config
from sparda.engine.errors import SpardaError
from sparda.explore.predict import Prediction, Predictor
from sparda.explore.scenario import Limits
from sparda.explore.space import Choice, pick

SPEED = "tokens_per_s"
SPEED_AND_BLOCKS = "tokens_per_s,top_k"
SPEED_AND_RECALL = "tokens_per_s,recall"
SPEED_AND_PPL = "tokens_per_s,ppl_increase"
DIRECTIONS: dict[str, tuple[Literal["maximize", "minimize"], ...]] = {
    SPEED: ("maximize",),
    SPEED_AND_BLOCKS: ("maximize", "maximize"),
    SPEED_AND_RECALL: ("maximize", "maximize"),
    SPEED_AND_PPL: ("maximize", "minimize"),
}
"""Fastest, under the floors of quality if there are any; or fastest for each number of blocks read, for each recall,
for each increase of perplexity. The last two need a quality profile; without one the blocks read stand for quality."""
OBJECTIVES = tuple(DIRECTIONS)
OF_QUALITY = (SPEED_AND_RECALL, SPEED_AND_PPL)


def check_objective(objective: str, predictor: Predictor) -> None:
    """Refuse an objective that is not known, or that nothing is known of."""
    if objective not in OBJECTIVES:
        raise SpardaError(f"objective {objective!r} is not known; allowed are {' and '.join(OBJECTIVES)}.")
    if objective in OF_QUALITY and predictor.quality is None:
        raise SpardaError(
            f"objective {objective!r} needs a quality profile; give one with quality=NAME (see `sparda quality list`), "
            f"or take {SPEED_AND_BLOCKS!r}."
        )


def values_of(p: Prediction, objective: str) -> tuple[float, ...] | None:
    """What a study is told of a prediction, one value for each objective; None where one of them is not known."""
    if objective == SPEED:
        return (p.tokens_per_s,)
    level = level_of(p, objective)
    if level is None:
        return None
    return p.tokens_per_s, -level if objective == SPEED_AND_PPL else level


def level_of(p: Prediction, objective: str) -> float | None:
    """The second objective of a prediction, larger is better; None where it is not known."""
    if objective == SPEED_AND_BLOCKS:
        return float(p.config.top_k)
    if p.quality is None:
        return None
    if objective == SPEED_AND_RECALL:
        return p.quality.recall
    return None if p.quality.ppl_increase is None else -p.quality.ppl_increase


def considered(found: Sequence[Prediction], base: Config, limits: Limits) -> list[Prediction]:
    """Among which one choice is made: all where a floor of quality is set, else those that read as many blocks as
    ``base``. Fewer blocks are always faster, so that without a floor a choice only means something at one top-k.
    """
    own = [] if limits.floors else [p for p in found if p.config.top_k == base.top_k]
    return own or list(found)


def front_of(found: Sequence[Prediction], noise: float, objective: str) -> tuple[Prediction, ...]:
    """The choice at each level that no better level outruns, from the worst level to the best.

    Of feasible predictions, if there are any; those of an unknown level are left out.
    """
    best: list[Prediction] = []
    levels = _levels([p for p in found if p.feasible] or found, objective)
    for level in sorted(levels, reverse=True):
        p = pick(levels[level], noise).best
        if not best or p.tokens_per_s > best[-1].tokens_per_s:
            best.append(p)
    return tuple(reversed(best))


def _levels(found: Sequence[Prediction], objective: str) -> dict[float, list[Prediction]]:
    levels: dict[float, list[Prediction]] = {}
    for p in found:
        level = level_of(p, objective)
        if level is not None:
            levels.setdefault(level, []).append(p)
    return levels


def regret_of(choice: Choice, oracle: Sequence[Prediction]) -> float | None:
    """How much longer the step of the fastest found is than the oracle's, as a share; None without an oracle."""
    return _slower(choice.fastest, oracle) if oracle else None


def front_regret(found: Sequence[Prediction], oracle: Sequence[Prediction], objective: str) -> float | None:
    """The worst regret over readers who want at least such a level; None without an oracle."""
    ours, theirs = _levels(found, objective), _levels(oracle, objective)
    if not ours:
        return None
    regrets = []
    for level in theirs:
        if level <= max(ours):
            best = pick([p for at, here in ours.items() if at >= level for p in here], 0.0).fastest
            regrets.append(_slower(best, [p for at, here in theirs.items() if at >= level for p in here]))
    return max(regrets, default=None)


def _slower(found: Prediction, oracle: Sequence[Prediction]) -> float:
    return found.step_us / pick(oracle, 0.0).fastest.step_us - 1
