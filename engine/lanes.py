"""Issuing a plan: the same order, streams and waits whatever carries them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from sparda.engine.plan import HOST, MAIN, Op, Plan
from sparda.kernels.launch import apart

Binding = Callable[[Op], None]


class Lanes(Protocol):
    """Somewhere to issue operations: real streams, one thread, or a recorder."""

    def on(self, stream: str) -> AbstractContextManager[None]:
        """Issue what follows on ``stream``."""
        ...

    def wait(self, stream: str, op: int) -> None:
        """Let ``stream`` go on only when operation ``op`` is done."""
        ...

    def done(self, stream: str, op: int) -> None:
        """Mark the point on ``stream`` at which operation ``op`` is done; called only where another waits for it."""
        ...


def forked(plan: Plan) -> frozenset[int]:
    """Operations to launch apart: the two that follow a fork on their stream.

    Launched ahead, their thread blocks would fill the GPU before the other stream's kernels, which wait for the same
    event, could get a place: the choice, and the copy after it, would start a whole attention later.
    """
    awaited = {index for op in plan for index in op.after}
    before: dict[str, tuple[int, ...]] = {}
    found = set()
    for op in plan:
        last = before.get(op.stream, ())
        if awaited.intersection(last):
            found.add(op.index)
        before[op.stream] = (*last[-1:], op.index)
    return frozenset(found)


def launch(op: Op, bindings: Mapping[str, Binding], alone: frozenset[int]) -> None:
    """Carry out an operation on the current stream, apart from what precedes it if ``alone`` (``forked``) has it."""
    with apart() if op.index in alone else nullcontext():
        bindings[op.kind](op)


def issue(plan: Plan, bindings: Mapping[str, Binding], lanes: Lanes) -> None:
    """Issue every operation of the plan, in order, on its stream, after its waits."""
    awaited = {index for op in plan for index in op.after}
    alone = forked(plan)
    for op in plan:
        for index in op.after:
            lanes.wait(op.stream, index)
        with lanes.on(op.stream):
            launch(op, bindings, alone)
        if op.index in awaited:
            lanes.done(op.stream, op.index)


class SerialLanes:
    """One stream: plan order satisfies every wait, since waits point backwards; the host waits for all of it."""

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        yield

    def wait(self, stream: str, op: int) -> None:
        if stream == HOST and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def done(self, stream: str, op: int) -> None: ...


class CudaLanes:
    """CUDA streams joined by events; made inside a graph capture, whose stream becomes ``main``.

    Side streams have the higher priority: their few CTAs must get a place on the chip when the main stream's next
    kernel would fill it, or a prefetch would start a whole kernel late.
    """

    def __init__(self) -> None:
        self._streams: dict[str, torch.cuda.Stream] = {MAIN: torch.cuda.current_stream()}
        self._events: dict[int, torch.cuda.Event] = {}

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(priority=-1)
        return self._streams[name]

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        with torch.cuda.stream(self._stream(stream)):
            yield

    def wait(self, stream: str, op: int) -> None:
        self._stream(stream).wait_event(self._events[op])

    def done(self, stream: str, op: int) -> None:
        if op not in self._events:
            self._events[op] = torch.cuda.Event()
        self._events[op].record(self._stream(stream))
