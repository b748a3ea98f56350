"""The one way anything is timed: captured in a CUDA graph, replayed, CUDA events around every replay."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparda.engine.graph import Replayable, captured

METHOD = "CUDA graph, events around each replay"
WARMUP = 3


def warm_and_captured(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """``body`` as a CUDA graph. It runs once outside first, which compiles its kernels."""
    body()
    return captured(body)


def replay_us(graph: Replayable, repeats: int, *, per: int = 1, warmup: int = WARMUP) -> tuple[float, ...]:
    """Microseconds of each of ``repeats`` replays, divided by ``per`` (operations in the graph).

    Waits for the last of them, and not for the whole GPU: what runs beside them may be there to stay. A step in pieces
    is timed as it is: the GPU's clock goes on while the host works.
    """
    for _ in range(warmup):
        graph.replay()
    pairs = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        pairs.append((start, end))
    pairs[-1][1].synchronize()
    return tuple(s.elapsed_time(e) * 1e3 / per for s, e in pairs)


def warm_clocks(seconds: float = 1.0) -> None:
    """Keep the GPU busy so that measuring starts at the clocks that work runs at, not at idle clocks."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    start, now = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    while True:
        for _ in range(8):
            a @ a
        now.record()
        now.synchronize()
        if start.elapsed_time(now) >= seconds * 1e3:
            return
