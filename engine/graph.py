"""Capturing work in a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Replayable(Protocol):
    """Work that is issued as a whole, again and again: a CUDA graph, or several with work of the host between."""

    def replay(self) -> None:
        """Issue it on the current stream."""
        ...


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside, after one at the start; nested, nothing more.

    An earlier graph collected during a capture would be destroyed in it, which CUDA answers by ending the capture.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def captured(body: Callable[[], None], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """``body`` as a CUDA graph; it must have run once before, so that its kernels are compiled.

    ``stream``: where it is captured, which gives the graph's kernels their priority; one of torch's own if not given.
    """
    with uncollected():
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            body()
    return graph
