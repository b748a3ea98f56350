"""What a selection trace holds, for a reader and for --json: its conditions, what comes back, what slots would miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from sparda.engine.dynamics.choices import Choices, TraceFacts
from sparda.engine.dynamics.overlap import Spread, overlap, spread
from sparda.engine.dynamics.residents import SPARE, Start
from sparda.engine.dynamics.stack import Distances, stack_distances
from sparda.explore.text import columns, count, number, percent, wrapped

TIMES = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Slots of the table, in multiples of top_k."""


@dataclass(frozen=True, slots=True)
class SlotMisses:
    """Misses with so many resident blocks: ``share`` of the free picks, by layer.

    ``blocks``: a step and KV head. ``totals``: quantiles of the blocks of a whole step, by 0.5, 0.95, 0.99 and 1.
    """

    times: float
    slots: int
    share: Spread
    blocks: float
    totals: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class Shown:
    """A trace in figures. ``spare``: slots beyond those named.

    ``overlap`` by lag in steps: share of the free picks that were free picks then.
    """

    facts: TraceFacts
    steps: int
    skip: int
    spare: int
    overlap: Mapping[int, Spread]
    misses: tuple[SlotMisses, ...]

    def to_dict(self) -> dict[str, object]:
        """As JSON has it: keys are strings."""
        lags = {str(lag): asdict(found) for lag, found in self.overlap.items()}
        rows = [{**asdict(m), "totals": {str(q): v for q, v in m.totals.items()}} for m in self.misses]
        return {
            "facts": asdict(self.facts),
            "steps": self.steps,
            "skip": self.skip,
            "spare": self.spare,
            "overlap": lags,
            "misses": rows,
        }


def shown(choices: Choices, skip: int, *, spare: int = SPARE, start: Start = "oldest") -> Shown:
    """The figures of a trace without its ``skip`` first steps.

    Raises SpardaError where no step is left or nothing is freely chosen.
    """
    distances = stack_distances(choices, skip=skip, spare=spare, start=start)
    found = {lag: spread(by_layer) for lag, by_layer in overlap(choices, skip=skip).items()}
    rows = tuple(_misses(distances, times) for times in TIMES)
    return Shown(choices.facts, choices.steps, skip, spare, found, rows)


def _misses(distances: Distances, times: float) -> SlotMisses:
    slots = distances.slots_at(times)
    picked = int((distances.free > 0).sum())
    return SlotMisses(
        times,
        slots,
        spread(distances.layer_shares(slots), distances.share(slots)),
        float(distances.missed(slots).sum() / max(1, picked)),
        distances.quantiles(slots),
    )


def text_of_trace(name: str, found: Shown) -> str:
    """The figures as a table of at most 80 columns."""
    f = found.facts
    contexts = sorted(set(f.context_tokens))
    context = str(contexts[0]) if len(contexts) == 1 else f"{contexts[0]} to {contexts[-1]}"
    size = [
        count(found.steps, "step"),
        count(len(f.layers), "layer"),
        count(len(f.context_tokens), "sequence"),
        count(f.kv_heads, "KV head"),
    ]
    said = (
        f"{name}: {f.source} on {f.model}, {', '.join(size)}, from a context of {context} tokens on; top_k {f.top_k}, "
        f"{f.forced} of it forced, blocks of {f.block} tokens{_more(f)}."
    )
    rows = [
        [
            f"{m.times:g}",
            str(m.slots),
            *(percent(v) for v in (m.share.mean, m.share.low, m.share.median, m.share.high)),
            f"{m.blocks:.2f}",
            *(number(v) for v in m.totals.values()),
        ]
        for m in found.misses
    ]
    head = ["x top_k", "slots", "missed", "low", "middle", "high", "blocks"]
    quantiles = ["p50", "p95", "p99", "max"] if found.misses[0].totals else []
    lags = ", ".join(f"{lag}: {percent(s.mean, 0)}" for lag, s in found.overlap.items())
    notes = [
        f"Missed: share of the free picks, of all layers and of the lowest, middle and highest; blocks: of a step and "
        f"KV head; p50 to max: of a whole step. The first {found.skip} steps are left out.",
        "Slots: resident blocks; the engine's slot to spare, where the next block is born, is counted with them."
        if found.spare
        else "",
        f"Free picks that were free picks so many steps before: {lags}." if lags else "",
    ]
    return "\n".join(
        [wrapped(said), "", columns([*head, *quantiles], rows, left=0), *map(wrapped, filter(None, notes))]
    )


def _more(facts: TraceFacts) -> str:
    words: Sequence[str] = [
        f"every {facts.positions_per_step} positions" if facts.positions_per_step > 1 else "",
        facts.conditions,
    ]
    return "".join(f"; {word}" for word in words if word)
