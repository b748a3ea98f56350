"""How a Forecast is trained: what a user states. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparda.engine.errors import SpardaError

BEGINNINGS = ("queries", "uniform")
"""What rows begin as. ``queries``: means of the target layer's own query projections, the untrained proxy. ``uniform``:
between -1 and 1 over the root of fan-in, as published."""

SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True, slots=True)
class Student:
    """One Forecast: ``lookahead`` layers ahead (0: a layer's own), ``heads`` Forecast heads per KV head."""

    lookahead: int = 1
    heads: int = 1
    begin: str = "queries"

    def __post_init__(self) -> None:
        if not 0 <= self.lookahead <= 4:
            raise SpardaError(f"a Forecast {self.lookahead} layers ahead; allowed are 0 to 4.")
        if self.heads not in (1, 2, 4):
            raise SpardaError(f"{self.heads} Forecast heads per KV head; allowed are 1, 2 and 4.")
        if self.begin not in BEGINNINGS:
            raise SpardaError(f"a Forecast that begins as {self.begin!r}; allowed are {', '.join(BEGINNINGS)}.")

    @property
    def name(self) -> str:
        """Name of its folder: ``d1-h1``, and how it began where that is not as usual."""
        begun = "" if self.begin == BEGINNINGS[0] else f"-{self.begin}"
        return f"d{self.lookahead}-h{self.heads}{begun}"


@dataclass(frozen=True, slots=True)
class Training:
    """Optimizer and schedule; the defaults are those of arXiv 2606.04511 and its public code.

    ``batch``: sequences per optimizer step. ``warmup``: steps over which the rate rises in a line. ``schedule``: what
    it does then. ``clip``: the most that a student's gradient norm may be.
    """

    steps: int = 2000
    batch: int = 32
    learning_rate: float = 5e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-6
    weight_decay: float = 0.01
    clip: float = 0.5
    warmup: int = 0
    schedule: str = "constant"
    top_k: int = 96
    seed: int = 42
    save_every: int = 50
    keep: int = 5

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "save_every", "top_k"):
            if getattr(self, name) < 1:
                raise SpardaError(f"training.{name} is {getattr(self, name)}; give 1 or more.")
        if self.keep < 2:
            raise SpardaError(
                f"training.keep is {self.keep}; give 2 or more: of students saved one after another, a kill may leave "
                "some at the step before."
            )
        if not (0 < self.learning_rate < 1 and self.clip > 0):
            raise SpardaError(
                f"training.learning_rate {self.learning_rate:g} and clip {self.clip:g}; give a rate between 0 and 1 "
                "and a clip above 0."
            )
        if self.schedule not in SCHEDULES:
            raise SpardaError(f"training.schedule is {self.schedule!r}; allowed are {', '.join(SCHEDULES)}.")
        if not 0 <= self.warmup <= self.steps // 10:
            raise SpardaError(f"training.warmup is {self.warmup}; allowed are 0 to a tenth of {self.steps} steps.")

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
