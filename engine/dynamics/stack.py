"""Misses for any number of slots at once: how deep in the stack of least recent choice each chosen block lay.

Mattson, Gecsei, Slutz, Traiger, Evaluation techniques for storage hierarchies, IBM Systems Journal 9 (1970): slots that
evict by one order of all blocks hold a prefix of it, whatever their number; so a block's rank says which slots miss it.
Of blocks chosen last in the same step the higher stands first. The engine goes by slot numbers there, which no one
order can follow; its counts, ``residents.miss_counts``, differ by so little as that is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sparda.engine.dynamics.choices import Bools, Choices, Ints, TraceFacts
from sparda.engine.dynamics.curve import MissCurve
from sparda.engine.dynamics.residents import (
    SPARE,
    Start,
    born_from,
    check_slots,
    start_order,
    wanted_blocks,
)
from sparda.engine.errors import SpardaError

QUANTILES = (0.5, 0.95, 0.99, 1.0)


@dataclass(frozen=True, eq=False)
class Distances:
    """Every chosen block that more slots than top_k would be needed to have kept. One entry a block and step.

    ``step``, ``stream`` int32 (layer * heads + head) and ``rank`` int32: more slots than ``rank``, ``spare`` ones
    included, have it; room + 1 where none has. ``free`` int64 [steps, streams]: picks that are not forced. The first
    ``skip`` steps are left out.
    """

    facts: TraceFacts
    spare: int
    skip: int
    step: npt.NDArray[np.int32]
    stream: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int32]
    free: Ints
    room: int
    live_steps: int
    """Steps, skipped ones included, in which every sequence goes on: totals of steps are of these."""

    def __post_init__(self) -> None:
        if not int(self.free.sum()):
            raise SpardaError(
                f"no block of this trace is freely chosen: top_k is {self.facts.top_k} and {self.facts.forced} blocks "
                "are forced; record with a higher top_k or a longer context."
            )

    @cached_property
    def by_stream(self) -> Ints:
        """int64 [streams, ranks + 1]: entry r counts blocks of rank r or deeper, which r slots (with spares) miss."""
        width = self.room + 2
        flat = np.bincount(self.stream.astype(np.int64) * width + self.rank, minlength=self.facts.streams * width)
        return np.asarray(flat.reshape(-1, width)[:, ::-1].cumsum(1)[:, ::-1])

    def missed(self, slots: int) -> Ints:
        """int64 [streams]: blocks fetched with ``slots`` as ``Config.slots`` counts them, in all steps."""
        return self.by_stream[:, min(slots + self.spare, self.room + 1)]

    def share(self, slots: int) -> float:
        """Misses as a share of the free picks."""
        return float(self.missed(slots).sum() / self.free.sum())

    def layer_shares(self, slots: int) -> npt.NDArray[np.float64]:
        """float64 [layers]: misses of each layer as a share of its free picks."""
        shape = (len(self.facts.layers), self.facts.heads)
        free = self.free.sum(0).reshape(shape).sum(1)
        return np.asarray(self.missed(slots).reshape(shape).sum(1) / np.maximum(free, 1), dtype=np.float64)

    def totals(self, slots: int) -> Ints:
        """int64 [steps]: blocks fetched in a step, over all streams; of the steps in which all sequences go on."""
        steps = self.step[self.rank >= min(slots + self.spare, self.room + 1)]
        return np.asarray(np.bincount(steps - self.skip, minlength=len(self.free))[: self.live_steps - self.skip])

    def quantiles(self, slots: int) -> dict[float, float]:
        """Quantiles of ``totals``: by QUANTILES."""
        totals = self.totals(slots)
        return {q: float(np.quantile(totals, q)) for q in QUANTILES} if len(totals) else {}

    def slots_at(self, times: float) -> int:
        """Slots for so many times top_k, rounded."""
        return round(times * self.facts.top_k)

    def curve(self) -> MissCurve:
        """Missed share by slots, a point for each number from top_k to where nothing is missed, or all fit.

        Raises SpardaError where top_k leaves no free pick.
        """
        f = self.facts
        if f.free < 1:
            raise SpardaError(
                f"a miss curve is a share of the free picks, and top_k {f.top_k} has none beside {f.forced} forced "
                "blocks; record with a higher top_k."
            )
        ratios, shares = [], []
        for slots in range(f.top_k, max(f.top_k, self.room) + 1):
            ratios.append((slots - f.forced) / f.free)
            # A sequence that begins short has more free picks missing than a full one has slots for.
            shares.append(min(1.0, self.share(slots)))
            if not shares[-1]:
                break
        return MissCurve(tuple(ratios), tuple(shares))


def stack_distances(choices: Choices, *, skip: int = 0, spare: int = SPARE, start: Start = "oldest") -> Distances:
    """Ranks of all that is chosen, in one pass over the steps.

    ``spare`` and ``start`` as for ``residents.miss_counts``, whose counts with ties by block these ranks give for every
    number of slots. Raises SpardaError where ``skip`` leaves no step.
    """
    f = choices.facts
    check_slots(choices, f.top_k, skip)
    room = choices.room
    place, known = _begin(choices, start)
    found: list[tuple[int, Ints, Ints]] = []
    lines = np.arange(f.streams)[:, None]
    for step in range(choices.steps):
        wanted, there = wanted_blocks(choices, step, spare)
        ids = np.where(there, wanted, room)
        rank = place[lines, ids]
        deep = there & ((rank >= f.top_k) | ~known[lines, ids]) & (wanted < born_from(choices, step))
        if step >= skip:
            rows, columns = np.nonzero(deep)
            depth = np.where(known[rows, ids[rows, columns]], rank[rows, columns], room + 1)
            found.append((step, rows, depth))
        # Each block falls by as many as come from below it to the front; those stand there, the highest first.
        risen = np.zeros(place.shape, dtype=np.int32)
        risen[lines, rank] = there
        count = there.sum(1, keepdims=True)
        place += (count - np.take_along_axis(risen.cumsum(1), place, axis=1)).astype(place.dtype)
        place[lines, ids] = np.where(there, count - there.cumsum(1), room)
        known[lines, ids] = True
    steps = np.concatenate([np.full(len(rows), step, np.int32) for step, rows, _ in found])
    return Distances(
        facts=f,
        spare=spare,
        skip=skip,
        step=steps,
        stream=np.concatenate([rows for _, rows, _ in found]).astype(np.int32),
        rank=np.concatenate([ranks for _, _, ranks in found]).astype(np.int32),
        free=choices.free_picks().reshape(choices.steps, -1)[skip:],
        room=room,
        live_steps=max(skip, int(choices.lengths().min())),
    )


def _begin(choices: Choices, start: Start) -> tuple[npt.NDArray[np.int32], Bools]:
    """int32 [N, room + 1]: each block's rank before the first step; unborn ones stand last, in the end nothing.

    And whether any number of slots could hold it by now: one that was not chosen when it was born is nowhere.
    """
    f = choices.facts
    place = np.tile(np.arange(choices.room + 1, dtype=np.int32), (f.streams, 1))
    streams = np.arange(f.streams)
    for sequence, count in enumerate(choices.existing()[0]):
        order = start_order(int(count), f.init_blocks, f.local_blocks, start)
        rows = streams[streams % f.heads // f.kv_heads == sequence][:, None]
        place[rows, order] = np.arange(len(order))
    known = place < np.tile(np.repeat(choices.existing()[0], f.kv_heads), len(f.layers))[:, None]
    return place, known


def miss_curve(choices: Choices, *, skip: int = 0, spare: int = SPARE, start: Start = "oldest") -> MissCurve:
    """Missed share of the free picks by slots, for all numbers of slots: see ``Distances.curve``."""
    return stack_distances(choices, skip=skip, spare=spare, start=start).curve()
