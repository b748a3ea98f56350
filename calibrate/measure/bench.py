"""What every measurement stands on: shared weights and pinned pool, decoders made to order, rows written at once."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from sparda.calibrate.measure.parts import Case
from sparda.calibrate.measure.watch import Watch
from sparda.calibrate.store import Row, Store, Value, case_key
from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.graph import Replayable
from sparda.engine.policies import make_plan, resident_layers, side_data
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.tiers import Tiers, new_pool
from sparda.engine.trace import SelectionTrace, rotating_trace
from sparda.engine.weights import Weights, random_weights

GROWTH_TOKENS = 512
"""Tokens that a measured batch may decode before its sequences are put back at their context length."""

POOL_GIB = 8.0
"""Pinned pool of a measurement: sequences alias it. Far above any cache, quick to pin."""


PIN_S_PER_GIB = 0.8
"""Seconds to lock a GiB of host memory on the machine of the shipped profile: only to say how long it will take."""


class TraceMaker(Protocol):
    """Makes the selection trace of a decoder: ``rotating_trace``, or another bound to what it states."""

    def __call__(
        self,
        shape: ModelShape,
        spec: SparseSpec,
        workload: Workload,
        config: Config,
        *,
        blocks: int,
        device: torch.device | str,
        seed: int = 0,
    ) -> SelectionTrace: ...


class OutOfTimeError(Exception):
    """The budget is spent; what was measured so far is in the store."""


@dataclass(slots=True)
class Clock:
    """The budget of a session, in seconds."""

    budget_s: float
    started: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.started)

    def check(self) -> None:
        if self.left_s < 0:
            raise OutOfTimeError


class Bench:
    """A GPU session that writes rows: holds what is costly to make and remembers what is measured already."""

    def __init__(self, store: Store, session: str, shape: ModelShape, clock: Clock, *, seed: int = 0) -> None:
        self.store, self.session, self.shape, self.clock, self.seed = store, session, shape, clock, seed
        self.spec = SparseSpec()
        self.device = torch.device("cuda")
        self._tiers: dict[tuple[int, int, int, int, tuple[str, ...]], Tiers] = {}
        self._known = store.settled()
        self.watch: Watch | None = None
        self.each: Callable[[int], None] | None = None
        """Told how many rows were kept, whenever some are."""

    @cached_property
    def weights(self) -> Weights:
        self.say(f"weights of {self.shape.name}, random: {self.shape.weight_bytes / 2**30:.1f} GiB")
        made = random_weights(self.shape, self.device, self.seed)
        self._begin()
        return made

    @cached_property
    def pool(self) -> Tensor:
        values = self.shape.block_bytes(self.spec) // 2
        self.say(f"pinning {POOL_GIB:g} GiB, about {PIN_S_PER_GIB * POOL_GIB:.0f} s")
        pool = new_pool(int(POOL_GIB * 2**30) // (2 * values), values, self.device)
        # Pages that nobody has written may not be there yet, and are slow to read the first time.
        pool.copy_(torch.ones(1, dtype=pool.dtype).expand_as(pool))
        self._begin()
        return pool

    def say(self, text: str) -> None:
        # On a terminal a line of progress may stand there.
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{start}[{self.clock.budget_s - self.clock.left_s:6.1f} s] {text}", file=sys.stderr, flush=True)

    def tiers(self, workload: Workload, config: Config, *, beside: bool = False) -> Tiers:
        """KV tiers for this batch, context, residency and what is kept beside; kept while cases ask for the same.

        Others are given back first, unless ``beside`` asks to keep them too.
        """
        whole = resident_layers(config, self.shape.layers)
        key = (workload.batch, workload.context_tokens, config.slots, whole, side_data(config))
        if key not in self._tiers:
            if not beside:
                self.release()
            capacity = workload.context_tokens + GROWTH_TOKENS
            made = Tiers(self.shape, self.spec, workload, config, self.device, capacity=capacity, pool=self.pool)
            made.seed(self.seed)
            self._tiers[key] = made
        return self._tiers[key]

    def release(self) -> None:
        """Give the KV tiers' memory back."""
        self._tiers.clear()
        # What refers to itself waits for the collector, and one cache may leave no room for the next.
        gc.collect()
        torch.cuda.empty_cache()

    def keep_only(self, workload: Workload) -> None:
        """Give back all KV tiers but those of this batch and context; put these back at their context length."""
        alike = (workload.batch, workload.context_tokens)
        if any(key[:2] != alike for key in self._tiers):
            self.release()
        for tiers in self._tiers.values():
            tiers.reset_residents()

    def hindered(self, case: Case) -> bool:
        """Whether the case cannot be measured here, which is said. Allocates nothing."""
        there = torch.cuda.get_device_properties(self.device).total_memory
        if reason := case.hindrance(self.shape, self.spec, there):
            self.say(f"skipped: {case.label}: {reason}")
        return bool(reason)

    def due(self, case: Case) -> bool:
        """Whether to measure the case now: not if it is measured already or cannot be.

        Raises OutOfTimeError where it is due and no time is left.
        """
        if case.key in self._known or self.hindered(case):
            return False
        self.clock.check()
        return True

    def decoder(
        self, workload: Workload, config: Config, *, beside: bool = False, trace: TraceMaker | None = None
    ) -> Decoder:
        """A decoder put at its context length, on a rotating trace with the workload's miss rate or one of ``trace``.

        A plan that chooses nothing gets none. ``beside``: other decoders of this workload are in use: their KV tiers
        stay, and stay where they are.
        """
        tiers = self.tiers(workload, config, beside=beside)
        if not beside:
            tiers.reset_residents()
        plan = make_plan(self.shape, self.spec, workload, config)
        make, chooses = trace or rotating_trace, bool(plan.of_kind("select"))
        made = (
            make(self.shape, self.spec, workload, config, blocks=tiers.blocks, device=self.device, seed=self.seed)
            if chooses
            else None
        )
        decoder = Decoder(plan, self.weights, tiers, made)
        self._begin()
        return decoder

    def thin(self, layers: int) -> Bench:
        """A bench of the same session, on a model of the same sizes with ``layers`` layers; this one's memory goes."""
        self.release()
        self.__dict__.pop("weights", None)
        other = Bench(self.store, self.session, replace(self.shape, layers=layers), self.clock, seed=self.seed)
        other.device, other._known, other.watch, other.each = self.device, self._known, self.watch, self.each
        other.__dict__["pool"] = self.pool
        return other

    def row(
        self,
        kind: str,
        op: str,
        case: Mapping[str, Value],
        samples: tuple[float, ...],
        method: str,
        values: Mapping[str, float] | None = None,
        *,
        complete: bool = True,
    ) -> Row:
        return Row(kind, op, self.session, method, dict(case), samples, values or {}, complete)

    def keep(self, *rows: Row) -> None:
        """Write rows that were measured since the last ones, or since what they needed was set up.

        Each also says what the GPU did meanwhile, where that was watched.
        """
        seen = self.watch.seen() if self.watch else {}
        rows = tuple(replace(r, values={**r.values, **seen}) for r in rows)
        for kind in dict.fromkeys(r.kind for r in rows):
            self.store.append(kind, [r for r in rows if r.kind == kind])
        self._known.update(r.key for r in rows)
        if self.each:
            self.each(len(rows))
        self._begin()

    def _begin(self) -> None:
        """From here on the GPU's clocks are those of the next row."""
        if self.watch:
            self.watch.begin()

    def measured(self, kind: str, op: str, case: Mapping[str, Value]) -> bool:
        """Whether the store has this case already, from this run or from one that was interrupted."""
        return case_key(kind, op, case) in self._known


def replayed(decoder: Decoder) -> Replayable:
    """What one step of a captured decoder replays."""
    assert decoder.graph is not None, "a decoder is captured before it is timed"
    return decoder.graph


def step_case(workload: Workload, config: Config) -> dict[str, Value]:
    """The conditions of a whole step: everything that was stated and everything that was turned."""
    return {**asdict(workload), **config.settings}
