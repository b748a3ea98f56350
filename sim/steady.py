"""Identical layers are simulated once: an exact shortcut through the middle of a step that has settled.

Most layers of a step have the same operations, streams, work and waits. Once a simulation repeats itself from one such
layer to the next, it goes on doing so until the layers change: the machine's state is a function of what runs and how
much of it is left, and both follow from when the operations under way began and at which rates they went since. So
where several layers in a row have the same spans and the same rates, counted from their own beginnings, and none has
operations under way that began before these layers, the next layer starts from the same state as they did. Times are
whole nanoseconds, and what is left of an operation comes from the same sums every time: to the last bit.

A step is therefore played without most of the run of equal layers, and the layers that were left out are written in
afterwards. Where it has not settled by then, more are played, and at last all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

from sparda.engine.plan import MAIN, Op, Plan
from sparda.sim.timeline import Sample, Span, Timeline

TRIES = (4, 9)
"""Layers of the run that are played before those left out."""
AFTER = 1
"""Layers of the run that are played after those left out, besides as many as waits reach back."""


@dataclass(frozen=True, slots=True)
class Run:
    """Equal blocks of operations in a plan: ``count`` of ``length`` operations each, from operation ``begin`` on.

    ``reach``: how many blocks back the waits of these and of all later operations go.
    """

    begin: int
    length: int
    count: int
    reach: int


def longest_run(plan: Plan) -> Run | None:
    """The longest run of layers that are the same but for their place; None where no two are."""
    starts = _starts(plan)
    if not starts:
        return None
    ends = [*starts[1:], len(plan.ops)]
    shapes = [_shape(plan, a, b) for a, b in zip(starts, ends, strict=True)]
    best, first = (0, 0), 0
    for i in range(1, len(shapes) + 1):
        if i == len(shapes) or shapes[i] != shapes[first]:
            best = max(best, (i - first, -first))
            first = i
    count, first = best[0], -best[1]
    if count < 2:
        return None
    begin, length = starts[first], ends[first] - starts[first]
    reach = max((op.index - a for op in plan.ops[begin:] for a in op.after), default=0)
    return Run(begin, length, count, ceil(reach / length))


def _starts(plan: Plan) -> list[int]:
    """Where each layer begins: at the first operation of the main stream that belongs to a later layer than any before.

    A choice made for a later layer comes with a score that the main stream computes, so its layer does not count.
    """
    first = next((op for op in plan.ops if op.layer is not None), None)
    return [op.index for op in plan.ops if first and op.kind == first.kind and op.stream == MAIN]


def _shape(plan: Plan, begin: int, end: int) -> tuple[object, ...]:
    """A block of operations, its own place left out."""
    return tuple(
        (op.kind, op.stream, op.work, tuple(op.index - a for a in op.after), op.index in plan.beside_choice)
        for op in plan.ops[begin:end]
    )


def without(plan: Plan, begin: int, count: int) -> Plan:
    """The plan without ``count`` operations from ``begin`` on: whole blocks of a run, as many before as waits reach.

    What waited for one of them, or for one before them from behind, waits for its like as far back.
    """
    rest = plan.ops[begin + count :]
    later = (replace(op, index=op.index - count, after=tuple(a - count for a in op.after)) for op in rest)
    return Plan(plan.shape, plan.spec, plan.workload, plan.config, (*plan.ops[:begin], *later))


def shortened(plan: Plan, play: Callable[[Plan], Timeline]) -> Timeline | None:
    """The timeline of ``plan`` by way of a shorter plan; None where the step has no run or does not settle in time."""
    run = longest_run(plan)
    for before in TRIES if run else ():
        assert run is not None
        left_out = run.count - before - run.reach - AFTER
        if left_out < 1:
            return None
        cut = run.begin + before * run.length
        found = _expanded(plan, play(without(plan, cut, left_out * run.length)), run, cut, left_out)
        if found:
            return found
    return None


def _expanded(plan: Plan, short: Timeline, run: Run, cut: int, left_out: int) -> Timeline | None:
    """The whole timeline, where the short one repeats itself around the cut; else None."""
    spans, n = short.spans, run.length
    blocks = [spans[i : i + n] for i in range(run.begin, cut + n * AFTER, n)]
    begins = [block[0].start_ns for block in blocks]
    begin = spans[cut].start_ns
    period = begin - begins[-AFTER - 1]
    if period <= 0:
        return None
    lasts = max(s.end_ns for s in blocks[-AFTER - 1]) - begins[-AFTER - 1]
    # One more than have operations under way when the cut comes, and those behind the cut.
    window = ceil(lasts / period) + 2 + AFTER
    if window > len(blocks) or not _repeats(blocks[-window:], begins[-window:], short.samples, period):
        return None
    extra = left_out * period
    moved = [_later(s, plan.ops[s.op.index + left_out * n], extra) for s in spans[cut:]]
    between = [
        _later(s, plan.ops[s.op.index + k * n], k * period)
        for k in range(1, left_out + 1)
        for s in spans[cut - n : cut]
    ]
    samples = [s for s in short.samples if s[0] < begin]
    repeated = [s for s in samples if s[0] >= begin - period]
    for k in range(1, left_out + 1):
        samples += [(at + k * period, link, hbm) for at, link, hbm in repeated]
    samples += [(at + extra, link, hbm) for at, link, hbm in short.samples if at >= begin]
    return Timeline(
        plan=plan,
        machine=short.machine,
        spans=(*_named(spans[:cut], plan), *between, *moved),
        makespan_ns=short.makespan_ns + extra,
        link_bytes=sum(op.work.h2d_bytes for op in plan.ops),
        samples=tuple(samples),
    )


def _repeats(blocks: Sequence[Sequence[Span]], begins: Sequence[int], samples: Sequence[Sample], period: int) -> bool:
    """Whether blocks, and the rates while each is the newest, are the same counted from their beginnings."""
    if any(b - a != period for a, b in pairwise(begins)):
        return False
    first = _relative(blocks[0], begins[0])
    if any(_relative(block, begin) != first for block, begin in zip(blocks[1:], begins[1:], strict=True)):
        return False
    rates = [
        [(at - begin, link, hbm) for at, link, hbm in samples if begin <= at < begin + period] for begin in begins[:-1]
    ]
    return all(window == rates[0] for window in rates[1:])


def _relative(block: Sequence[Span], begin: int) -> list[tuple[int, int]]:
    return [(s.start_ns - begin, s.end_ns - begin) for s in block]


def _later(span: Span, op: Op, ns: int) -> Span:
    return Span(op, span.start_ns + ns, span.end_ns + ns)


def _named(spans: Sequence[Span], plan: Plan) -> list[Span]:
    """Spans of the short plan as those of the whole one's operations."""
    return [Span(plan.ops[s.op.index], s.start_ns, s.end_ns) for s in spans]
