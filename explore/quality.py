"""What a configuration costs in quality, looked up in what was measured of a real model; nothing is extrapolated."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import exp, expm1, log

from sparda.calibrate.quality import Choice, Perplexity, QualityProfile, Recall, Spread
from sparda.engine.config import Config, Workload
from sparda.engine.shapes import SparseSpec
from sparda.explore.scenario import Limits
from sparda.explore.text import percent

FORECAST = ("sparda", "sparda-on-demand", "sparda-resident")
SPARSE = ("sparse", "sparse-resident")
NO_LOSS = "exact: no block is left out"
"""The tier of a configuration whose attention reads every block."""
UNKNOWN = 1.0
"""By how much a quality that is not known is taken to break a floor: what a search is told to keep away from."""


@dataclass(frozen=True, slots=True)
class Quality:
    """What a choice of blocks keeps of a model's quality; a value that was not measured is None, ``reason`` says why.

    ``recall``: of the free blocks of ``sparse``. ``mass``: of the attention. ``ppl_increase``: perplexity over that
    with full attention, less 1. ``tier``: what this was measured on; it stands beside the numbers in every output.
    ``spread``: of ``recall`` over documents. ``standard_error``: of ``ppl_increase``.
    """

    choice: str
    recall: float | None
    mass: float | None
    ppl_increase: float | None
    tier: str
    spread: Spread | None = None
    standard_error: float | None = None
    reason: str = ""
    as_many: AsMany | None = None
    """Where the quality is carried over: the other way to carry it."""


@dataclass(frozen=True, slots=True)
class AsMany:
    """What as many blocks cost where they were measured, whatever their share: the most of ``blocks`` not above top-k.

    Nobody has measured whether a budget carries over by its share or by its number. A share is the harder reading.
    """

    blocks: int
    ppl_increase: float


@dataclass(frozen=True, slots=True)
class Broken:
    """How a quality stands to the floors of ``Limits``: ``reason`` is empty where it keeps them.

    ``recall_short``: recall that is missing; ``ppl_over``: perplexity increase above what is allowed. Both are below 0
    where there is room, 0 where no floor is set and ``UNKNOWN`` where the quality is not known.
    """

    reason: str = ""
    recall_short: float = 0.0
    ppl_over: float = 0.0


def broken_by(quality: Quality | None, limits: Limits) -> Broken:
    """Which floors a quality breaks, and by how much."""
    if quality is None or not limits.floors:
        return Broken()
    reasons, short, over = [], 0.0, 0.0
    if limits.min_recall:
        short = UNKNOWN if quality.recall is None else limits.min_recall - quality.recall
        if quality.recall is None:
            reasons.append(f"recall not known ({quality.reason})")
        elif short > 0:
            reasons.append(
                f"recall: {percent(quality.recall)}, at least {percent(limits.min_recall)} wanted, "
                f"{100 * short:.1f} points too little"
            )
    if limits.max_ppl_increase:
        over = UNKNOWN if quality.ppl_increase is None else quality.ppl_increase - limits.max_ppl_increase
        if quality.ppl_increase is None:
            reasons.append(f"perplexity not known ({quality.reason})")
        elif over > 0:
            reasons.append(
                f"perplexity: {percent(quality.ppl_increase, sign=True)}, at most "
                f"{percent(limits.max_ppl_increase, sign=True)} wanted, {100 * over:.1f} points too much"
            )
    return Broken("; ".join(reasons), short, over)


def choices_of(profile: QualityProfile) -> list[Choice]:
    """All choices of which recall or perplexity was measured."""
    return [*(r.choice for r in profile.recalls), *(p.choice for p in profile.perplexities)]


def ppl_increase(nats: float) -> float:
    """What so many nats a token more do to perplexity: its increase as a share."""
    return expm1(nats)


def tier_of(profile: QualityProfile, model: str, context_tokens: int) -> str:
    """What a quality of ``model`` at ``context_tokens`` rests on, in words."""
    return tier_between(profile.model, profile.context_tokens, model, context_tokens)


def tier_between(measured: str, measured_tokens: int, model: str, tokens: int) -> str:
    """How what was measured on one model stands to another, in words."""
    where = f"{measured} at {measured_tokens} tokens"
    if (measured, measured_tokens) == (model, tokens):
        return f"measured on {where}"
    missing = f"of {model}" if model != measured else f"at {tokens} tokens"
    return f"carried over from {where} by share of the context: not a measurement {missing}"


@dataclass(frozen=True, slots=True)
class _Between:
    """A value at ``weight`` of the way from one measured point to the next; 0 is the first one itself."""

    low: int
    high: int
    weight: float

    def mix(self, low: float, high: float) -> float:
        return low if not self.weight else low + (high - low) * self.weight

    def spread(self, low: Spread, high: Spread) -> Spread:
        return Spread(*(self.mix(getattr(low, f.name), getattr(high, f.name)) for f in fields(Spread)))


def _between(measured: Iterable[int], wanted: float) -> _Between | None:
    """The measured points around ``wanted``, by its logarithm; None outside of them."""
    points = sorted(measured)
    place = bisect_left(points, wanted)
    if place == len(points) or (place == 0 and points[0] != wanted):
        return None
    if points[place] == wanted:
        return _Between(points[place], points[place], 0.0)
    low, high = points[place - 1], points[place]
    return _Between(low, high, log(wanted / low) / log(high / low))


@dataclass(frozen=True, slots=True)
class QualityLookup:
    """Qualities of one model's configurations, from one quality profile."""

    profile: QualityProfile
    model: str
    spec: SparseSpec

    def __call__(self, workload: Workload, config: Config) -> Quality:
        """The quality of ``config``: of the measured choice that stands for its policy, at its share of the context."""
        blocks = self.spec.blocks(workload.context_tokens)
        label, reason = _label(config)
        if config.policy == "dense" or config.top_k >= blocks:
            return Quality(label, 1.0, 1.0, 0.0, NO_LOSS)
        tier = tier_of(self.profile, self.model, workload.context_tokens)
        if reason:
            return Quality(label, None, None, None, tier, reason=reason)
        recalls, perplexities = self._rows(config)
        wanted = config.top_k * self.profile.blocks / blocks
        at, ppl_at = _between(recalls, wanted), _between(perplexities, wanted)
        reasons = [
            self._missing(name, label, rows, config.top_k, blocks)
            for name, rows, place in (("recall", recalls, at), ("perplexity", perplexities, ppl_at))
            if place is None
        ]
        low, high = (recalls[at.low], recalls[at.high]) if at else (None, None)
        nats, error = _nats(ppl_at, perplexities)
        return Quality(
            choice=label,
            recall=at.mix(low.recall, high.recall) if at and low and high else None,
            mass=at.mix(low.mass, high.mass) if at and low and high else None,
            ppl_increase=None if nats is None else ppl_increase(nats),
            tier=tier,
            spread=at.spread(low.documents, high.documents) if at and low and high else None,
            standard_error=None if nats is None or error is None else exp(nats) * error,
            reason="; ".join(reasons),
            as_many=_as_many(perplexities, config.top_k) if blocks != self.profile.blocks else None,
        )

    def top_ks(self, workload: Workload, config: Config) -> tuple[int, ...]:
        """Values of top-k, at this context, at which the policy's choice was measured; inside what was measured."""
        blocks = self.spec.blocks(workload.context_tokens)
        recalls, perplexities = self._rows(config)
        measured = sorted({*recalls, *perplexities})
        # A share that is no whole number of blocks is rounded towards the middle of the measured range.
        found = {-(-k * blocks // self.profile.blocks) for k in measured[:-1]}
        found |= {k * blocks // self.profile.blocks for k in measured[-1:]}
        return tuple(sorted(k for k in found if min(self.spec.forced, blocks) <= k <= min(blocks, 4096)))

    def lookaheads(self, config: Config) -> tuple[int, ...]:
        """Lookaheads at which the choice of the policy was measured."""
        selector, _, heads = _stands(config)
        known = {c.lookahead for c in choices_of(self.profile) if (c.selector, c.heads) == (selector, heads)}
        return tuple(sorted(known))

    def _rows(self, config: Config) -> tuple[dict[int, Recall], dict[int, Perplexity]]:
        wanted = _stands(config)

        def belongs(row: Recall | Perplexity) -> bool:
            return (row.choice.selector, row.choice.lookahead, row.choice.heads) == wanted

        return (
            {r.choice.top_k: r for r in self.profile.recalls if belongs(r)},
            {p.choice.top_k: p for p in self.profile.perplexities if belongs(p)},
        )

    def _missing(self, name: str, label: str, rows: Mapping[int, object], top_k: int, blocks: int) -> str:
        if not rows:
            return f"{name}: nothing was measured for {label}"
        low, high = (percent(k / self.profile.blocks) for k in (min(rows), max(rows)))
        return f"{name}: top-k {top_k} is {percent(top_k / blocks)} of the context, measured were {low} to {high}"


def _stands(config: Config) -> tuple[str, int, int]:
    """Selector, lookahead and Forecast heads of the measured choice that stands for a configuration."""
    if config.policy in FORECAST:
        return "forecast", config.lookahead, 1
    if config.policy == "infinigen":
        return "infinigen", 1, 0
    return ("sparse" if config.policy in SPARSE else config.policy), 0, 0


def _label(config: Config) -> tuple[str, str]:
    """A choice in words, and why nothing can be said of it."""
    selector, lookahead, _ = _stands(config)
    if config.policy == "nosa":
        return "nosa", "no quality was measured for the policy nosa"
    usual = Config().refresh_steps
    if config.policy == "shallow" and config.refresh_steps != usual:
        return "shallow", f"shallow was measured choosing every {usual} steps, not every {config.refresh_steps}"
    return f"{selector} d={lookahead}" if config.policy in (*FORECAST, "infinigen") else selector, ""


def _as_many(rows: Mapping[int, Perplexity], top_k: int) -> AsMany | None:
    measured = [k for k in rows if k <= top_k]
    return AsMany(max(measured), ppl_increase(rows[max(measured)].nats)) if measured else None


def _nats(at: _Between | None, rows: Mapping[int, Perplexity]) -> tuple[float | None, float | None]:
    if at is None:
        return None, None
    low, high = rows[at.low], rows[at.high]
    return at.mix(low.nats, high.nats), at.mix(low.standard_error, high.standard_error)
