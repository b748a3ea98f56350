"""What a quality profile answers, in sentences whose numbers are computed from its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil

from sparda.calibrate.quality import Choice, Dynamics, QualityProfile
from sparda.engine.dynamics.curve import MissCurve
from sparda.explore.quality_compare import (
    SURE,
    Difference,
    choice_of,
    main_top_k,
    nats_difference,
    share_difference,
)
from sparda.explore.quality_retrieval import retrieval_answers
from sparda.explore.text import percent

MISSING = "not measured"
RIVALS = ("untrained", "proxy", "infinigen", "previous", "shared", "early", "recency")
"""What the trained Forecast is held against."""
AHEAD = ("untrained", "proxy", "infinigen", "shared")
"""Those of them that choose layers ahead."""
CRITERION = (
    f"Differences of less than {SURE:g} standard errors are called none: of recall and nats from differences paired by "
    "document, of answers from those paired by context and depth."
)


def answers(profile: QualityProfile) -> list[str]:
    """A sentence or two for each question; where a row is missing it says so."""
    k = main_top_k(profile)
    return [
        *_forecast_adds(profile, k),
        *_lookahead(profile, k),
        _heads(profile, k),
        *_sparse_itself(profile, k),
        _recall_is_not_quality(profile, k),
        *_residents(profile),
        *retrieval_answers(profile, k),
    ]


def _forecast_adds(q: QualityProfile, k: int) -> list[str]:
    forecast = choice_of(q, "forecast", k, 1, 1)
    rivals = [choice_of(q, name, k, 1 if name in AHEAD else 0) for name in RIVALS]

    row, loss = q.recall_of(forecast), q.perplexity_of(forecast)
    points = [(r, share_difference(q, forecast, r)) for r in rivals]
    # What `previous` chooses was there in the step before: of absent blocks it has none by definition.
    others = [r for r in rivals if r.selector != "previous"]
    absent = [(r, share_difference(q, forecast, r, "absent")) for r in others]
    mass = [(r, share_difference(q, forecast, r, "mass")) for r in rivals]
    nats = [(r, nats_difference(q, forecast, r)) for r in rivals]
    start = f"The trained Forecast one layer ahead, top-k {k},"
    return [
        f"{start} catches {percent(row.recall) if row else MISSING} of the free blocks that sparse chooses: "
        f"{_over(points, _points)}.",
        f"Of those that were not chosen in the step before it catches {percent(row.absent) if row else MISSING}: "
        f"{_over(absent, _points)}.",
        f"It holds {percent(row.mass) if row else MISSING} of the attention: {_over(mass, _points)}.",
        f"It costs {f'{loss.nats:.3f}' if loss else MISSING} nats per token: {_over(nats, _nats)}.",
    ]


def _over(found: Iterable[tuple[Choice, Difference | None]], say: Callable[[Difference], str]) -> str:
    return ", ".join(f"{say(d) if d else MISSING} against {rival.label}" for rival, d in found)


def _points(d: Difference) -> str:
    return f"{100 * d.value:+.1f} points" if d.told else "no difference"


def _nats(d: Difference) -> str:
    return f"{d.value:+.3f}" if d.told else "no difference"


def _lookahead(q: QualityProfile, k: int) -> list[str]:
    """What each further layer costs, against the one before."""
    at = {d: choice_of(q, "forecast", k, d, 1) for d in (1, 2, 3, 4)}
    recalls, losses = [], []
    for d, choice in at.items():
        row, loss = q.recall_of(choice), q.perplexity_of(choice)
        before = at.get(d - 1, choice)
        step, more = share_difference(q, choice, before), nats_difference(q, choice, before)
        recalls.append(_step(percent(row.recall) if row else None, _points(step) if step and d > 1 else None, d))
        losses.append(_step(f"{loss.nats:.3f}" if loss else None, _nats(more) if more and d > 1 else None, d))
    return [
        f"Recall of the Forecast by lookahead, top-k {k}: {', '.join(recalls)}.",
        f"Nats by lookahead: {', '.join(losses)}.",
    ]


def _step(value: str | None, change: str | None, d: int) -> str:
    if value is None:
        return f"{MISSING} at {d}"
    return f"{value} at {d}" + (f" ({change})" if change else "")


def _heads(q: QualityProfile, k: int) -> str:
    """What more heads add; one is enough where they spare no nats, since recall of a choice is not quality."""
    one = choice_of(q, "forecast", k, 1, 1)
    found = []
    for heads in (2, 4):
        more = Choice("forecast", k, 1, heads)
        recall, nats = share_difference(q, more, one), nats_difference(q, more, one)
        if recall is None and nats is None:
            found.append(f"{heads} heads: {MISSING}")
            continue
        told = [_points(recall) + " of recall" if recall else "", _nats(nats) + " in nats" if nats else ""]
        verdict = ""
        if nats:
            verdict = ", one is not enough" if nats.told and nats.value < 0 else ", one is enough"
        found.append(f"{heads} heads: {', '.join(t for t in told if t)}{verdict}")
    return f"Forecast heads per KV head, top-k {k}, against one: {'; '.join(found)}."


def _sparse_itself(q: QualityProfile, k: int) -> list[str]:
    """How far the choice that all others are held to is from the best there is, and from none."""
    sparse = choice_of(q, "sparse", k)
    row, loss = q.recall_of(sparse), q.perplexity_of(sparse)
    others = [choice_of(q, name, k) for name in ("oracle", "recency")]
    mass = [(o, share_difference(q, sparse, o, "mass")) for o in others]
    nats = [(o, nats_difference(q, sparse, o)) for o in others]
    return [
        f"sparse itself, top-k {k}, holds {percent(row.mass) if row else MISSING} of the attention: "
        f"{_over(mass, _points)}.",
        f"It costs {f'{loss.nats:.3f}' if loss else MISSING} nats per token: {_over(nats, _nats)}.",
    ]


def _recall_is_not_quality(q: QualityProfile, k: int) -> str:
    """The choice that catches least of what sparse chooses and yet costs no more."""
    sparse = choice_of(q, "sparse", k)
    found: list[tuple[float, Choice]] = []
    for row in q.recalls:
        d = nats_difference(q, row.choice, sparse) if row.choice.top_k == k and row.choice != sparse else None
        if d and (d.value <= 0 or not d.told):
            found.append((row.recall, row.choice))
    start = "Recall of what sparse chooses is not quality"
    if q.perplexity_of(sparse) is None:
        return f"{start}; which choice costs no more than sparse: {MISSING}."
    if not found:
        return f"{start}, though at top-k {k} every other measured choice costs more nats than sparse."
    recall, choice = min(found, key=lambda f: f[0])
    d = nats_difference(q, choice, sparse)
    cost = "costs fewer nats" if d and d.told else "cannot be told from sparse in nats"
    return f"{start}: at top-k {k} {choice.label} catches {percent(recall)} of it and {cost}."


def _residents(q: QualityProfile) -> list[str]:
    if not q.dynamics:
        return [f"How many resident blocks halve the misses: {MISSING}."]
    return [_halved(d) for d in sorted(q.dynamics, key=lambda d: d.top_k)]


def _halved(d: Dynamics) -> str:
    ratio, first = halving_ratio(d.curve), d.curve.missed[0]
    start = f"With as many resident blocks as top-k {d.top_k}, {percent(first)} of the free picks are missed a step"
    if ratio is None:
        return f"{start}; nothing measured halves that."
    slots = ceil(d.forced + ratio * (d.top_k - d.forced) - 1e-9)
    return f"{start}; {slots} resident blocks halve that, slots for {ratio:.2f} times the free picks."


def halving_ratio(curve: MissCurve) -> float | None:
    """The least ratio of slots to free picks at which half of the first point's misses are left, between the measured
    points as the curve itself goes; None where none has so few.
    """
    half = curve.missed[0] / 2
    if curve.missed[-1] > half:
        return None
    low, high = curve.ratio[0], curve.ratio[-1]
    # The curve never rises, so that halving the interval closes in on the least ratio.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if curve.at(middle) <= half else (middle, high)
    return high
