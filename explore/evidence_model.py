"""Figures of the simulator: held out, ranked, on a GPU with part of it taken away, its intervals, its speed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from statistics import median
from time import perf_counter

from sparda.calibrate.handicap import Handicapped, handicapped
from sparda.calibrate.holdout import HeldOut, error_band, held_out, held_out_rows
from sparda.calibrate.interval import COVERED, DRAWS
from sparda.calibrate.profile import Profile, measured_names, profile_names
from sparda.calibrate.ranking import Ranking, rankings
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload
from sparda.engine.policies import make_plan
from sparda.explore.figures import LIVE, Figure, Rows
from sparda.explore.text import count
from sparda.sim.player import play
from sparda.sim.speed import steps_per_second

FEW = 4
"""CTAs up to which a copy finds places beside attention at once; what the search picks lies there."""
SHARE = "share of the measured step"
WITHIN = 0.08
"""What a prediction for a GPU with part of it taken away may be off by."""
RANKED = ("validation", "step")
"""Kinds of rows whose CTA counts are ranked: interleaved ones first."""
HANDICAP = "steps with multiprocessors held, a copy engine on the link or readers of GPU memory beside them"


class ModelEvidence(Rows):
    """Figures of one profile's model."""

    def __init__(self, profile: Profile, seconds: float) -> None:
        super().__init__(profile)
        self.seconds = seconds
        self.by_gpu, self.by_host = held_out_rows(profile.store)

    def _play(self, rows: Sequence[Row]) -> list[HeldOut]:
        return held_out([r for r in rows if r.us > 0], self.profile.costs, self.shape, self.spec)

    @cached_property
    def _held(self) -> list[HeldOut]:
        return self._play(self.by_gpu)

    def held_out(self) -> dict[str, Figure]:
        """Errors of simulated whole steps against measured ones that no cost was fitted to."""
        steps = self._held
        band = error_band(steps)
        worst = max(steps, key=lambda h: abs(h.error), default=None)
        few = [h for h in steps if h.config.prefetch_ctas <= FEW]
        where = f"worst: batch {worst.workload.batch}, {worst.config.policy}" if worst else "no rows"
        policies = len({h.config.policy for h in steps})
        text = (
            f"measured whole steps, policies: {policies}, simulated from kernel, link and co-run "
            f"rows alone; run to run {band.spread:.1%}"
            if steps
            else "no rows"
        )

        def held(value: float | None, unit: str, target: float | None, higher: bool, more: str = "") -> Figure:
            return self.figure(
                value if steps or unit == "steps" else None, unit, target, higher, self.by_gpu, text + more
            )

        return {
            "heldout.steps.count": held(float(len(steps)), "steps", 150, True),
            "heldout.steps.median": held(band.median, SHARE, 0.025, False),
            "heldout.steps.p95": held(band.p95, SHARE, 0.07, False),
            "heldout.steps.max": held(
                band.worst, SHARE, 0.12, False, f"; {where}, {worst.config.prefetch_ctas} CTAs" if worst else ""
            ),
            "heldout.steps.max.few_ctas": held(
                max((abs(h.error) for h in few), default=None), SHARE, None, False, f"; {len(few)} of up to {FEW} CTAs"
            ),
            "heldout.host_paths.median": self._host_paths(),
            "heldout.tau.min": self._tau(),
            "interval90.coverage": self._coverage(len(steps)),
        }

    def _host_paths(self) -> Figure:
        steps = self._play(self.by_host)
        band = error_band(steps)
        text = (
            f"{count(len(steps), 'step')} whose blocks the host gathers or copies by the copy engine, in Python; worst "
            f"{band.worst:.0%}, run to run {band.spread:.1%}"
            if steps
            else "no rows"
        )
        return self.figure(band.median if steps else None, SHARE, None, False, self.by_host, text)

    def _tau(self) -> Figure:
        """Of the rows of the first kind that has any cells to rank."""
        found: list[Ranking] = []
        rows: list[Row] = []
        for kind in RANKED:
            rows = [r for r in self.profile.store.latest(kind) if r.op == "sparda"]
            found = rankings(self._play(rows))
            if found:
                break
        worst = found[0] if found else None
        text = "no cell with CTA counts to rank"
        if worst:
            w = worst.workload
            text = (
                f"{count(len(found), 'cell')}, pairs of CTA counts further apart than their spread; median "
                f"{median(r.tau for r in found):.2f}; worst: batch {w.batch}, {w.context_tokens} tokens, "
                f"{w.miss_rate:.0%} misses, {worst.pairs} pairs"
            )
        return self.figure(worst.tau if worst else None, "Kendall's tau", 0.9, True, rows if found else [], text)

    def _coverage(self, steps: int) -> Figure:
        value = self.profile.judged.coverage
        text = (
            f"share of {steps} held-out steps inside the interval of {COVERED:.0%} from {DRAWS} draws of calibration "
            "residuals; 85 to 97 % is meant"
        )
        return self.figure(value, "share of steps", 0.85, True, self.by_gpu if value is not None else [], text)

    def handicap(self) -> dict[str, Figure]:
        """Predictions for the GPU with part of it taken away, by the rules that carry costs to other machines."""
        rows = self.profile.store.latest("handicap")
        found = handicapped(rows, self.profile.costs, self.shape, self.spec)
        worst = max(found, key=lambda h: abs(h.error), default=None)
        inside = sum(abs(h.error) <= WITHIN for h in found)
        text = f"{HANDICAP}; {inside} of {len(found)} within {WITHIN:.0%}" if found else "no rows"

        def figure(value: float | None, unit: str, target: float | None, higher: bool, more: str = "") -> Figure:
            return self.figure(value, unit, target, higher, rows if found else [], text + more)

        return {
            "handicap.count": figure(float(len(found)), "steps", 40, True),
            "handicap.median": figure(median(abs(h.error) for h in found) if found else None, SHARE, WITHIN, False),
            "handicap.max": figure(abs(worst.error) if worst else None, SHARE, WITHIN, False, _worst_text(worst)),
        }

    def speed(self) -> dict[str, Figure]:
        """How fast steps are simulated where this runs."""
        plan = make_plan(self.shape, self.spec, Workload(), Config())
        rate = steps_per_second(plan, self.profile.costs, self.seconds)
        text = f"one core of this machine, {len(plan.ops)} operations a step, measured for {self.seconds:g} s"
        return {
            "sim.steps_per_s": Figure(rate, "steps/s", None, True, 0, text, LIVE),
            "sim.ms_per_step": Figure(1e3 / rate, "ms", 3.0, False, 0, text, LIVE),
            "sim.configs_per_s": Figure(
                self._configs_per_s(), "configurations/s", 100.0, True, 0, f"plan and play, {text}", LIVE
            ),
        }

    def _configs_per_s(self) -> float:
        done, begun = 0, perf_counter()
        while (taken := perf_counter() - begun) < self.seconds or not done:
            config = Config(prefetch_ctas=1 + done % 32, lookahead=1 + done % 3)
            play(make_plan(self.shape, self.spec, Workload(batch=1 + done % 64), config), self.profile.costs)
            done += 1
        return done / taken

    def machines(self) -> dict[str, Figure]:
        """How many machines are known, by tier."""
        measured = len(measured_names())
        described = len(profile_names()) - measured
        return {
            "machines.measured": Figure(
                float(measured), "machines", None, True, 0, "shipped profiles", "files of this package"
            ),
            "machines.datasheet": Figure(
                float(described), "machines", 12, True, 0, "described with sources", "files of this package"
            ),
        }


def _worst_text(worst: Handicapped | None) -> str:
    if worst is None:
        return ""
    case = worst.row.case
    return f"; worst: {worst.row.op}, batch {case['batch']}, {case['prefetch_ctas']} CTAs, {worst.taken}"
