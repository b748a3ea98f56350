"""A claimed figure, and the measurement rows that figures are computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Row
from sparda.engine.loader import to_plain
from sparda.engine.shapes import SparseSpec, model_named

LIVE = "measured now"
"""Provenance of a figure that belongs to the reader's machine."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One claimed number. ``value`` is None where its rows are missing; ``met`` then is None too.

    ``rows`` counts the measurement rows it rests on, ``provenance`` names their sessions and GPU.
    """

    value: float | None
    unit: str
    target: float | None
    higher_is_better: bool
    rows: int
    conditions: str
    provenance: str

    @property
    def met(self) -> bool | None:
        if self.value is None or self.target is None:
            return None
        return self.value >= self.target if self.higher_is_better else self.value <= self.target

    def to_dict(self) -> dict[str, object]:
        return {**to_plain(self), "met": self.met}


class Rows:
    """The rows of one profile, by kind, the newest of each case; all of them where repeats count."""

    def __init__(self, profile: Profile) -> None:
        self.profile, store = profile, profile.store
        self.spec, self.shape = SparseSpec(), model_named(profile.model)
        self.link = [r for r in store.latest("link") if "gb_s" in r.values]
        self.steps = store.latest("step")
        self.validation = store.rows("validation")
        self.judging = [*self.validation, *self.steps]
        """What a choice is judged by: see ``cells.JUDGING``."""
        self.policies = store.latest("policy")
        self.parity = store.latest("parity")
        self.sessions = store.provenance

    def figure(
        self, value: float | None, unit: str, target: float | None, higher: bool, rows: Sequence[Row], conditions: str
    ) -> Figure:
        """The figure, with the number of its rows and where they come from."""
        return Figure(value, unit, target, higher, len(rows), conditions, self._provenance(rows))

    def _provenance(self, rows: Sequence[Row]) -> str:
        names = sorted({r.session for r in rows})
        gpus = sorted({str(self.sessions[n].get("gpu", "unknown GPU")) for n in names if n in self.sessions})
        return f"{', '.join(gpus) or 'unknown GPU'}: {', '.join(names)}" if names else "no rows"
