"""Timelines as a file for ui.perfetto.dev or chrome://tracing (the Trace Event Format, JSON object form).

A process for each timeline. In it a track for each stream, one for each resource that says what uses it, counters, and
an arrow from each copy to the attention that needs it. Times in microseconds from the start of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from sparda.engine.plan import COPY, HOST, Op, Plan
from sparda.sim.timeline import JSON, Span, Timeline
from sparda.sim.usage import rates, running

ATTENTION = ("attention", "biased_attention", "dense_attention")
FLOWS = 1 << 20
"""Arrows that a process may have: ids must differ between all processes of a file."""

Resource = tuple[str, Callable[[Op], int]]
"""Name of a resource's track, and what of it an operation uses: 0 where it does not use it."""

GPU: tuple[Resource, ...] = (
    ("SMs: CTAs held by copies", lambda op: op.work.ctas),
    ("SMs: what else runs", lambda op: int(op.stream not in (COPY, HOST) and not op.work.ctas)),
    ("HBM", lambda op: op.work.hbm_bytes),
    ("link host to device", lambda op: op.work.h2d_bytes),
    ("link device to host", lambda op: op.work.d2h_bytes),
)


def chrome_trace(timeline: Timeline, *, pid: int = 0, label: str = "simulated") -> JSON:
    """One timeline as a whole file; ``label`` names its process, which gets the number ``pid``."""
    return _file(_events(timeline, pid, label))


def joined(timelines: Sequence[tuple[str, Timeline]]) -> JSON:
    """Several timelines in one file, each (label, timeline) a process of its own, in the order given."""
    return _file([event for pid, (label, timeline) in enumerate(timelines) for event in _events(timeline, pid, label)])


def _file(events: list[JSON]) -> JSON:
    # Stable: of what happens at one time, an operation comes before the arrow that ends at it.
    return {"traceEvents": sorted(events, key=lambda e: e.get("ts", -1.0)), "displayTimeUnit": "ns"}


def _events(timeline: Timeline, pid: int, label: str) -> list[JSON]:
    plan, w = timeline.plan, timeline.plan.workload
    title = f"{label}: {plan.config.policy}, batch {w.batch}, {w.context_tokens} tokens, {timeline.machine}"
    resources = [r for r in _resources(plan) if any(r[1](op) for op in plan)]
    names = ["step", *(f"stream {name}" for name in plan.streams), *(name for name, _ in resources)]
    events = [_event("M", pid, 0, name="process_name", args={"name": title})]
    events.append(_event("M", pid, 0, name="process_sort_index", args={"sort_index": pid}))
    for tid, name in enumerate(names):
        events.append(_event("M", pid, tid, name="thread_name", args={"name": name}))
        events.append(_event("M", pid, tid, name="thread_sort_index", args={"sort_index": tid}))
    events.append(_slice(pid, 0, "step", "step", 0, timeline.makespan_ns, {"batch": w.batch}))
    tracks = {stream: tid for tid, stream in enumerate(plan.streams, 1)}
    for span in timeline.spans:
        work = {name: value for name, value in asdict(span.op.work).items() if value}
        events.append(_slice(pid, tracks[span.stream], span.name, span.kind, span.start_ns, span.end_ns, work))
    for tid, (name, use) in enumerate(resources, len(tracks) + 1):
        events += _usage(timeline, pid, tid, name, use)
    return [*events, *_arrows(timeline, pid, tracks), *_counters(timeline, pid)]


def _resources(plan: Plan) -> Iterator[Resource]:
    yield from GPU
    for stream, name in ((COPY, "copy engine"), (HOST, "host")):
        if stream in plan.streams:
            yield name, lambda op, stream=stream: int(op.stream == stream)  # type: ignore[misc]


def _usage(timeline: Timeline, pid: int, tid: int, name: str, use: Callable[[Op], int]) -> Iterator[JSON]:
    """Slices that say which operations use a resource; two that follow each other with the same users are one."""
    users: tuple[Span, ...] = ()
    begun = ended = 0
    # The empty stretch at the end lets out the last one.
    for begin, end, active in (*running(s for s in timeline.spans if use(s.op)), (0, 0, ())):
        if active != users:
            if users:
                args = {s.name: use(s.op) for s in users}
                yield _slice(pid, tid, " + ".join(args), name, begun, ended, args)
            begun, users = begin, active
        ended = end


def needed_by(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Of each copy to the GPU, by index: what must follow it up to the attention of its layer, which comes last.

    Between them stand the operations of other streams that hand on the wait: the spreading of what was uploaded.
    """
    attention = {op.layer: op for op in plan if op.kind in ATTENTION}
    copies = [op for op in plan if op.work.h2d_bytes and op.layer in attention]
    return {op.index: (*_between(plan, op, attention[op.layer]), attention[op.layer].index) for op in copies}


def _between(plan: Plan, copy: Op, last: Op) -> tuple[int, ...]:
    """Operations on the shortest way of waits from ``copy`` to ``last``; none where only their order joins them."""
    ways: list[tuple[int, ...]] = [()]
    while ways:
        longer: list[tuple[int, ...]] = []
        for way in ways:
            waits = plan.ops[way[0]].after if way else last.after
            if copy.index in waits:
                return way
            longer += [(index, *way) for index in waits if index > copy.index]
        ways = longer
    return ()


def _arrows(timeline: Timeline, pid: int, tracks: dict[str, int]) -> Iterator[JSON]:
    """A flow from inside the last nanosecond of a copy (a flow binds to the slice around it) to its attention."""
    for number, (index, chain) in enumerate(needed_by(timeline.plan).items()):
        spans = [timeline.spans[i] for i in (index, *chain)]
        flow = {"name": "blocks", "cat": "blocks", "id": pid * FLOWS + number}
        for place, span in enumerate(spans):
            phase = "s" if place == 0 else "f" if span is spans[-1] else "t"
            at = max(span.start_ns, span.end_ns - 1) if phase == "s" else span.start_ns
            yield _event(phase, pid, tracks[span.stream], ts=at / 1e3, **flow, **({"bp": "e"} if phase == "f" else {}))


def _counters(timeline: Timeline, pid: int) -> Iterator[JSON]:
    """GB/s on HBM and on the link in either direction, and the CTAs that copies hold; each ends at zero."""
    samples, spans = timeline.samples, timeline.spans
    yield from _counter(pid, "link host to device GB/s", [(s[0], s[1]) for s in samples])
    yield from _counter(pid, "link device to host GB/s", rates(spans, lambda op: op.work.d2h_bytes))
    yield from _counter(pid, "HBM GB/s", [(s[0], s[2]) for s in samples])
    held = [
        (begin, float(sum(s.op.work.ctas for s in active)))
        for begin, _, active in running(s for s in spans if s.op.work.ctas)
    ]
    last = max((s.end_ns for s in spans if s.op.work.ctas), default=0)
    yield from _counter(pid, "CTAs held by copies", [*held, (last, 0.0)])


def _counter(pid: int, name: str, values: Sequence[tuple[int, float]]) -> Iterator[JSON]:
    carried = None
    for at, value in values:
        if value != carried:
            yield _event("C", pid, 0, name=name, ts=at / 1e3, args={"value": round(value, 3)})
            carried = value


def _slice(pid: int, tid: int, name: str, category: str, start: int, end: int, args: JSON) -> JSON:
    return _event("X", pid, tid, name=name, cat=category, ts=start / 1e3, dur=(end - start) / 1e3, args=args)


def _event(phase: str, pid: int, tid: int, **fields: object) -> JSON:
    return {"ph": phase, "pid": pid, "tid": tid, **fields}
