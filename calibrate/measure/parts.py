"""What a session is made of: parts, and the cases of each, which can be listed without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparda.calibrate.store import Value, case_key
from sparda.engine.config import Config, Workload, check_fits
from sparda.engine.errors import SpardaError
from sparda.engine.memory import memory_of
from sparda.engine.shapes import ModelShape, SparseSpec

if TYPE_CHECKING:
    from sparda.calibrate.measure.bench import Bench


@dataclass(frozen=True, slots=True)
class Case:
    """What leaves one row: its ``kind``, ``op`` and conditions, and the step that has to be set up for it.

    ``workload`` and ``config`` are ``None`` where the case sets up no step. ``layers``: of how many the model is that
    the step is set up with, where not of all.
    """

    kind: str
    op: str
    conditions: Mapping[str, Value]
    workload: Workload | None = None
    config: Config | None = None
    layers: int | None = None

    @property
    def key(self) -> str:
        """As ``Row.key`` of the row that it leaves."""
        return case_key(self.kind, self.op, self.conditions)

    @property
    def label(self) -> str:
        """The step that is set up, in words."""
        if self.workload is None or self.config is None:
            return f"{self.kind} {self.op}"
        resident = f", {self.config.resident_blocks} resident blocks" if self.config.resident_blocks else ""
        cell = f"batch {self.workload.batch}, {self.workload.context_tokens} tokens"
        return f"{self.config.policy}, {cell}{resident}"

    def hindrance(self, shape: ModelShape, spec: SparseSpec, gpu_bytes: int | None) -> str:
        """Why it cannot be measured with so much GPU memory, found without allocating anything; empty where it can.

        ``gpu_bytes`` ``None``: nobody knows how much there is, so none is too little.
        """
        if self.workload is None or self.config is None:
            return ""
        shape = replace(shape, layers=self.layers or shape.layers)
        try:
            check_fits(shape, spec, self.workload, self.config)
        except SpardaError as e:
            return str(e)
        needed = memory_of(shape, spec, self.workload, self.config).gpu_bytes
        if gpu_bytes is None or needed <= gpu_bytes:
            return ""
        return f"needs {needed / 2**30:.0f} GiB of GPU memory, {gpu_bytes / 2**30:.0f} GiB are there"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a session. ``cases`` lists, for a model, every row that ``measure`` would leave in an empty store;
    one may be listed twice, and is measured once.
    """

    name: str
    measure: Callable[[Bench], None]
    seconds_per_case: float
    """On an H200, with its share of setting up what several cases use."""
    cases: Callable[[ModelShape], Iterable[Case]]
    calibrates: bool = True
    """Whether a profile is fitted to it or judged by it; other parts answer other questions."""
