"""What the operations of a timeline use of the machine over time, as averages over each operation's own time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from sparda.engine.plan import Op
from sparda.sim.timeline import Sample, Span

Running = tuple[int, int, tuple[Span, ...]]
"""(from this nanosecond, to this one, what runs in between)."""


def running(spans: Iterable[Span]) -> Iterator[Running]:
    """The time between the first start and the last end, cut wherever an operation starts or ends, in order.

    An operation of no duration never runs. Stretches in which nothing runs are among the result.
    """
    ordered = sorted((s for s in spans if s.ns > 0), key=lambda s: (s.start_ns, s.op.index))
    cuts = sorted({at for s in ordered for at in (s.start_ns, s.end_ns)})
    active: list[Span] = []
    following = iter(ordered)
    span = next(following, None)
    for begin, end in pairwise(cuts):
        active = [s for s in active if s.end_ns > begin]
        while span is not None and span.start_ns <= begin:
            active.append(span)
            span = next(following, None)
        yield begin, end, tuple(active)


def rates(spans: Iterable[Span], moved: Callable[[Op], int]) -> list[tuple[int, float]]:
    """(from this nanosecond on, GB/s): the bytes that ``moved`` gives for an operation, spread evenly over its time.

    The last entry is zero. Empty where nothing moves.
    """
    used = [s for s in spans if moved(s.op)]
    found = [(begin, sum(moved(s.op) / s.ns for s in active)) for begin, _, active in running(used)]
    return [*found, (max(s.end_ns for s in used), 0.0)] if found else []


def average_samples(spans: Sequence[Span]) -> tuple[Sample, ...]:
    """Samples of a timeline that knows when operations ran but not how fast at each instant, from averages."""
    used = [s for s in spans if s.op.work.h2d_bytes or s.op.work.hbm_bytes]
    found = [
        (
            begin,
            sum(s.op.work.h2d_bytes / s.ns for s in active),
            sum(s.op.work.hbm_bytes / s.ns for s in active),
        )
        for begin, _, active in running(used)
    ]
    return (*found, (max(s.end_ns for s in used), 0.0, 0.0)) if found else ()
