"""The host's transfer paths on a GPU that is not: every part really copies, and takes its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from torch import Tensor

from sparda.calibrate.measure import paths
from sparda.engine.copy_engine import BlockCopies
from sparda.engine.errors import SpardaError

if TYPE_CHECKING:
    from tests.calibrate.fake_cuda import FakeCuda

CARRY_US, COPY_US, SPREAD_US = 11.0, 7.0, 3.0
REPEATS = 2


class Runtime:
    """A CUDA runtime that has batches, or has not."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def require_batch(self) -> None:
        if self.reason:
            raise SpardaError(self.reason)


def install_paths(patch: pytest.MonkeyPatch, gpu: FakeCuda) -> None:
    """Put the paths' own copies in the place of CUDA's, and repeat each but twice: they cost real time."""

    class Copies(BlockCopies):
        def __init__(self, pool: Tensor, most: int, runtime: object) -> None:
            super().__init__(pool, most)

        def one_by_one(self) -> None:
            super().one_by_one()
            gpu.current.work(COPY_US)

        def at_once(self) -> None:
            super().at_once()
            gpu.current.work(COPY_US)

    def carry(staged: Tensor, uploaded: Tensor, count: int) -> None:
        uploaded[:count] = staged[:count]
        gpu.current.work(CARRY_US)

    def spread(*args: Tensor) -> None:
        gpu.current.work(SPREAD_US)

    patch.setattr(paths, "REPEATS", REPEATS)
    patch.setattr(paths, "BlockCopies", Copies)
    patch.setattr(paths, "carry", carry)
    patch.setattr(paths, "spread", spread)
    patch.setattr(paths, "cuda_runtime", Runtime)
