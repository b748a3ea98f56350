"""Playing a plan at durations that are given: what a measured step's own kernel times must reproduce."""

from __future__ import annotations

from collections.abc import Sequence

from sparda.engine.errors import SpardaError
from sparda.engine.plan import Plan
from sparda.sim.timeline import Span, Timeline
from sparda.sim.usage import average_samples


def replay(
    plan: Plan,
    durations_ns: Sequence[int],
    latencies_ns: Sequence[int] | None = None,
    *,
    outside_ns: int = 0,
    machine: str = "replayed",
) -> Timeline:
    """The plan with operation i taking ``durations_ns[i]``, whatever runs beside it.

    An operation starts ``latencies_ns[i]`` (0 if not given) after its stream's last one and all that it waits for have
    ended. ``outside_ns`` is what the step pays after its last operation. Raises SpardaError where the numbers are not
    one for each operation, or one is below 0.
    """
    latencies = [0] * len(plan.ops) if latencies_ns is None else latencies_ns
    for name, given in (("durations_ns", durations_ns), ("latencies_ns", latencies)):
        if len(given) != len(plan.ops) or min(given, default=0) < 0:
            raise SpardaError(
                f"{name} has {len(given)} numbers, the least of them {min(given, default=0)}; give one of 0 or more "
                f"for each of the plan's {len(plan.ops)} operations."
            )
    free: dict[str, int] = {}
    spans: list[Span] = []
    # Waits point backwards, so in the order of the plan all that an operation waits for has its end.
    for op, duration, latency in zip(plan.ops, durations_ns, latencies, strict=True):
        start = latency + max([free.get(op.stream, 0), *(spans[i].end_ns for i in op.after)])
        spans.append(Span(op, start, start + duration))
        free[op.stream] = start + duration
    return Timeline(
        plan=plan,
        machine=machine,
        spans=tuple(spans),
        makespan_ns=max((s.end_ns for s in spans), default=0) + outside_ns,
        link_bytes=sum(op.work.h2d_bytes for op in plan.ops),
        samples=average_samples(spans),
    )


def own_times(timeline: Timeline) -> tuple[list[int], list[int]]:
    """(durations, latencies) of a timeline's operations in nanoseconds, such that ``replay`` gives its spans again."""
    free: dict[str, int] = {}
    latencies = []
    for span in timeline.spans:
        ready = max([timeline.spans[i].end_ns for i in span.op.after], default=0)
        latencies.append(span.start_ns - max(ready, free.get(span.stream, 0)))
        free[span.stream] = span.end_ns
    return [span.ns for span in timeline.spans], latencies
