"""A stream while it is played: which operation it has come to, and what it waits for."""

from __future__ import annotations

from sparda.engine.plan import Op

JOINS = -1
"""All that the operation waited for has ended; its stream is about to see it."""
BEGINS = -2
"""A copy's first reads are under way."""
RUNS = -3
"""The machine has the operation."""


class Stream:
    """The operations of one stream, how far it is, and what happened when.

    ``at``: place of the operation that it has come to, or the number of operations once it has run them all.
    ``phase``: the number of the wait that holds that operation up, or one of JOINS, BEGINS, RUNS. ``due``: when the
    last latency (of the first two of these) ends, on the simulation's clock. ``turn``: when the wait began, as a number
    that grows from each wait of any stream to the next. ``starts`` and ``ends`` hold the nanoseconds of the operations
    up to here.
    """

    __slots__ = ("at", "due", "ends", "name", "ops", "phase", "starts", "turn")

    def __init__(self, name: str) -> None:
        self.name = name
        self.ops: list[Op] = []
        self.at = 0
        self.phase = 0
        self.due: float = 0
        self.turn = 0
        self.starts: list[int] = []
        self.ends: list[int] = []

    @property
    def over(self) -> bool:
        return self.at == len(self.ops)
