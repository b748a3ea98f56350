"""Misses that follow from how a real model's choice moves: by top-k and resident blocks, instead of a stated rate."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from pathlib import Path

from sparda.calibrate.quality import QualityProfile, load_quality
from sparda.engine.config import Config, Workload
from sparda.engine.dynamics.choices_file import read_choices
from sparda.engine.dynamics.curve import MissCurve
from sparda.engine.dynamics.stack import miss_curve
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import SparseSpec
from sparda.explore.quality import tier_between
from sparda.explore.text import percent

RESIDENT_TIMES = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Slots for free picks over the free picks, that a search tries."""

NEAR = 1.5
"""A curve is taken for a share of the context up to so many times its own, or as many times smaller."""

TRACE = ".choices"
FILLING = 4
"""The first of so many parts of a trace, in which slots fill, counts no misses."""

OTHERWISE = ("nosa", "shallow")
"""Policies that fetch and whose choice moves otherwise than that of ``sparse``, which the curves are of."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Curves of misses against resident blocks by measured top-k, of a context of so many ``blocks``."""

    name: str
    model: str
    context_tokens: int
    blocks: int
    curves: tuple[tuple[int, MissCurve], ...]

    @classmethod
    def of(cls, profile: QualityProfile) -> Selection:
        """The curves of a quality profile. Raises SpardaError where it has none."""
        if not profile.dynamics:
            raise SpardaError(
                f"selection: the quality profile {profile.name!r} has no rows of how the choice moves from step to "
                "step; measure them with `sparda quality measure`, or state workload.miss_rate instead."
            )
        curves = sorted(((d.top_k, d.curve) for d in profile.dynamics), key=lambda c: c[0])
        return cls(profile.name, profile.model, profile.context_tokens, profile.blocks, tuple(curves))

    def tier(self, model: str, context_tokens: int) -> str:
        """What the misses rest on, in words."""
        return tier_between(self.model, self.context_tokens, model, context_tokens)

    def miss_rate(self, spec: SparseSpec, workload: Workload, config: Config) -> float:
        """Missed blocks per step as a share of top-k, as ``Workload.miss_rate`` states it.

        From the curve of the nearest measured share of the context. 0 where nothing is fetched or all is resident.
        """
        blocks = spec.blocks(workload.context_tokens)
        if not config.path or config.slots >= blocks:
            return 0.0
        _, curve = self._nearest(config.top_k / blocks)
        return curve.miss_rate(config.top_k, config.slots, min(spec.forced, blocks))

    def outside(self, spec: SparseSpec, workload: Workload, config: Config) -> list[str]:
        """Why the misses of ``config`` leave what was measured; empty where they lie inside."""
        blocks = spec.blocks(workload.context_tokens)
        if not config.path or config.slots >= blocks:
            return []
        reasons, share, forced = [], config.top_k / blocks, min(spec.forced, blocks)
        near, curve = self._nearest(share)
        if not curve.measured_to(config.top_k, config.slots, forced):
            reasons.append(
                f"{config.slots} resident blocks, misses measured up to {curve.ratio[-1]:g} times the free picks: "
                f"{int(forced + curve.ratio[-1] * (config.top_k - forced))}"
            )
        if not 1 / NEAR <= share / near <= NEAR:
            reasons.append(
                f"misses of a top-k that is {percent(share)} of the context, the nearest measured is {percent(near)}"
            )
        if config.policy in OTHERWISE:
            reasons.append(f"misses of the choice of sparse; that of {config.policy} moves otherwise")
        return reasons

    def _nearest(self, share: float) -> tuple[float, MissCurve]:
        """The measured share of the context that is nearest to ``share``, and its curve."""
        top_k, curve = min(self.curves, key=lambda c: (abs(log(c[0] / self.blocks / share)), c[0]))
        return top_k / self.blocks, curve


def load_selection(name: str) -> Selection:
    """The selection of that name: a quality profile by name, folder or file, or a selection trace (``.choices``).

    Raises SpardaError where there is none, and where it says nothing of how its choice moves.
    """
    if Path(name).suffix == TRACE:
        return _of_trace(Path(name))
    return Selection.of(load_quality(name))


def _of_trace(path: Path) -> Selection:
    """The one curve of a recorded or generated trace, once the slots have filled."""
    choices = read_choices(path)
    facts = choices.facts
    spec = SparseSpec(block=facts.block, init_blocks=facts.init_blocks, local_blocks=facts.local_blocks)
    context = max(facts.context_tokens)
    curve = miss_curve(choices, skip=choices.steps // FILLING)
    return Selection(path.name, facts.model, context, spec.blocks(context), ((facts.top_k, curve),))
