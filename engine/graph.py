"""Capturing work in a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import torch


class Replayable(Protocol):
    """Work that is issued as a whole, again and again: a CUDA graph, or several with work of the host between."""

    def replay(self) -> None:
        """Issue it on the current stream."""
        ...


def captured(body: Callable[[], None], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """``body`` as a CUDA graph; it must have run once before, so that its kernels are compiled.

    ``stream``: where it is captured, which gives the graph's kernels their priority; one of torch's own if not given.
    Garbage collection is off meanwhile: an earlier graph collected during the capture would be destroyed in it, which
    CUDA answers by ending the capture.
    """
    gc.collect()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream):
            body()
    finally:
        gc.enable()
    return graph
