"""What a session would do and how long it would take, said beforehand. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sparda.calibrate.measure.parts import Part
from sparda.calibrate.store import Store
from sparda.engine.shapes import ModelShape, SparseSpec

SETUP_S = 25.0
"""Seconds for weights, pinned memory and the first kernels to compile, on the machine of the shipped profile."""


@dataclass(frozen=True, slots=True)
class PartEstimate:
    """A part's cases: ``measured`` already, ``too_big`` (and why) for this GPU or model, and ``left`` to measure."""

    name: str
    cases: int
    measured: int
    too_big: tuple[str, ...]
    left: int
    seconds: float
    within_budget: str
    """"whole", "cut short" or "not begun"."""

    @property
    def line(self) -> str:
        text = f"{self.name}: {self.cases} cases, {self.measured} measured already, the rest about {self.seconds:.0f} s"
        if self.too_big:
            more = f" and {len(self.too_big) - 1} more" if len(self.too_big) > 1 else ""
            text += f"; not here: {self.too_big[0]}{more}"
        return text


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a session would do, part by part, within ``budget_s``."""

    parts: tuple[PartEstimate, ...]
    setup_s: float
    budget_s: float
    gpu_bytes: int | None
    """Memory of the GPU that the cases are held to; ``None`` where it is not known."""

    @property
    def left(self) -> int:
        return sum(p.left for p in self.parts)

    @property
    def seconds(self) -> float:
        return self.setup_s + sum(p.seconds for p in self.parts)

    @property
    def cut(self) -> tuple[str, ...]:
        """Parts that the budget does not cover."""
        return tuple(p.name for p in self.parts if p.within_budget != "whole")

    @property
    def lines(self) -> list[str]:
        """The estimate for a reader: a line for each part, and the remarks."""
        return [*(p.line for p in self.parts), *self.remarks]

    @property
    def remarks(self) -> list[str]:
        """What holds for all parts: the sum, and what the budget cuts."""
        found = []
        if self.gpu_bytes is None:
            found.append("no GPU is visible and none has measured into this folder: what does not fit is unknown")
        if not self.left:
            return [*found, "nothing is left to measure"]
        found.append(
            f"about {self.seconds:.0f} s in all, {self.setup_s:.0f} s of them to set up, at an H200's pace; "
            f"budget {self.budget_s:.0f} s"
        )
        if self.cut:
            what = ", ".join(f"{p.name} {p.within_budget}" for p in self.parts if p.name in self.cut)
            found.append(f"the budget does not cover all: {what}; the same command goes on from there")
        return found

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON: seconds, counts, and which parts the budget cuts."""
        return {
            "parts": [
                {
                    "name": p.name,
                    "cases": p.cases,
                    "measured": p.measured,
                    "left": p.left,
                    "seconds": round(p.seconds, 1),
                    "too_big": list(p.too_big),
                    "within_budget": p.within_budget,
                }
                for p in self.parts
            ],
            "left": self.left,
            "seconds": round(self.seconds, 1),
            "setup_s": self.setup_s,
            "budget_s": self.budget_s,
            "cut": list(self.cut),
            "gpu_memory_gib": None if self.gpu_bytes is None else round(self.gpu_bytes / 2**30, 1),
        }


def estimate(
    parts: Iterable[Part], store: Store, shape: ModelShape, gpu_bytes: int | None, budget_s: float
) -> Estimate:
    """What measuring ``parts`` of ``shape`` into ``store`` would do; counts the cases that remain, not whole parts."""
    settled, spec = store.settled(), SparseSpec()
    found: list[tuple[Part, int, int, tuple[str, ...], int]] = []
    for part in parts:
        cases = {c.key: c for c in part.cases(shape)}
        due = [c for key, c in cases.items() if key not in settled]
        hindered = [f"{c.label}: {why}" for c in due if (why := c.hindrance(shape, spec, gpu_bytes))]
        # Kinds of one set-up are hindered alike, and said once.
        found.append(
            (part, len(cases), len(cases) - len(due), tuple(dict.fromkeys(hindered)), len(due) - len(hindered))
        )
    setup_s = SETUP_S if any(left for *_, left in found) else 0.0
    remaining = budget_s - setup_s
    estimates = []
    for part, count, measured, hindrances, left in found:
        seconds = left * part.seconds_per_case
        within = "whole" if seconds <= max(0.0, remaining) else "cut short" if remaining > 0 else "not begun"
        remaining -= seconds
        estimates.append(PartEstimate(part.name, count, measured, hindrances, left, seconds, within))
    return Estimate(tuple(estimates), setup_s, budget_s, gpu_bytes)
