"""The copies that measurements run: miss lists as a step has them, and the shapes of the kernel beside compute."""

from __future__ import annotations

import torch
from torch import Tensor

from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.store import Value
from sparda.kernels.prefetch import prefetch

Shape = tuple[int, int, int]
"""(warps, stages, chunk values) of a prefetch."""

DEFAULT: Shape = (1, 8, 8192)
OTHERS: tuple[Shape, ...] = ((1, 4, 8192), (1, 12, 8192), (8, 1, 8192))
CTAS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
FEWER_CTAS = (2, 3, 4, 8, 16, 32)

GB_S_PER_CTA = {(1, 8): 22.0, (1, 4): 12.0, (1, 12): 24.0, (8, 1): 6.0}
"""What a CTA moves beside compute by (warps, stages), roughly: only to choose how many blocks to copy."""

LINK_GB_S = 45.0


def beside_compute() -> list[tuple[int, Shape]]:
    """(CTAs, shape) of every prefetch that is measured beside compute."""
    return [(c, DEFAULT) for c in CTAS] + [(c, shape) for shape in OTHERS for c in FEWER_CTAS]


def rough_gb_s(ctas: int, shape: Shape) -> float:
    """About what such a prefetch moves beside compute."""
    return min(LINK_GB_S, ctas * GB_S_PER_CTA[shape[:2]])


def copy_case(batch: int, ctas: int, shape: Shape) -> dict[str, Value]:
    """The conditions of a row about compute beside a copy."""
    warps, stages, chunk = shape
    return {"batch": batch, "ctas": ctas, "warps": warps, "stages": stages, "chunk_bytes": 2 * chunk}


class Lists:
    """A destination buffer, and miss lists as selection leaves them.

    The order of the rows matters more than one would think: a decode step never reads the same host rows twice in a
    row, and a head's misses ascend within that head's part of the pool. Copies of the same few rows over and over,
    which the host's caches and the IOMMU's know by then, ran half as fast again from one CTA as a step's.
    """

    LENGTH = 1 << 17
    BLOCKS_PER_HEAD = 2053
    MISSES_PER_HEAD = 6

    def __init__(self, bench: Bench) -> None:
        self.pool = bench.pool
        rows = 16384
        self.cache = torch.empty(rows, self.pool.shape[1], dtype=self.pool.dtype, device=bench.device)
        generator = torch.Generator(device=bench.device).manual_seed(bench.seed)
        heads = self.LENGTH // self.MISSES_PER_HEAD + 1
        window = torch.rand(heads, self.BLOCKS_PER_HEAD, device=bench.device, generator=generator)
        chosen = window.topk(self.MISSES_PER_HEAD).indices.sort(1).values
        base = torch.arange(heads, device=bench.device)[:, None] * self.BLOCKS_PER_HEAD
        self.src = ((base + chosen).flatten()[: self.LENGTH] % self.pool.shape[0]).int()
        self.dst = torch.randperm(self.LENGTH, device=bench.device, generator=generator).int() % rows
        self._cursor = 0

    def count(self, blocks: int) -> Tensor:
        """``blocks`` as the device-side count that a prefetch reads."""
        return torch.tensor([blocks], dtype=torch.int32, device=self.cache.device)

    def fresh(self, blocks: int) -> int:
        """Where a list of ``blocks`` entries begins that has not been read for as long as can be.

        A multiple of four entries, 16 bytes: other places have the kernel compiled once more, in mid-measurement.
        """
        begin = self._cursor if self._cursor + blocks <= self.LENGTH else 0
        self._cursor = begin + -(-blocks // 4) * 4
        return begin

    def run(self, count: Tensor, ctas: int, warps: int, stages: int, chunk: int, offset: int = 0) -> None:
        """Copy the list from entry ``offset`` on."""
        prefetch(
            self.pool,
            self.cache,
            self.src[offset:],
            self.dst[offset:],
            count,
            ctas=ctas,
            warps=warps,
            stages=stages,
            chunk_values=chunk,
        )
