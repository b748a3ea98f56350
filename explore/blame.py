"""What a step's time goes to: every nanosecond has one cause, and the causes add up to the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sparda.engine.plan import MAIN
from sparda.sim.timeline import Span, Timeline

LAUNCH, JOIN = "step overhead", "stream joins"


class Blame(NamedTuple):
    """Nanoseconds of the step and their cause: an operation's kind, LAUNCH or JOIN.

    ``span`` is the main stream's own operation; None where the main stream stands still.
    """

    cause: str
    ns: int
    span: Span | None


def causes(timeline: Timeline) -> Iterator[Blame]:
    """The causes of a step's time; they add up to the whole step.

    On the main stream that is all its time. A side stream is to blame while main stands still for it: for the
    operation waited for as far as it ran in the gap, for what that one waited for before.
    """
    before: dict[str, int] = {}
    previous: list[int | None] = []
    for span in timeline.spans:
        previous.append(before.get(span.stream))
        before[span.stream] = span.op.index
    idle_from = 0
    for span in timeline.spans:
        if span.stream != MAIN:
            continue
        yield Blame(span.kind, span.ns, span)
        until, waits = span.start_ns, list(span.op.after)
        while until > idle_from and waits:
            cause = timeline.spans[max(waits, key=lambda i: timeline.spans[i].end_ns)]
            ended = max(cause.end_ns, idle_from)
            yield Blame(JOIN, max(0, until - ended), None)
            until = min(ended, until)
            began = max(cause.start_ns, idle_from)
            yield Blame(cause.kind, max(0, until - began), None)
            until = min(until, began)
            own = previous[cause.op.index]
            waits = [*cause.op.after, *([] if own is None else [own])]
        yield Blame(JOIN, max(0, until - idle_from), None)
        idle_from = span.end_ns
    yield Blame(LAUNCH, max(0, timeline.makespan_ns - idle_from), None)


def exposed_ns(timeline: Timeline) -> dict[str, int]:
    """Nanoseconds of the step that each cause is to blame for; causes of none are left out."""
    blame: dict[str, int] = {}
    for cause, ns, _ in causes(timeline):
        if ns:
            blame[cause] = blame.get(cause, 0) + ns
    return blame
