"""Launching a kernel while the one before it still runs: Hopper's programmatic dependent launch.

Inside a stream, and inside the graph captured from it, a kernel launched so may start when every thread block of its
predecessor has called ``gdc_launch_dependents`` or ended. It then reads what no kernel writes (weights), and calls
``gdc_wait`` before it touches anything else: the wait ends when the predecessor has ended and its writes can be seen.
All kernels of a step call both, the wait first, so at most one kernel is ahead of the one that works.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

CPU_MULTIPROCESSORS = 4
"""What kernels are split for where they are interpreted."""


@functools.cache
def _supported(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


_apart: ContextVar[bool] = ContextVar("apart", default=False)


@contextmanager
def apart() -> Iterator[None]:
    """Kernels launched inside start only when the one before them has ended."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


def dependent(tensor: torch.Tensor) -> dict[str, bool]:
    """Launch options of a kernel that takes ``PDL`` and works on ``tensor``'s device: overlapped where it can be."""
    if _apart.get() or not tensor.is_cuda or not _supported(tensor.device.index or 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


_assumed: ContextVar[int] = ContextVar("assumed", default=0)


@contextmanager
def with_multiprocessors(count: int) -> Iterator[None]:
    """Whatever is cut to fit a GPU inside is cut as for one with ``count`` multiprocessors.

    A decoder must be built and captured inside. Raises ValueError for a count below 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    token = _assumed.set(count)
    try:
        yield
    finally:
        _assumed.reset(token)


def multiprocessors(tensor: torch.Tensor) -> int:
    """Multiprocessors to cut work for: those of the tensor's device, unless ``with_multiprocessors`` says otherwise."""
    return _assumed.get() or multiprocessors_there(tensor)


def multiprocessors_there(tensor: torch.Tensor) -> int:
    """Multiprocessors of the tensor's device; a nominal few where kernels are interpreted."""
    return _multiprocessors(tensor.device.index or 0) if tensor.is_cuda else CPU_MULTIPROCESSORS


RESERVED_BYTES = 1024
"""Shared memory of a multiprocessor that every thread block on it takes for the system."""


@functools.cache
def _shared_bytes(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).shared_memory_per_multiprocessor) - RESERVED_BYTES


def shared_bytes(tensor: torch.Tensor) -> int:
    """Shared memory that one thread block may take on the tensor's CUDA device, in bytes."""
    return _shared_bytes(tensor.device.index or 0)
