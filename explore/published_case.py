"""The whole comparison with published figures, and what it comes to, said from its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sparda.calibrate.published import Published, PublishedCell
from sparda.engine.loader import to_plain
from sparda.engine.shapes import model_named
from sparda.explore.published import HOSTED, Assumptions, Compared, Model, compared, models
from sparda.explore.published_limits import Claim, Room, capacity, claims, rooms
from sparda.explore.published_ratios import Ratio, Trend, ratios, trends
from sparda.explore.text import percent, tokens_label


@dataclass(frozen=True, slots=True)
class HiddenMisses:
    """The miss rate that two published cells come to if prefetching hid link time and nothing else.

    None where prefetching saved no time. ``assumed``: whether it lies among the rates that are played.
    """

    machine: str
    context_tokens: int
    batch: int
    miss_rate: float | None
    assumed: bool


@dataclass(frozen=True, slots=True)
class LaunchBound:
    """The most that one launch can take on average: the host issues all of a step's launches within the step."""

    cell: PublishedCell
    launches: int
    us: float


@dataclass(frozen=True, slots=True)
class Case:
    """Everything compared. ``profiles``: by machine, which profile was played and its tier."""

    published: Published
    assumptions: Assumptions
    profiles: Mapping[str, tuple[str, str]]
    cells: tuple[Compared, ...]
    ratios: tuple[Ratio, ...]
    trends: tuple[Trend, ...]
    claims: tuple[Claim, ...]
    rooms: tuple[Room, ...]
    misses: tuple[HiddenMisses, ...]
    bound: LaunchBound

    def to_dict(self) -> dict[str, object]:
        return {
            "paper": self.published.paper,
            "code": self.published.code,
            "model": self.published.model,
            "assumptions": to_plain(self.assumptions),
            "changed": self.assumptions.changed,
            "profiles": {m: {"profile": name, "tier": tier} for m, (name, tier) in self.profiles.items()},
            "cells": [c.to_dict() for c in self.cells],
            "ratios": [r.to_dict() for r in self.ratios],
            "trends": [t.to_dict() for t in self.trends],
            "claims": [c.to_dict() for c in self.claims],
            "rooms": [r.to_dict() for r in self.rooms],
            "misses": [to_plain(m) for m in self.misses],
            "launch_bound": to_plain(self.bound),
            "conclusions": conclusions(self),
        }


def case_of(published: Published, assumptions: Assumptions, profile: str | None = None) -> Case:
    """Play every published cell. ``profile``: play all machines on this one instead of on their datasheets' own.

    Raises SpardaError where a profile is not there or cannot price a policy.
    """
    every = models(published, assumptions, profile)
    found = {m.name: ratios(m) for m in every}
    return Case(
        published=published,
        assumptions=assumptions,
        profiles={m.name: (m.profile.name, m.profile.tier) for m in every},
        cells=tuple(c for m in every for c in compared(m)),
        ratios=tuple(r for m in every for r in found[m.name]),
        trends=tuple(t for m in every for t in trends(m, found[m.name])),
        claims=tuple(c for m in every for c in (*claims(m), *capacity(m))),
        rooms=tuple(r for m in every for r in rooms(m)),
        misses=tuple(h for m in every for h in _misses(m)),
        bound=_bound(published),
    )


def _misses(model: Model) -> Iterable[HiddenMisses]:
    rates = model.assumptions.miss_rates
    for cell in model.published.cells:
        if (cell.machine, cell.policy) != (model.name, "sparda-on-demand"):
            continue
        faster = model.published.cell(cell.machine, cell.context_tokens, cell.batch, "sparda")
        if faster:
            rate = model.hidden_misses(cell, faster)
            assumed = rate is not None and min(rates) <= rate <= max(rates)
            yield HiddenMisses(cell.machine, cell.context_tokens, cell.batch, rate, assumed)


def _bound(published: Published) -> LaunchBound:
    layers = model_named(published.model).layers

    def bound_of(cell: PublishedCell) -> LaunchBound:
        launches = published.launches.per_layer[cell.policy] * layers
        return LaunchBound(cell, launches, cell.step_us / launches)

    return min(map(bound_of, published.cells), key=lambda b: b.us)


def conclusions(case: Case) -> list[str]:
    """What holds and what does not, one sentence each; none of them is written beforehand."""
    return [
        _of_speeds(case.cells),
        _of_launches(case),
        _of_ratios(case.ratios),
        _of_trends(case.trends),
        _of_misses(case),
        *_of_rooms(case.rooms),
        *(_of_claim(c) for c in case.claims),
        _not_explained(case),
    ]


def _of_speeds(cells: Sequence[Compared]) -> str:
    below = sum(c.cell.tokens_per_s < c.low for c in cells)
    above = sum(c.cell.tokens_per_s > c.high for c in cells)
    least, most = min(c.ratio_low for c in cells), max(c.ratio_high for c in cells)
    return (
        f"Speed: of {len(cells)} published figures {below} lie below the model's range, {len(cells) - below - above} "
        f"inside and {above} above; published speeds are {least:.2f} to {most:.2f} times the model's."
    )


def _of_launches(case: Case) -> str:
    b, a = case.bound, case.assumptions
    start = (
        f"Launches: a host that makes {b.launches} launches in a step of {b.cell.step_us / 1e3:.1f} ms takes at most "
        f"{b.us:.1f} us for each (batch {b.cell.batch}, {tokens_label(b.cell.context_tokens)}, {b.cell.policy})"
    )
    if not a.eager:
        return f"{start}; here the step is assumed to be one graph, which has none of them."
    over = [us for us in a.launch_us if us > b.us]
    said = f"{over[-1]:g} us is more than that" if over else "every value assumed is below that"
    hosted, plays = sum(c.hosted for c in case.cells), sum(c.plays for c in case.cells)
    return (
        f"{start}; assumed are {_span(a.launch_us)} us: {said}. In {hosted} of {plays} plays of published cells the "
        f"launches are {percent(HOSTED, 0)} of the step or more; there a ratio is only one of launch counts."
    )


def _of_ratios(found: Sequence[Ratio]) -> str:
    parts = []
    for about in dict.fromkeys(r.about for r in found):
        own = [r for r in found if r.about == about]
        ordered = sum(r.agree == r.plays for r in own)
        inside = sum(r.verdict == "inside" for r in own)
        parts.append(f"{about}: order in {ordered} of {len(own)}, value in {inside}")
    return "Ratios that the model gives too, whatever the unknowns: " + "; ".join(parts) + "."


def _of_trends(found: Sequence[Trend]) -> str:
    said = [f"{t.about} along the {t.axis} {t.direction}: {t.verdict}" for t in found]
    return "Trends: " + "; ".join(said) + "." if said else "Trends: no ratio is known at two places."


def _of_misses(case: Case) -> str:
    rates = case.assumptions.miss_rates
    said = [
        f"batch {m.batch}: {'no time hidden' if m.miss_rate is None else percent(m.miss_rate)}" for m in case.misses
    ]
    known = [m for m in case.misses if m.miss_rate is not None]
    inside = sum(m.assumed for m in known)
    return (
        f"Misses: if prefetching hid link time alone, {', '.join(said) or 'nothing is known'}; "
        f"{inside} of {len(known)} lie in the range played, {percent(min(rates))} to {percent(max(rates))}."
    )


def _of_rooms(found: Sequence[Room]) -> list[str]:
    if not found:
        return []
    odd = [r for r in found if not r.agrees]
    start = f"Memory: this project's count agrees with {len(found) - len(odd)} of {len(found)} published cells"
    said = [
        f"batch {r.batch} at {tokens_label(r.context_tokens)} needs {r.needs_gib:.0f} of {r.room_gib:.0f} GiB but "
        f"{'ran out' if r.ran_out else 'fitted'} there"
        for r in odd
    ]
    return [f"{start}: {'; '.join(said)}." if said else f"{start}."]


def _of_claim(c: Claim) -> str:
    return (
        f"Up to, {c.machine}: {c.about}, is {c.published:.2f} as published and {c.low:.2f} to {c.high:.2f} in the "
        f"model: {c.verdict}."
    )


def _not_explained(case: Case) -> str:
    """What the model has the other way round in every play."""
    odd = [
        f"{r.about} at {tokens_label(r.context_tokens)}, batch {r.batch} (published {r.published:.2f}, model "
        f"{r.low:.2f} to {r.high:.2f})"
        for r in case.ratios
        if r.verdict == "opposite"
    ]
    odd += [f"{t.about} along the {t.axis}" for t in case.trends if t.verdict == "does not hold"]
    return f"Not explained: {'; '.join(odd)}." if odd else "Not explained: no order or trend is the other way round."


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
