"""A measured step: kernel records of one replay, kept in a file, and the timeline that they come to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from sparda.calibrate.launched import FIRST
from sparda.calibrate.matching import kernels_of
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, read_json, to_plain, write_text
from sparda.engine.plan import HOST, Plan
from sparda.engine.policies import make_plan
from sparda.engine.shapes import SparseSpec, model_named
from sparda.sim.timeline import Span, Timeline
from sparda.sim.usage import average_samples

SCHEMA = 1


class KernelEvent(NamedTuple):
    """One kernel as a profiler saw it: its name and when its first thread block began and its last one ended."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One replay of a captured step.

    ``machine`` is the GPU's name, ``method`` how the kernels were recorded, ``session`` the key into the store's
    provenance. ``samples_us``: microseconds of other replays of the same step that no profiler looked at.
    """

    model: str
    machine: str
    workload: Workload
    config: Config
    method: str
    session: str
    samples_us: tuple[float, ...]
    events: tuple[KernelEvent, ...]

    @property
    def step_us(self) -> float:
        """Median of the replays without a profiler, microseconds."""
        return median(self.samples_us)

    @property
    def plan(self) -> Plan:
        return make_plan(model_named(self.model), SparseSpec(), self.workload, self.config)

    def timeline(self) -> Timeline:
        """Raises SpardaError where the kernels are not those of the plan."""
        return timeline_from_events(self.plan, self.events, self.machine)


def timeline_from_events(plan: Plan, events: Sequence[tuple[str, int, int]], machine_name: str) -> Timeline:
    """The timeline of one replay's kernels, each (name, start_ns, end_ns), in any order.

    Zero is where the first kernel starts; the last end is the makespan, so what a replay takes before its first and
    after its last kernel is not in it. Kernels may be launched before their predecessor on a stream has ended, to wait
    inside: an operation starts here when its first kernel has started and all that it waits for has ended. Bytes are
    spread evenly over an operation's time. Raises SpardaError where the kernels are not those of the plan.
    """
    if HOST in plan.streams:
        raise SpardaError(
            f"policy {plan.config.policy!r} has work of the host in the middle of its step, which is no one replay; "
            "give a step of another policy."
        )
    known = kernels_of(plan, events)
    zero = min((start for kernels in known for _, start, _ in kernels), default=0)
    spans: list[Span] = []
    before: dict[str, Span] = {}
    for op, kernels in zip(plan, known, strict=True):
        waits = [spans[i] for i in op.after] + ([before[op.stream]] if op.stream in before else [])
        ready = max((s.end_ns for s in waits), default=0)
        start, end = min(k[1] for k in kernels) - zero, max(k[2] for k in kernels) - zero
        if end < ready:
            late = max(waits, key=lambda s: s.end_ns)
            raise SpardaError(
                f"operation {op.name} ended at {end} ns but {late.name}, which it waits for, at {late.end_ns} ns; the "
                "kernels are not those of one replay of this plan: record them again."
            )
        before[op.stream] = Span(op, max(start, ready), end)
        spans.append(before[op.stream])
    return Timeline(
        plan=plan,
        machine=machine_name,
        spans=tuple(spans),
        makespan_ns=max((s.end_ns for s in spans), default=0),
        link_bytes=sum(op.work.h2d_bytes for op in plan),
        samples=average_samples(spans),
    )


def median_replay(events: Sequence[tuple[str, int, int]]) -> tuple[KernelEvent, ...]:
    """Of several replays, one after the other, the events of the one of median length, from zero on.

    Raises SpardaError where no replay begins.
    """
    replays: list[list[KernelEvent]] = []
    for event in sorted((KernelEvent(*e) for e in events), key=lambda e: (e.start_ns, e.end_ns)):
        if event.name.startswith(FIRST):
            replays.append([])
        if replays:
            replays[-1].append(event)
    if not replays:
        raise SpardaError(
            f"none of {len(events)} kernel records is of {FIRST}, with which a step begins; record at least one whole "
            "replay."
        )
    lengths = [max(e.end_ns for e in replay) - replay[0].start_ns for replay in replays]
    chosen = replays[sorted(range(len(replays)), key=lengths.__getitem__)[(len(replays) - 1) // 2]]
    return tuple(KernelEvent(e.name, e.start_ns - chosen[0].start_ns, e.end_ns - chosen[0].start_ns) for e in chosen)


@dataclass(frozen=True, slots=True)
class _File:
    """A measured step as its file holds it: each event is (index into ``kernels``, start_ns, end_ns)."""

    schema: int
    model: str
    machine: str
    workload: Workload
    config: Config
    method: str
    session: str
    samples_us: tuple[float, ...]
    kernels: tuple[str, ...]
    events: tuple[tuple[int, int, int], ...]


def save_step(path: Path, step: MeasuredStep) -> None:
    """Write ``step`` as JSON, whole or not at all; the folder must be there."""
    names = {name: number for number, name in enumerate(dict.fromkeys(e.name for e in step.events))}
    head: Mapping[str, object] = {k: v for k, v in to_plain(step).items() if k != "events"}
    events = [[names[e.name], e.start_ns, e.end_ns] for e in step.events]
    write_text(path, json.dumps({"schema": SCHEMA, **head, "kernels": [*names], "events": events}) + "\n")


def load_step(path: Path) -> MeasuredStep:
    """The step in a file of ``save_step``. Raises SpardaError where it is missing, damaged or of another version."""
    data = read_json(path)
    if data.get("schema") != SCHEMA:
        raise SpardaError(
            f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA}; measure the step again."
        )
    file = read(_File, data, where=str(path))
    wrong = [e for e in file.events if not (0 <= e[0] < len(file.kernels) and e[1] <= e[2])]
    if wrong or not file.samples_us:
        what = f"event {list(wrong[0])} names no kernel or ends before it starts" if wrong else "samples_us is empty"
        raise SpardaError(f"{path}: {what}; the file is damaged, restore it or measure the step again.")
    events = tuple(KernelEvent(file.kernels[index], start, end) for index, start, end in file.events)
    return MeasuredStep(
        file.model, file.machine, file.workload, file.config, file.method, file.session, file.samples_us, events
    )
