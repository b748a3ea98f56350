"""Published figures of whole tables: the most that was claimed, and where memory ran out, beside the model's."""

from __future__ import annotations

from dataclasses import dataclass

from sparda.engine.loader import to_plain
from sparda.explore.published import Model
from sparda.explore.published_ratios import modelled

CLAIMED_CONTEXTS = (32768, 131072)
CLAIMED_BATCHES = (4, 8, 16, 32, 64)
"""Cells over which the largest ratio of a claim is looked for: of the published grid, those within the envelope."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A published "up to", and the largest ratio over the model's grid."""

    machine: str
    about: str
    published: float
    low: float
    high: float
    source: str

    @property
    def verdict(self) -> str:
        if self.low <= self.published <= self.high:
            return "inside"
        return "model gives more" if self.low > self.published else "model gives less"

    def to_dict(self) -> dict[str, object]:
        return {**to_plain(self), "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class Room:
    """A policy's memory at one cell beside what was published: whether it ran out. GiB."""

    machine: str
    policy: str
    context_tokens: int
    batch: int
    ran_out: bool
    needs_gib: float
    room_gib: float

    @property
    def agrees(self) -> bool:
        return (self.needs_gib > self.room_gib) == self.ran_out

    def to_dict(self) -> dict[str, object]:
        return {**to_plain(self), "agrees": self.agrees}


def claims(model: Model) -> list[Claim]:
    """The published "up to" figures of the model's machine, over the model's own cells that fit its memory."""
    found: list[Claim] = []
    for most in model.published.most:
        if most.machine != model.name:
            continue
        places = [
            (c, b)
            for c in CLAIMED_CONTEXTS
            for b in CLAIMED_BATCHES
            if max(model.gpu_gib(c, b, p) for p in (most.policy, most.over)) <= model.room_gib
        ]
        # The largest over the grid, in each play; the range is over plays.
        each = (modelled(model, *at, most.policy, most.over) for at in places)
        largest = [max(play) for play in zip(*each, strict=True)]
        if largest:
            about = f"{most.policy} over {most.over}, the most of any cell"
            found.append(Claim(model.name, about, most.ratio, min(largest), max(largest), most.source))
    return found


def capacity(model: Model) -> list[Claim]:
    """The best batch of an offloading policy over the best of a resident one that fits, where one is known not to.

    At contexts where a cell ran out of memory and both policies have published cells; the model's resident policy has
    every batch that our own memory count lets it have.
    """
    found: list[Claim] = []
    for context, over in sorted(
        {(c.context_tokens, c.policy) for c in model.published.no_room if c.machine == model.name}
    ):
        best = {p: _best_published(model, context, p) for p in ("sparda", over)}
        fitting = {
            p: [b for b in CLAIMED_BATCHES if model.gpu_gib(context, b, p) <= model.room_gib] for p in ("sparda", over)
        }
        if not all(best.values()) or not all(fitting.values()):
            continue
        speeds = [
            {p: max(model.tokens_per_s(context, b, p, c) for b in batches) for p, batches in fitting.items()}
            for c in model.assumptions.combinations
        ]
        ratios = [s["sparda"] / s[over] for s in speeds]
        about = f"best batch of sparda over best batch of {over} that fits ({max(fitting[over])} in the model)"
        published = best["sparda"] / best[over]
        found.append(Claim(model.name, about, published, min(ratios), max(ratios), "the published cells"))
    return found


def _best_published(model: Model, context: int, policy: str) -> float:
    """The most tokens/s of any published cell; 0 where none is known."""
    wanted = (model.name, context, policy)
    known = [c.tokens_per_s for c in model.published.cells if (c.machine, c.context_tokens, c.policy) == wanted]
    return max(known, default=0.0)


def rooms(model: Model) -> list[Room]:
    """Memory where a published policy ran out, and where a resident one is known to have fitted."""
    made = []
    for cell in model.published.no_room:
        if cell.machine == model.name:
            made.append(_room(model, cell.policy, cell.context_tokens, cell.batch, ran_out=True))
    policies = {cell.policy for cell in model.published.no_room}
    for known in model.published.cells:
        if known.machine == model.name and known.policy in policies:
            made.append(_room(model, known.policy, known.context_tokens, known.batch, ran_out=False))
    return sorted(made, key=lambda r: (r.context_tokens, r.batch))


def _room(model: Model, policy: str, context: int, batch: int, ran_out: bool) -> Room:
    needs = model.gpu_gib(context, batch, policy)
    return Room(model.name, policy, context, batch, ran_out, needs, model.room_gib)
