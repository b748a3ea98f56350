"""Matching the kernels that a profiler saw with the operations that launched them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from sparda.calibrate.launched import KERNELS, MERGE, MERGING, function_of
from sparda.engine.errors import SpardaError
from sparda.engine.plan import Op, Plan

Event = tuple[str, int, int]
"""A kernel's name, start and end in nanoseconds."""


def kernels_of(plan: Plan, events: Sequence[Event]) -> list[list[Event]]:
    """The kernels of each operation of the plan, in plan order.

    Operations of one stream that launch the same function are matched with that function's kernels in order of time.
    Where a function is launched on several streams, see ``_split``. Raises SpardaError for a kernel that no operation
    launches and for a function with more or fewer kernels than operations.
    """
    seen: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e[1], e[2])):
        if function := function_of(event[0]):
            seen[function].append(event)
    launching = _launching(plan, merged=MERGE in seen)
    for function in sorted({*seen, *launching}):
        found, wanted = len(seen[function]), len(launching.get(function, ()))
        if found != wanted:
            raise SpardaError(
                f"kernel {function} was recorded {found} times but this step of {plan.config.policy} launches it "
                f"{wanted} times; give all kernels of exactly one replay of the plan."
            )
    kernels: list[list[Event]] = [[] for _ in plan.ops]
    several = [f for f, ops in launching.items() if len({op.stream for op in ops}) > 1]
    for function, ops in launching.items():
        if function not in several:
            for op, event in zip(ops, seen[function], strict=True):
                kernels[op.index].append(event)
    for function in several:
        for index, event in _split(plan, launching[function], seen[function], kernels):
            kernels[index].append(event)
    return kernels


def _launching(plan: Plan, *, merged: bool) -> Mapping[str, list[Op]]:
    """Operations by the function that they launch, in plan order. Raises SpardaError for a kind that is not known."""
    found: dict[str, list[Op]] = defaultdict(list)
    for op in plan:
        if op.kind not in KERNELS:
            raise SpardaError(
                f"operation {op.name} of {plan.config.policy}: which kernels a {op.kind!r} launches is not known; "
                f"known kinds: {', '.join(KERNELS)}."
            )
        for function in (*KERNELS[op.kind], *([MERGE] if merged and op.kind in MERGING else [])):
            found[function].append(op)
    return found


def _split(
    plan: Plan, ops: Sequence[Op], events: Sequence[Event], known: Sequence[Sequence[Event]]
) -> list[tuple[int, Event]]:
    """(operation, kernel) of a function that several streams launch: in order within a stream, by waits between them.

    Each kernel, in order of time, goes to a stream's next operation that could start then: all that it waits for has
    ended, as far as ``known``. Among several, to the one that would otherwise end after what follows it has started,
    else to the one that has been waiting longest. A kernel is told from the others by start and end alone; this holds
    since no such function lets the next kernel of its stream start early (a test looks).
    """
    before, after = _neighbours(plan)
    queues: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        queues[op.stream].append(op)
    ready = {op.index: max([e[2] for i in before[op.index] for e in known[i]], default=0) for op in ops}
    due = {op.index: min([e[1] for i in after[op.index] for e in known[i]], default=None) for op in ops}
    found: list[tuple[int, Event]] = []
    for place, event in enumerate(events):
        heads = [queue[0] for queue in queues.values() if queue]
        able = [op for op in heads if ready[op.index] <= event[1]] or heads
        following = events[place + 1][2] if place + 1 < len(events) else None
        pressed = [op for op in able if _missed(due[op.index], following)]
        chosen = min(pressed or able, key=lambda op: (ready[op.index], op.index))
        found.append((queues[chosen.stream].pop(0).index, event))
    return found


def _missed(due: int | None, end: int | None) -> bool:
    return due is not None and end is not None and end > due


def _neighbours(plan: Plan) -> tuple[list[list[int]], list[list[int]]]:
    """What each operation directly follows, on its stream or by a wait; and what follows it."""
    before: list[list[int]] = []
    after: list[list[int]] = [[] for _ in plan.ops]
    last: dict[str, int] = {}
    for op in plan:
        before.append([*op.after, *([last[op.stream]] if op.stream in last else [])])
        for index in before[-1]:
            after[index].append(op.index)
        last[op.stream] = op.index
    return before, after
