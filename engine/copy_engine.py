"""Copies of single blocks from host memory into slots, listed and started by the host."""

from __future__ import annotations

import torch
from torch import Tensor

from sparda.engine.cuda_runtime import HOST_TO_DEVICE, CudaRuntime


class BlockCopies:
    """A list of at most ``most`` copies from ``pool`` [rows, V], which is filled and then started, again and again.

    Without a ``runtime`` there is no GPU: the same copies are made between plain tensors.

    The list may be filled anew as soon as its copies are started: a call takes with it what it needs. Whoever starts
    them has made sure that the pool's blocks are written and that nobody uses the slots any more: they may be read and
    written before the stream comes to them.
    """

    def __init__(self, pool: Tensor, most: int, runtime: CudaRuntime | None = None) -> None:
        self._pool, self._runtime = pool, runtime
        self._rows, self._count = pool, 0
        self._bytes = int(pool.shape[1]) * pool.element_size()
        self._sources, self._targets = (torch.zeros(most, dtype=torch.int64) for _ in range(2))
        self._sizes = torch.full((most,), self._bytes)
        self._side: torch.cuda.Stream | None = None

    def enlist(self, src: Tensor, dst: Tensor, count: int, rows: Tensor) -> None:
        """List ``rows[dst[i]] = pool[src[i]]`` for ``i < count``. src, dst: int32 in host memory; rows: [slots, V]."""
        self._rows, self._count = rows, count
        for listed, index, base in ((self._sources, src, self._pool), (self._targets, dst, rows)):
            listed = listed[:count].copy_(index[:count])
            if self._runtime is not None:
                listed.mul_(self._bytes).add_(base.data_ptr())

    def one_by_one(self) -> None:
        """Start every copy by itself, on the current stream."""
        sources, targets = self._sources[: self._count].tolist(), self._targets[: self._count].tolist()
        if self._runtime is None:
            for source, target in zip(sources, targets, strict=True):
                self._rows[target].copy_(self._pool[source])
            return
        copy, size, stream = self._runtime.copy, self._bytes, torch.cuda.current_stream().cuda_stream
        for source, target in zip(sources, targets, strict=True):
            if error := copy(target, source, size, HOST_TO_DEVICE, stream):
                self._runtime.check(error)

    def at_once(self) -> None:
        """Start all copies in one call, on the current stream."""
        if not self._count:
            return
        if self._runtime is None:
            self._rows[self._targets[: self._count]] = self._pool[self._sources[: self._count]]
            return
        current = torch.cuda.current_stream()
        if current.cuda_stream:
            self._start(self._runtime, current)
            return
        # The call refuses the default stream, which a step is issued on when it is not in pieces.
        self._side = side = self._side or torch.cuda.Stream()
        side.wait_stream(current)
        self._start(self._runtime, side)
        current.wait_stream(side)

    def _start(self, runtime: CudaRuntime, stream: torch.cuda.Stream) -> None:
        targets, sources, sizes = (x.data_ptr() for x in (self._targets, self._sources, self._sizes))
        runtime.copy_batch(targets, sources, sizes, self._count, stream.cuda_stream)
