"""What a simulated step came to: when each operation ran, how long the step took, what the link carried."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from sparda.engine.plan import MAIN, Op, Plan

Sample = tuple[int, float, float]
"""(from this nanosecond on, GB/s on the host-to-device link, GB/s on HBM)."""

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """One operation's time, in nanoseconds from the start of the step. A join's latency comes before it."""

    op: Op
    start_ns: int
    end_ns: int

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def name(self) -> str:
        return self.op.name

    @property
    def kind(self) -> str:
        return self.op.kind

    @property
    def layer(self) -> int | None:
        return self.op.layer

    @property
    def stream(self) -> str:
        return self.op.stream


@dataclass(frozen=True, slots=True)
class KindTotal:
    """All operations of one kind in a step: how many, nanoseconds in total, least work in total."""

    count: int
    ns: int
    flops: int
    hbm_bytes: int
    h2d_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """One decode step on one machine. ``spans`` follow the order of the plan's operations.

    ``makespan_ns`` includes what a step pays outside its operations. ``link_bytes`` went from host to device.
    """

    plan: Plan
    machine: str
    spans: tuple[Span, ...]
    makespan_ns: int
    link_bytes: int
    samples: tuple[Sample, ...] = ()

    @property
    def step_us(self) -> float:
        """Microseconds of a step, as long as every sequence waits for its next token."""
        return self.makespan_ns / 1e3

    @property
    def tokens_per_s(self) -> float:
        """A step makes one token for each sequence of the batch."""
        return self.plan.workload.batch / self.makespan_ns * 1e9

    @property
    def busy_ns(self) -> dict[str, int]:
        """Nanoseconds in which each stream runs an operation."""
        busy = dict.fromkeys(self.plan.streams, 0)
        for span in self.spans:
            busy[span.op.stream] += span.ns
        return busy

    @property
    def link_busy_ns(self) -> int:
        """Nanoseconds in which bytes move over the link."""
        ends = [at for at, _, _ in self.samples[1:]]
        return sum(end - at for (at, link, _), end in zip(self.samples, ends, strict=False) if link > 0.0)

    @property
    def exposed_ns(self) -> int:
        """Nanoseconds in which the main stream runs nothing because it waits for another (joins included)."""
        exposed = idle_from = 0
        for span in self.spans:
            if span.op.stream == MAIN:
                exposed += span.start_ns - idle_from
                idle_from = span.end_ns
        return exposed

    def by_kind(self) -> dict[str, KindTotal]:
        """Totals by kind, in the order in which kinds first appear in the plan."""
        totals: dict[str, KindTotal] = {}
        for span in self.spans:
            t, work = totals.get(span.op.kind, KindTotal(0, 0, 0, 0, 0)), span.op.work
            totals[span.op.kind] = KindTotal(
                t.count + 1,
                t.ns + span.ns,
                t.flops + work.flops,
                t.hbm_bytes + work.hbm_bytes,
                t.h2d_bytes + work.h2d_bytes,
            )
        return totals

    def critical_path(self) -> list[Span]:
        """The chain that set the step's end, first to last: from the last end back, always what ended last."""
        before: dict[str, int] = {}
        previous: list[int | None] = []
        for span in self.spans:
            previous.append(before.get(span.op.stream))
            before[span.op.stream] = span.op.index
        at: int | None = max(before.values(), key=lambda i: self.spans[i].end_ns, default=None)
        path: list[Span] = []
        while at is not None:
            span = self.spans[at]
            path.append(span)
            own = previous[at]
            waits = span.op.after if own is None else (*span.op.after, own)
            at = max(waits, key=lambda i: self.spans[i].end_ns, default=None)
        return path[::-1]

    def to_dict(self) -> JSON:
        """Everything, as values that JSON has; times in the units of the names."""
        return {
            "machine": self.machine,
            "model": self.plan.shape.name,
            "workload": asdict(self.plan.workload),
            "config": asdict(self.plan.config),
            "makespan_ns": self.makespan_ns,
            "step_us": self.step_us,
            "tokens_per_s": self.tokens_per_s,
            "link_bytes": self.link_bytes,
            "link_busy_ns": self.link_busy_ns,
            "exposed_ns": self.exposed_ns,
            "busy_ns": self.busy_ns,
            "by_kind": {kind: asdict(total) for kind, total in self.by_kind().items()},
            "spans": [
                {"name": s.name, "kind": s.kind, "layer": s.layer, "stream": s.stream, "ns": [s.start_ns, s.end_ns]}
                for s in self.spans
            ],
            "samples": [list(sample) for sample in self.samples],
        }

    def to_json(self) -> str:
        """``to_dict`` as one line; the same plan and costs give the same bytes."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
