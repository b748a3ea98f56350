"""CUDA that is not: streams with clocks of their own, and graphs that know how long they take.

What CUDA refuses is refused: work of a stream that no wait brought into a capture, and a capture that ends before all
its streams have come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

GRAPH_US = 5.0
"""A graph's own time, on the GPU."""

CYCLES_PER_US = 2000.0


class Stream:
    """Work in order. ``seen``: how much of a capture's other streams is done before what comes next here."""

    def __init__(self, gpu: FakeCuda) -> None:
        self.gpu, self.now_us, self.done = gpu, 0.0, 0
        self.seen: dict[Stream, int] = {}

    def work(self, us: float) -> None:
        assert not self.gpu.capturing or self in self.gpu.capturing, "work outside the graph that is being captured"
        self.now_us += us
        self.done += 1
        if not self.gpu.capturing:
            self.gpu.latest_us = max(self.gpu.latest_us, self.now_us)

    def wait_event(self, event: Event) -> None:
        assert event.stream is not None, "an event that was never recorded"
        if event.stream in self.gpu.capturing:
            self.gpu.capturing.add(self)
        self.now_us = max(self.now_us, event.at_us)
        for stream, done in event.seen.items():
            self.seen[stream] = max(done, self.seen.get(stream, 0))

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.gpu)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.gpu.waits += 1


class Event:
    """A place in a stream."""

    def __init__(self, gpu: FakeCuda) -> None:
        self.gpu, self.at_us = gpu, 0.0
        self.stream: Stream | None = None
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.gpu.current
        self.at_us = self.stream.now_us
        if self.stream in self.gpu.capturing:
            self.seen = {**self.stream.seen, self.stream: self.stream.done}

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        """Whether it is past by the time that the current stream has come to."""
        return self.at_us <= self.gpu.current.now_us

    def elapsed_time(self, end: Event) -> float:
        return (end.at_us - self.at_us) / 1e3


@dataclass(slots=True)
class Graph:
    gpu: FakeCuda
    us: float = 0.0

    def replay(self) -> None:
        self.gpu.replayed.append(self)
        self.gpu.current.work(GRAPH_US + self.us)


class Profiler:
    """A profiler in torch's place that sees every replay as one kernel, that of a step's first operation."""

    def __init__(self, gpu: FakeCuda) -> None:
        self.gpu, self.begun = gpu, 0

    def __call__(self, *, activities: list[object]) -> Profiler:
        return self

    def __enter__(self) -> Profiler:
        self.begun = len(self.gpu.replayed)
        return self

    def __exit__(self, *_: object) -> None: ...

    def events(self) -> Iterator[SimpleNamespace]:
        now_us = 0.0
        for graph in self.gpu.replayed[self.begun :]:
            time = SimpleNamespace(start=now_us, end=now_us + graph.us)
            yield SimpleNamespace(
                name="_embed_kernel_whole_step", time_range=time, device_type=SimpleNamespace(name="CUDA")
            )
            now_us += 2 * graph.us


@dataclass(eq=False)
class FakeCuda:
    """Streams, events and graphs in torch's place."""

    replayed: list[Graph] = field(default_factory=list)
    capturing: set[Stream] = field(default_factory=set)
    emptied: int = 0
    waits: int = 0
    """How often the host waited for a stream."""
    latest_us: float = 0.0

    def __post_init__(self) -> None:
        self.current = self.stream()

    def stream(self, priority: int = 0) -> Stream:
        return Stream(self)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def captured(self, made: Graph, stream: Stream | None = None) -> Iterator[None]:
        main = stream or self.current
        start_us = main.now_us
        self.capturing = {main}
        with self.on(main):
            yield
        behind = [s for s in self.capturing if s is not main and main.seen.get(s, 0) < s.done]
        assert not behind, "the capture ended before all its streams had come back"
        main.seen.clear()
        made.us, main.now_us, self.capturing = main.now_us - start_us, start_us, set()

    def synchronize(self) -> None:
        self.current.now_us = self.latest_us

    def empty_cache(self) -> None:
        self.emptied += 1

    def sleep(self, cycles: int) -> None:
        self.current.work(cycles / CYCLES_PER_US)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        properties = SimpleNamespace(name="NVIDIA None", multi_processor_count=132, total_memory=141 << 30)
        fakes: dict[str, Callable[..., object]] = {
            "is_available": lambda: True,
            "get_device_properties": lambda device: properties,
            "synchronize": self.synchronize,
            "empty_cache": self.empty_cache,
            "current_stream": lambda: self.current,
            "Stream": self.stream,
            "stream": self.on,
            "Event": lambda enable_timing=False: Event(self),
            "CUDAGraph": lambda: Graph(self),
            "graph": self.captured,
            "_sleep": self.sleep,
        }
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)
