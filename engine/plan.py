"""A decode step, described once: the operations, their streams, their work and what each waits for.

Two players read a plan. The engine's executor binds each kind to a kernel and captures the step in one CUDA
graph, or in several where the host has work of its own in the middle of it; the simulator binds each kind to a
cost. Operations of one stream run in the order of the plan; ``after`` names, by index, the operations of other
streams that must have finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sparda.engine.config import Config, Workload
from sparda.engine.shapes import ModelShape, SparseSpec

MAIN = "main"
SELECT = "select"
PREFETCH = "prefetch"
COPY = "copy"
"""Transfers by the GPU's copy engines, started by the host at every step because it alone knows their sizes."""
HOST = "host"
"""What the host itself does, one operation after the other. It can be in no graph."""
STREAMS = (MAIN, SELECT, PREFETCH, COPY, HOST)


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation must do at the least: each input read once, each output written once."""

    flops: int = 0
    hbm_bytes: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    ctas: int = 0
    """CTAs held for the whole of the operation, where that is fixed (a persistent kernel); 0 elsewhere."""
    host_bytes: int = 0
    """Bytes that the host's cores read and write."""
    copies: int = 0
    """Copies that the host starts, one by one or in one call, where their number is what costs time."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. ``layer`` is None for what a step does once. ``after`` holds indices into the plan."""

    index: int
    kind: str
    layer: int | None
    stream: str
    after: tuple[int, ...]
    work: Work

    @property
    def name(self) -> str:
        return self.kind if self.layer is None else f"{self.kind}[{self.layer}]"


@dataclass(frozen=True, slots=True)
class Plan:
    """A step of ``config`` on ``workload``: immutable, the same for both players."""

    shape: ModelShape
    spec: SparseSpec
    workload: Workload
    config: Config
    ops: tuple[Op, ...]
    streams: tuple[str, ...] = field(init=False)
    """Streams in use, in the order of STREAMS."""
    beside_choice: frozenset[int] = field(init=False)
    """Operations of the main stream that join another while a choice, issued since the last such, may run beside."""

    def __post_init__(self) -> None:
        used = {op.stream for op in self.ops}
        object.__setattr__(self, "streams", tuple(s for s in STREAMS if s in used))
        chosen, found = False, set()
        for op in self.ops:
            if op.stream == SELECT:
                chosen = True
            elif op.stream == MAIN and op.after and chosen:
                found.add(op.index)
                chosen = False
        object.__setattr__(self, "beside_choice", frozenset(found))

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def of_kind(self, kind: str) -> list[Op]:
        return [op for op in self.ops if op.kind == kind]


class PlanBuilder:
    """Collects operations in issue order and hands out their indices."""

    def __init__(self) -> None:
        self._ops: list[Op] = []

    def add(
        self, kind: str, work: Work, *, layer: int | None = None, stream: str = MAIN, after: Sequence[int] = ()
    ) -> int:
        """Append an operation; returns its index. Waits within one stream are dropped: order gives them."""
        index = len(self._ops)
        waits = tuple(sorted({a for a in after if self._ops[a].stream != stream})) if after else ()
        self._ops.append(Op(index, kind, layer, stream, waits, work))
        return index

    def plan(self, shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config) -> Plan:
        return Plan(shape, spec, workload, config, tuple(self._ops))
