"""Every figure the documentation claims, recomputed from a profile's committed rows."""

from __future__ import annotations

from collections.abc import Callable

from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Row
from sparda.engine.errors import SpardaError
from sparda.explore.cells import CellVerdict
from sparda.explore.evidence_model import ModelEvidence
from sparda.explore.evidence_quality import quality_figures, shipped_quality, training_figures
from sparda.explore.evidence_steps import compared, parity, steps
from sparda.explore.evidence_traces import traced
from sparda.explore.figures import Figure
from sparda.explore.text import count
from sparda.explore.validate import FILE, read_cells, verdicts


class _Evidence(ModelEvidence):
    """Figures of the link and of the search besides those of the model."""

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
                0.01,
                False,
                self.judging,
                f"{text}; worst: {_cell_text(worst)}" if worst else text,
            ),
            "gain.vs_public.max": self.figure(
                most.gain_public if most else None,
                "tokens/s over the public rule's, less 1",
                None,
                True,
                self.judging,
                f"{text}; most: {_cell_text(most)}" if most else text,
            ),
        }


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
        lambda: traced(known),
        known.held_out,
        known.validated,
        known.handicap,
        lambda: quality_figures(shipped_quality()),
        lambda: training_figures(known),
        known.machines,
        known.speed,
    ]
    for part in parts:
        try:
            figures |= part()
        except SpardaError as e:
            raise SpardaError(f"{profile.label}: {e}") from None
        each()
    return figures
