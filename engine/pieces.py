"""A step with work of the host in its middle: CUDA graphs, and between them what the host does and starts.

The plan's actions are issued in its own order. What the host waits for it waits for as events; what the GPU waits for
has always been issued before, so no stream can run past an event that is yet to be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from sparda.engine.actions import CALLED, Action, cut
from sparda.engine.graph import Replayable, captured, uncollected
from sparda.engine.lanes import Binding, CudaLanes, Lanes
from sparda.engine.plan import HOST, MAIN, Plan


class StepLanes(Lanes, Protocol):
    """Lanes that carry step after step."""

    def begin(self) -> None:
        """Start a step: no stream of the GPU goes on before all that ``main`` has been given is done."""
        ...

    def captured(self, stream: str, body: Callable[[], None]) -> Replayable:
        """``body`` as something that can be issued on ``stream`` again and again; it is not run now."""
        ...


class HostLanes(CudaLanes):
    """CUDA streams and the host. The stream current when a step begins is ``main``; a graph has its stream's priority.

    Each operation's event is recorded anew in every step, after which alone it is waited for.
    """

    def __init__(self, streams: Iterable[str]) -> None:
        super().__init__()
        for name in streams:
            if name != HOST:
                self._stream(name)

    def begin(self) -> None:
        self._streams[MAIN] = main = torch.cuda.current_stream()
        for name, stream in self._streams.items():
            if name != MAIN:
                stream.wait_stream(main)

    def captured(self, stream: str, body: Callable[[], None]) -> Replayable:
        return captured(body, None if stream == MAIN else self._stream(stream))

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        if stream == HOST:
            yield
        else:
            with super().on(stream):
                yield

    def wait(self, stream: str, op: int) -> None:
        if stream == HOST:
            self._events[op].synchronize()
        else:
            super().wait(stream, op)


class Pieces:
    """A step as actions, ready to be replayed. Every operation must have run once, so that its kernel is compiled."""

    def __init__(self, plan: Plan, bindings: Mapping[str, Binding], lanes: StepLanes) -> None:
        self.actions = cut(plan)
        self._lanes = lanes
        # A collection takes as long as many captures, and a step is over a hundred.
        with uncollected():
            self._bodies = [self._body(action, bindings) for action in self.actions]

    def _body(self, action: Action, bindings: Mapping[str, Binding]) -> Callable[[], None]:
        def run() -> None:
            for op in action.ops:
                bindings[op.kind](op)

        return run if action.stream in CALLED else self._lanes.captured(action.stream, run).replay

    def replay(self) -> None:
        """One step. Returns when its last action is issued, which the host's own work delays."""
        lanes = self._lanes
        lanes.begin()
        for action, body in zip(self.actions, self._bodies, strict=True):
            for index in action.waits:
                lanes.wait(action.stream, index)
            with lanes.on(action.stream):
                body()
            if action.marked:
                lanes.done(action.stream, action.ops[-1].index)
