"""Choices as small numbers: what enters and leaves from step to step, each by its rank in a stack both sides keep.

A stack holds what is chosen, newest entry first, then what has left, newest first, to a depth. Blocks that have just
come or gone are those that move, so ranks are small; a compressor then needs few bits for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sparda.engine.dynamics.choices import Blocks, Bools, Ints

DEPTH = 512
"""Blocks that left and can be named by rank; others are named by their id."""

PLANES = ("entered", "new", "shrunk", "leave_first", "leave_gap", "enter_first", "enter_gap", "id")
"""``entered``, ``new``: counts of every set. ``shrunk``: by how much more than that left, modulo 2**16; mostly 0.

Ranks ascend: the first, then gaps. ``id``: of what is new.
"""

Plane = npt.NDArray[np.uint16]


class Stacks:
    """One stack for each of N streams. ``stack`` int16 [N, W], -1 where empty; the first ``count`` [N] are chosen."""

    def __init__(self, streams: int, top_k: int, room: int) -> None:
        self.room = room
        self.stack = np.full((streams, min(room, top_k + DEPTH)), -1, dtype=np.int16)
        self.count = np.zeros(streams, dtype=np.int64)

    @property
    def chosen(self) -> Bools:
        """Bool [N, W]."""
        return np.asarray(np.arange(self.stack.shape[1]) < self.count[:, None])

    def move(self, leaves: Bools, enters: Bools, new_rows: Ints, new_ids: Blocks) -> None:
        """Let marked places leave and enter, and ``new_ids`` in ``new_rows`` (ascending rows) come from outside."""
        rows, per_row = np.unique(new_rows, return_counts=True)
        column = np.arange(len(new_rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
        outside = np.full((len(self.stack), int(per_row.max(initial=0))), -1, dtype=np.int16)
        outside[new_rows, column] = new_ids
        key = np.full(self.stack.shape, 4, dtype=np.uint8)
        key[self.chosen] = 2
        key[leaves], key[enters], key[self.stack < 0] = 3, 0, 5
        wide = np.concatenate([outside, self.stack], axis=1)
        key = np.concatenate([np.where(outside >= 0, 1, 5).astype(np.uint8), key], axis=1)
        order = np.argsort(key, axis=1, kind="stable")[:, : self.stack.shape[1]]
        self.stack = np.take_along_axis(wide, order, axis=1)
        self.count += enters.sum(1) - leaves.sum(1)
        self.count[rows] += per_row


@dataclass
class _Written:
    """Planes as they grow, a piece a step."""

    pieces: dict[str, list[Plane]] = field(default_factory=lambda: {name: [] for name in PLANES})

    def counts(self, name: str, marks: Ints) -> None:
        self.pieces[name].append(marks.astype(np.uint16))

    def ranks(self, name: str, rows: Ints, ranks: Ints) -> None:
        """``ranks`` ascending within each of the ascending ``rows``."""
        first = np.ones(len(rows), dtype=np.bool_)
        first[1:] = rows[1:] != rows[:-1]
        gaps = np.diff(ranks, prepend=0) - 1
        self.pieces[f"{name}_first"].append(ranks[first].astype(np.uint16))
        self.pieces[f"{name}_gap"].append(gaps[~first].astype(np.uint16))


def encode(blocks: Blocks, room: int) -> dict[str, Plane]:
    """Planes of ``blocks`` int16 [steps, N, top_k], ids below ``room``."""
    _, streams, top_k = blocks.shape
    stacks, out = Stacks(streams, top_k, room), _Written()
    lines = np.arange(streams)[:, None]
    for ids in blocks:
        wanted = np.zeros((streams, room + 1), dtype=np.bool_)
        wanted[lines, ids] = True
        # The last column takes what -1 marks, here and below.
        wanted[:, -1] = False
        named, chosen = wanted[lines, stacks.stack], stacks.chosen
        leaves, enters = chosen & ~named, named & ~chosen
        wanted[lines, stacks.stack] = False
        new_rows, new_ids = np.nonzero(wanted)
        entered, new = enters.sum(1), wanted.sum(1)
        out.counts("entered", entered)
        out.counts("new", new)
        out.counts("shrunk", leaves.sum(1) - entered - new)
        out.ranks("leave", *np.nonzero(leaves))
        rows, places = np.nonzero(enters)
        out.ranks("enter", rows, places - stacks.count[rows])
        out.pieces["id"].append(new_ids.astype(np.uint16))
        stacks.move(leaves, enters, new_rows, new_ids.astype(np.int16))
    return {name: np.concatenate(pieces) for name, pieces in out.pieces.items()}


class _Read:
    """Planes as they are used up."""

    def __init__(self, planes: dict[str, Plane]) -> None:
        self.planes = {name: plane.astype(np.int64) for name, plane in planes.items()}
        self.at = dict.fromkeys(planes, 0)

    def take(self, name: str, count: int) -> Ints:
        start = self.at[name]
        self.at[name] = start + count
        found = self.planes[name][start : start + count]
        if len(found) < count:
            raise ValueError(f"plane {name} ends early")
        return found

    def ranks(self, name: str, counts: Ints) -> tuple[Ints, Ints]:
        """Rows and ranks as they were written."""
        rows = np.repeat(np.arange(len(counts)), counts)
        starts = (np.cumsum(counts) - counts)[counts > 0]
        step = np.empty(len(rows), dtype=np.int64)
        first = np.zeros(len(rows), dtype=np.bool_)
        first[starts] = True
        step[first] = self.take(f"{name}_first", int(first.sum()))
        step[~first] = self.take(f"{name}_gap", int((~first).sum())) + 1
        total = np.cumsum(step)
        before = np.repeat(total[starts] - step[starts], counts[counts > 0])
        return rows, total - before

    @property
    def spent(self) -> bool:
        return all(self.at[name] == len(plane) for name, plane in self.planes.items())


def decode(planes: dict[str, Plane], steps: int, streams: int, top_k: int, room: int) -> Blocks:
    """The inverse of ``encode``. Raises ValueError for planes that it cannot have made."""
    stacks, read = Stacks(streams, top_k, room), _Read(planes)
    blocks = np.empty((steps, streams, top_k), dtype=np.int16)
    for step in range(steps):
        entered, new, shrunk = (read.take(name, streams) for name in ("entered", "new", "shrunk"))
        chosen = stacks.chosen
        leaves, enters = np.zeros_like(chosen), np.zeros_like(chosen)
        rows, ranks = read.ranks("leave", (entered + new + shrunk) % 65536)
        leaves[_inside(rows, ranks, chosen)] = True
        rows, ranks = read.ranks("enter", entered)
        enters[_inside(rows, ranks + stacks.count[rows], chosen)] = True
        new_ids = read.take("id", int(new.sum())).astype(np.int16)
        stacks.move(leaves, enters, np.repeat(np.arange(streams), new), new_ids)
        if int(stacks.count.max(initial=0)) > top_k or int(stacks.count.min(initial=0)) < 0:
            raise ValueError("a set outgrows top_k")
        front = np.where(stacks.chosen, stacks.stack, np.int16(-1))[:, :top_k]
        blocks[step] = -1
        # As unsigned numbers -1 is the largest and stays last.
        blocks[step, :, : front.shape[1]] = np.sort(front.view(np.uint16), axis=1).view(np.int16)
    if not read.spent:
        raise ValueError("planes are too long")
    return blocks


def _inside(rows: Ints, places: Ints, like: Bools) -> tuple[Ints, Ints]:
    if len(places) and int(places.max()) >= like.shape[1]:
        raise ValueError("a rank is outside the stack")
    return rows, places


def leave_ranks(planes: dict[str, Plane]) -> Ints:
    """All ranks, of 0 for the newest entry, at which something left."""
    left = (planes["entered"].astype(np.int64) + planes["new"] + planes["shrunk"]) % 65536
    return _Read(planes).ranks("leave", left)[1]
