"""Every figure the documentation claims, recomputed from a profile's committed rows."""

from __future__ import annotations

from collections.abc import Callable

from sparda.calibrate.holdout import HeldOut, error_band, held_out
from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.policies import make_plan
from sparda.explore.cells import CellVerdict
from sparda.explore.evidence_steps import compared, parity, steps
from sparda.explore.figures import LIVE, Figure, Rows
from sparda.explore.text import count
from sparda.explore.validate import FILE, read_cells, verdicts
from sparda.sim.speed import steps_per_second

FEW = 4
"""CTAs up to which a copy finds places beside attention at once; what the search picks lies there."""


class _Evidence(Rows):
    """Figures of the link, of the simulator and of the search."""

    def __init__(self, profile: Profile, seconds: float) -> None:
        super().__init__(profile)
        self.seconds = seconds

    def share(self, case: str, target: float) -> Figure:
        """Best rate of a 2-CTA prefetch over the plateau of the link, both with blocks read in place by the GPU."""
        plateau = max((r for r in self.link if r.case.get("case") == "all_miss"), key=_gb_s, default=None)
        two = [r for r in self.link if r.op == "prefetch" and r.case.get("ctas") == 2 and r.case.get("case") == case]
        best = max(two, key=_gb_s, default=None)
        value, conditions = None, f"2 CTAs, case {case}: no rows"
        if plateau and best and _gb_s(plateau) > 0:
            value = _gb_s(best) / _gb_s(plateau)
            conditions = (
                f"2 CTAs, {count(int(best.case['warps']), 'warp')}, {best.case['stages']} stages, case {case}: "
                f"{_gb_s(best):.1f} of {_gb_s(plateau):.1f} GB/s"
            )
        used = [*two, plateau] if plateau and plateau not in two else two
        return self.figure(value, "fraction of the UVA plateau", target, True, used, conditions)

    def held_out(self) -> dict[str, Figure]:
        """Errors of simulated whole steps against measured ones that no cost was fitted to."""
        steps = self._held_out()
        band = error_band(steps) if steps else None
        worst = max(steps, key=lambda h: abs(h.error), default=None)
        few = [h for h in steps if h.config.prefetch_ctas <= FEW]
        where = f"worst: batch {worst.workload.batch}, {worst.config.policy}" if worst else "no rows"
        text = "measured whole steps, simulated from kernel, link and co-run rows alone"

        def held(value: float | None, unit: str, target: float | None, higher: bool, more: str = "") -> Figure:
            return self.figure(value, unit, target, higher, self.steps, f"{text}{more}")

        unit = "share of the measured step"
        return {
            "heldout.steps.count": held(float(len(steps)), "steps", 40, True),
            "heldout.steps.median": held(band.median if band else None, unit, 0.05, False),
            "heldout.steps.max": held(band.worst if band else None, unit, 0.15, False, f"; {where}"),
            "heldout.steps.max.few_ctas": held(
                max((abs(h.error) for h in few), default=None), unit, None, False, f"; {len(few)} of up to {FEW} CTAs"
            ),
        }

    def _held_out(self) -> list[HeldOut]:
        return held_out([r for r in self.steps if r.us > 0], self.profile.costs, self.shape, self.spec)

    def cells(self) -> list[CellVerdict]:
        path = self.profile.folder / FILE
        return verdicts(read_cells(path), self.judging) if path.exists() and self.judging else []

    def validated(self) -> dict[str, Figure]:
        """Regret of the chosen configurations and their gain over the public rule, both measured."""
        judged = [v for v in self.cells() if v.regret is not None]
        text = f"{len(judged)} measured cells of {FILE}"
        worst = max(judged, key=lambda v: v.regret or 0.0, default=None)
        gained = [v for v in judged if v.gain_public is not None]
        most = max(gained, key=lambda v: v.gain_public or 0.0, default=None)
        return {
            "regret.max": self.figure(
                worst.regret if worst else None,
                "share of the best measured step",
                0.03,
                False,
                self.judging,
                f"{text}; worst: {_cell_text(worst)}" if worst else text,
            ),
            "gain.vs_public.max": self.figure(
                most.gain_public if most else None,
                "tokens/s over the public rule's CTA count, less 1",
                None,
                True,
                self.judging,
                f"{text}; most: {_cell_text(most)}" if most else text,
            ),
        }

    def speed(self) -> Figure:
        plan = make_plan(self.shape, self.spec, Workload(), Config())
        value = steps_per_second(plan, self.profile.costs, self.seconds)
        text = f"one core of this machine, {len(plan.ops)} operations a step, measured for {self.seconds:g} s"
        return Figure(value, "steps/s", None, True, 0, text, LIVE)


def _gb_s(row: Row) -> float:
    return float(row.values["gb_s"])


def _cell_text(verdict: CellVerdict) -> str:
    w = verdict.workload
    return f"batch {w.batch}, {w.context_tokens} tokens, {w.miss_rate:.0%} misses"


def evidence(profile: Profile, seconds: float = 1.0, each: Callable[[], None] = lambda: None) -> dict[str, Figure]:
    """All figures by id, in the order of the documentation. ``seconds`` are spent on the simulator's own speed.

    Raises SpardaError where a row is damaged or its workload cannot be.
    """
    known = _Evidence(profile, seconds)
    figures: dict[str, Figure] = {}
    parts: list[Callable[[], dict[str, Figure]]] = [
        lambda: {"prefetch.share.2cta.all_miss": known.share("all_miss", 0.95)},
        lambda: {"prefetch.share.2cta.miss15_b16": known.share("miss15_b16", 0.90)},
        lambda: steps(known),
        lambda: compared(known),
        lambda: parity(known),
        known.held_out,
        known.validated,
        lambda: {"sim.steps_per_s": known.speed()},
    ]
    for part in parts:
        try:
            figures |= part()
        except SpardaError as e:
            raise SpardaError(f"{profile.label}: {e}") from None
        each()
    return figures
