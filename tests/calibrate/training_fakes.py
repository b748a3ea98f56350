"""Training that only takes time, for measuring what training takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sparda.calibrate.measure import training
from sparda.engine.training.config import Training

STEP_S = {1: 90.0, 2: 30.0, 3: 10.0, 4: 20.0}
"""What each optimizer step takes; in the first there is something to compile."""

WALK_S, TEACH_S = 2.0, 5.0
PEAK_GIB = 40


@dataclass
class Work:
    """A clock that only work moves, and what was trained on."""

    now: float = field(default_factory=time.monotonic)
    texts: list[Tensor] = field(default_factory=list)
    peaks: int = 0
    """How often the peak of memory was set back."""

    def trainer(
        self, weights: object, spec: object, given: Training, students: object, sequences: list[Tensor]
    ) -> FakeTrainer:
        self.texts += sequences
        return FakeTrainer(self, given)

    def walk(self, weights: object, tokens: Tensor) -> Iterator[SimpleNamespace]:
        self.now += WALK_S
        yield SimpleNamespace()

    def targets(self, start: int, end: int) -> None:
        self.now += TEACH_S * (end - start) / len(self.texts[-1])

    def reset_peak(self) -> None:
        self.peaks += 1

    def reserved(self) -> int:
        assert self.peaks == len(self.texts), "a peak that an earlier length may have left"
        return PEAK_GIB << 30


@dataclass
class FakeTrainer:
    """Optimizer steps that only take time."""

    work: Work
    training: Training
    step: int = 0

    def run(self) -> None:
        while self.step < self.training.steps:
            self.step += 1
            self.work.now += STEP_S[self.step]


def install_training(patch: pytest.MonkeyPatch) -> Work:
    """Put work that only takes time in the place of the trainer, the model's walk and the teacher."""
    made = Work()
    patch.setattr(training, "Trainer", made.trainer)
    patch.setattr(training, "walk", made.walk)
    teacher = SimpleNamespace(chunk=3000, targets=made.targets)
    patch.setattr(training, "Teacher", SimpleNamespace(of=lambda *_: teacher))
    patch.setattr(torch.cuda, "reset_peak_memory_stats", made.reset_peak)
    patch.setattr(torch.cuda, "max_memory_reserved", made.reserved)
    return made
