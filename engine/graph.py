"""Capturing work in a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def captured(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """``body`` as a CUDA graph; it must have run once before, so that its kernels are compiled.

    Garbage collection is off meanwhile: an earlier graph collected during the capture would be destroyed in it, which
    CUDA answers by ending the capture.
    """
    gc.collect()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            body()
    finally:
        gc.enable()
    return graph
