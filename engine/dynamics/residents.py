"""Slots as the engine keeps them, played step by step: which of the chosen blocks a number of slots has to fetch.

The same rules as the selection kernel's. The least recently chosen block goes, of several the one in the lowest slot.
Forced blocks hold slots; what a step chooses is safe from that step. A block that the next token opens gets its slot
a step ahead, in the one slot more that the engine has than ``resident_blocks``; what is being written is not fetched.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from sparda.engine.dynamics.choices import Bools, Choices, Ints
from sparda.engine.errors import SpardaError

Ties = Literal["slot", "block"]
Start = Literal["oldest", "newest"]

SPARE = 1
"""Slots that the engine has beyond ``resident_blocks``: the next block is born there (``Tiers.slots``)."""

EMPTY = -(1 << 20)
"""Stamp of a slot that holds nothing: it is the first to be taken."""

NEVER = 1 << 40
"""Age of a slot that is not to be taken."""


def start_order(count: int, init_blocks: int, local_blocks: int, start: Start) -> list[int]:
    """The ``count`` blocks of a sequence, those first that few slots hold before the first step.

    ``oldest``: as ``Tiers.reset_residents`` leaves them, forced local blocks, then ascending. ``newest``: as a prompt
    does that is given a row of a ``Batch``, initial blocks, then descending.
    """
    if start == "newest":
        initial = min(init_blocks, count)
        return [*range(initial), *range(count - 1, initial - 1, -1)]
    local = range(max(0, count - 1 - local_blocks), count)
    return [*local, *(m for m in range(count) if m not in local)]


def wanted_blocks(choices: Choices, step: int, spare: int) -> tuple[Ints, Bools]:
    """Ids int64 [N, top_k + spare] that hold slots from this step on, and which are there; ascending where they are.

    The last column, with a ``spare``, is the block that the next token opens. N: layers x heads.
    """
    f = choices.facts
    ids = choices.blocks[step].reshape(f.streams, f.top_k).astype(np.int64)
    if spare:
        now = choices.existing()[step]
        following = (choices.positions()[step] + f.positions_per_step) // f.block + 1
        opened = np.tile(np.repeat(np.where(following > now, following - 1, -1), f.kv_heads), len(f.layers))
        opened[ids[:, 0] < 0] = -1
        ids = np.concatenate([ids, opened[:, None]], axis=1)
    return ids, ids >= 0


def born_from(choices: Choices, step: int) -> Ints:
    """int64 [N, 1]: blocks from this one on are new since the step before; nothing of them is in host memory."""
    f = choices.facts
    before = choices.existing()[step - 1] if step else (np.array(f.context_tokens) - 1) // f.block + 1
    return np.tile(np.repeat(before, f.kv_heads), len(f.layers))[:, None]


def check_slots(choices: Choices, slots: int, skip: int) -> None:
    """Raise SpardaError for fewer slots than top_k, and where ``skip`` leaves no step."""
    if slots < choices.facts.top_k:
        raise SpardaError(
            f"{slots} slots for a top_k of {choices.facts.top_k}; every chosen block needs one: give as many or more."
        )
    if not 0 <= skip < choices.steps:
        raise SpardaError(f"{skip} steps are to be skipped of {choices.steps}; leave at least one.")


def miss_counts(
    choices: Choices,
    slots: int,
    *,
    skip: int = 0,
    ties: Ties = "slot",
    spare: int = SPARE,
    start: Start = "oldest",
) -> npt.NDArray[np.int32]:
    """Blocks fetched, int32 [steps - skip, layers, heads], with ``slots`` as ``Config.slots`` counts them.

    ``ties`` of blocks chosen last in the same step: ``slot``, the lowest goes, as in the engine; ``block``, the lowest
    goes: the rule of ``stack``, whose curve depends on no slot's number. ``spare`` 0: slots without one for the next
    block, which then takes its slot when it is first chosen. Raises SpardaError for fewer slots than top_k.
    """
    check_slots(choices, slots, skip)
    f = choices.facts
    state = _Slots(choices, slots, spare, start, ties)
    counts = np.zeros((choices.steps, f.streams), dtype=np.int32)
    for step in range(choices.steps):
        wanted, there = wanted_blocks(choices, step, spare)
        missing = state.select(step, wanted, there)
        counts[step] = (missing & (wanted < born_from(choices, step))).sum(1)
    return counts[skip:].reshape(-1, len(f.layers), f.heads)


class _Slots:
    """Maps of N streams with S slots each, as in ``LayerTier``; blocks have one more column, for those not there."""

    def __init__(self, choices: Choices, slots: int, spare: int, start: Start, ties: Ties) -> None:
        f = choices.facts
        self.ties = ties
        self.block_of_slot = np.full((f.streams, slots + spare), -1, dtype=np.int64)
        self.stamp = np.full((f.streams, slots + spare), EMPTY, dtype=np.int64)
        self.slot_of_block = np.full((f.streams, choices.room + 1), -1, dtype=np.int64)
        self.lines = np.arange(f.streams)
        for sequence, count in enumerate(choices.existing()[0]):
            order = start_order(int(count), f.init_blocks, f.local_blocks, start)
            # The engine leaves the spare slot empty and counts residents as chosen in the first step.
            kept = np.array(sorted(order[:slots]) if ties == "slot" else order[: slots + spare])
            rows = self.lines[self.lines % f.heads // f.kv_heads == sequence][:, None]
            places = np.arange(len(kept))
            self.block_of_slot[rows, places] = kept
            self.stamp[rows, places] = 0 if ties == "slot" else -1 - places
            self.slot_of_block[rows, kept] = places

    def select(self, step: int, wanted: Ints, there: Bools) -> Bools:
        """Give each wanted block a slot; returns which had none, bool as ``wanted``."""
        lines = self.lines[:, None]
        held = np.where(there, self.slot_of_block[lines, wanted], -1)
        missing = there & (held < 0)
        hit_rows, hit_columns = np.nonzero(held >= 0)
        hit_slots = held[hit_rows, hit_columns]
        tie = np.arange(self.stamp.shape[1]) if self.ties == "slot" else self.block_of_slot + 1
        age = self.stamp * (1 << 17) + tie
        age[hit_rows, hit_slots] = NEVER
        need = missing.sum(1)
        most = int(need.max(initial=0))
        if most:
            oldest = np.argsort(age, axis=1)[:, :most]
            taken = np.zeros(self.stamp.shape, dtype=np.bool_)
            # Rows that need fewer leave the rest of the oldest alone.
            taken[lines, oldest] = np.arange(most) < need[:, None]
            # In the order of both: missing blocks ascending, slots ascending, as many of one as of the other.
            rows, slots = np.nonzero(taken)
            entering = wanted[missing]
            gone = self.block_of_slot[rows, slots]
            self.slot_of_block[rows[gone >= 0], gone[gone >= 0]] = -1
            self.slot_of_block[rows, entering] = slots
            self.block_of_slot[rows, slots] = entering
            self.stamp[rows, slots] = step
        self.stamp[hit_rows, hit_slots] = step
        return np.asarray(missing)
