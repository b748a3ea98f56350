"""Training on a frozen model: one walk through its layers serves every student, and nothing goes back through it.

A layer's loss has a gradient in the rows that chose for it and in nothing else: the inputs that they read, and the keys
that they are scored on, are the frozen model's. So each layer's part is done as soon as the walk has come to it, chunk
by chunk of queries, and no activation is kept but the inputs of as many layers as the farthest Forecast looks ahead.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sparda.engine.errors import SpardaError
from sparda.engine.loader import write_text
from sparda.engine.shapes import SparseSpec
from sparda.engine.training import checkpoints
from sparda.engine.training.config import Student, Training
from sparda.engine.training.forecast import ForecastRows
from sparda.engine.training.gradients import Gradients
from sparda.engine.training.scorer import ScorerRows
from sparda.engine.weights import Weights

LOG = "log.jsonl"


@dataclass(frozen=True, slots=True)
class StepLog:
    """An optimizer step: mean loss of each student over layers and sequences, nats; wall seconds."""

    step: int
    losses: dict[str, float]
    seconds: float


@dataclass(slots=True)
class Trainer:
    """``students`` and, where wanted, a ``scorer``, trained together on token sequences int64 [S].

    ``out``: folder of checkpoints, one folder a student; None keeps nothing. A training that was killed goes on from
    the last step that all of it was saved at, and ends as it would have: sequences follow from seed and step alone.
    """

    weights: Weights
    spec: SparseSpec
    training: Training
    students: Sequence[Student]
    sequences: Sequence[Tensor]
    out: Path | None = None
    scorer: ScorerRows | None = None
    rows: list[ForecastRows] = field(init=False)
    step: int = field(default=0, init=False)
    log: list[StepLog] = field(default_factory=list, init=False)
    facts: dict[str, object] = field(init=False)
    """What makes this training what it is, as plain values."""
    _optimizers: list[torch.optim.Optimizer] = field(init=False)
    _gradients: Gradients = field(init=False)

    def __post_init__(self) -> None:
        t = self.training
        self.rows = [ForecastRows.begun(self.weights, s, t.seed) for s in self.students]
        self._optimizers = [
            torch.optim.AdamW(
                list(part.named.values()),
                lr=t.learning_rate,
                betas=(t.beta1, t.beta2),
                eps=t.eps,
                weight_decay=t.weight_decay,
            )
            for part in self.parts
        ]
        self._gradients = Gradients(self.weights, self.spec, t.top_k, t.batch, self.rows, self.scorer)
        self.facts = self._facts()
        if self.out is not None:
            self._resume(self.out)

    @property
    def parts(self) -> list[ForecastRows | ScorerRows]:
        """All that is trained."""
        return [*self.rows, *([self.scorer] if self.scorer else [])]

    def run(self, each: Callable[[StepLog], None] = lambda _: None) -> None:
        """Train up to ``training.steps``; ``each`` hears of every step. What is there already is not done again."""
        while self.step < self.training.steps:
            start = time.perf_counter()
            losses = self._optimize()
            self.step += 1
            self.log.append(StepLog(self.step, losses, time.perf_counter() - start))
            if self.out is not None and (self.step % self.training.save_every == 0 or self.step == self.training.steps):
                self._save(self.out)
            each(self.log[-1])

    def _optimize(self) -> dict[str, float]:
        """One optimizer step; the mean losses by student."""
        t, totals = self.training, torch.zeros(len(self._optimizers), device=self.weights.embed.device)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = t.rate(self.step)
            # In place: a captured graph adds to these very tensors.
            optimizer.zero_grad(set_to_none=False)
        self._gradients.prepare(self.sequences[0])
        for number in range(self.step * t.batch, (self.step + 1) * t.batch):
            totals += self._gradients.add(self.sequences[self._index(number)], number)
        for optimizer in self._optimizers:
            torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], t.clip)
            optimizer.step()
        return dict(zip((p.name for p in self.parts), (totals / t.batch).tolist(), strict=True))

    def _index(self, number: int) -> int:
        """Which sequence comes ``number``-th: every epoch in an order of its own."""
        epoch, place = divmod(number, len(self.sequences))
        generator = torch.Generator().manual_seed(self.training.seed + epoch)
        return int(torch.randperm(len(self.sequences), generator=generator)[place])

    def _facts(self) -> dict[str, object]:
        digest = hashlib.sha256()
        for tokens in self.sequences:
            digest.update(tokens.cpu().numpy().tobytes())
        own = {k: v for k, v in asdict(self.training).items() if k not in ("save_every", "keep")}
        if self.training.schedule != "constant":
            # Where the rate decays, the number of steps decides every one of them.
            own["length"] = own["steps"]
        shape = self.weights.shape
        data = {"model": shape.name, "value_bytes": shape.value_bytes, "sequences": len(self.sequences)}
        data["tokens"] = digest.hexdigest()[:16]
        return {**data, **asdict(self.spec), **own}

    def _resume(self, out: Path) -> None:
        held = [set(checkpoints.steps_in(out / part.name)) for part in self.parts]
        common = set.intersection(*held) if held else set()
        if not common:
            return
        self.step = max(common)
        for part, optimizer in zip(self.parts, self._optimizers, strict=True):
            checkpoints.load(out / part.name, part.named, optimizer, self.step, self.facts)
        if (out / LOG).is_file():
            self.log = [line for line in _read_log(out / LOG) if line.step <= self.step]

    def _save(self, out: Path) -> None:
        for part, optimizer in zip(self.parts, self._optimizers, strict=True):
            checkpoints.save(out / part.name, part.named, optimizer, self.step, self.facts, self.training.keep)
        write_text(out / LOG, "".join(json.dumps(asdict(line)) + "\n" for line in self.log))


def _read_log(path: Path) -> list[StepLog]:
    try:
        return [StepLog(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, TypeError) as error:
        raise SpardaError(f"{path}: is damaged ({error}); remove it: the checkpoints do without.") from None
