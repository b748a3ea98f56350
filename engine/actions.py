"""A plan cut into what the host issues at a time, where it has work of its own in the middle of the step."""

from __future__ import annotations

from dataclasses import dataclass

from sparda.engine.plan import COPY, HOST, Op, Plan

CALLED = (COPY, HOST)
"""Streams whose operations the host carries out or starts anew at every step; those of all others are captured."""


@dataclass(frozen=True, slots=True)
class Action:
    """Consecutive operations of one stream, issued together.

    ``waits``: operations of other streams whose end must be waited for first; those of the host are not among them,
    because it has done them before it issues anything else. ``marked``: another stream waits for the last operation.
    """

    ops: tuple[Op, ...]
    waits: tuple[int, ...]
    marked: bool

    @property
    def stream(self) -> str:
        return self.ops[0].stream


def cut(plan: Plan) -> list[Action]:
    """The plan's operations as actions, in the order of the plan.

    An action ends where the stream changes, before an operation that waits, and after one that is waited for, so that
    it neither begins later nor is known to be done later than it must. The host's and the copies stand alone.
    """
    awaited = {index for op in plan for index in op.after}
    parts: list[list[Op]] = []
    for op in plan:
        last = parts[-1][-1] if parts else None
        joins = last is not None and last.stream == op.stream and last.index not in awaited and not op.after
        if joins and op.stream not in CALLED:
            parts[-1].append(op)
        else:
            parts.append([op])
    return [
        Action(
            ops=tuple(part),
            waits=tuple(index for index in part[0].after if plan.ops[index].stream != HOST),
            marked=part[-1].index in awaited and part[-1].stream != HOST,
        )
        for part in parts
    ]
