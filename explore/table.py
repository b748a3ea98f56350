"""The CTA table: for each context, batch and miss rate, how many CTAs the prefetch kernel should get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload
from sparda.engine.loader import to_plain
from sparda.explore.cells import JUDGING, NOT_RUN, cell_verdict, public_ctas
from sparda.explore.predict import Predictor
from sparda.explore.quality import Quality
from sparda.explore.scenario import Scenario
from sparda.explore.space import Space, enumerate_space, noise_of, pick


@dataclass(frozen=True, slots=True)
class TableRow:
    """One cell. ``step_us`` in microseconds, ``low`` and ``high`` bound ``tokens_per_s`` by the error band, if known.

    ``limit_reason`` says which memory is too small, and by how much. ``gain`` is the predicted tokens/s over that of
    the public rule's CTA count, less 1, all else equal.
    ``confirmed``: "yes", "no" (contradicted by a measurement) or "-" (not measured).
    """

    context_tokens: int
    batch: int
    miss_rate: float
    top_k: int
    prefetch_ctas: int
    prefetch_warps: int
    prefetch_stages: int
    lookahead: int
    resident_blocks: int
    step_us: float
    tokens_per_s: float
    low: float | None
    high: float | None
    public_ctas: int
    gain: float
    tied_ctas: tuple[int, ...]
    inside: bool
    fits: bool
    limit_reason: str
    confirmed: str
    measured_gain: float | None = None
    """As ``gain``, of measured steps; None where the two configurations were not both measured."""
    quality: Quality | None = None
    """What the choice of blocks keeps; None where the scenario names no quality profile."""
    floor_reason: str = ""
    """Which floor of quality it breaks, and by how much; empty where it keeps them."""

    @property
    def workload(self) -> Workload:
        return Workload(self.batch, self.context_tokens, self.miss_rate)

    def config(self, policy: str) -> Config:
        """The chosen configuration, as one of ``policy``."""
        return Config(
            policy=policy,
            top_k=self.top_k,
            lookahead=self.lookahead,
            prefetch_ctas=self.prefetch_ctas,
            prefetch_warps=self.prefetch_warps,
            prefetch_stages=self.prefetch_stages,
            resident_blocks=self.resident_blocks,
        )


@dataclass(frozen=True, slots=True)
class CtaTable:
    """The rows and what they rest on. ``noise`` is the tie width.

    ``band`` is the p90 of held-out step errors; None where no step was held out.
    """

    profile: str
    tier: str
    gpu: str
    model: str
    policy: str
    band: float | None
    noise: float
    miss_rate: float
    """The miss rate that a lookup without one means: the scenario's, or the grid's nearest."""
    rows: tuple[TableRow, ...]
    selection: str = ""
    """Where the miss rates come from, if they are not the grid's."""

    @property
    def label(self) -> str:
        return f"{self.profile} ({self.tier})"

    @property
    def rated(self) -> bool:
        """Whether a quality profile rates the rows."""
        return any(r.quality for r in self.rows)

    @property
    def confirmed(self) -> tuple[int, int, int]:
        """How many rows were confirmed, contradicted and not measured."""
        marks = [r.confirmed for r in self.rows]
        return marks.count("yes"), marks.count("no"), marks.count(NOT_RUN)

    @property
    def gain_errors(self) -> list[float]:
        """How far predicted gains are from measured ones, smallest first."""
        return sorted(abs(r.gain - r.measured_gain) for r in self.rows if r.measured_gain is not None)

    def to_dict(self) -> dict[str, object]:
        return to_plain(self)


def cta_table(
    profile: Profile, scenario: Scenario, predictor: Predictor | None = None, each: Callable[[], None] = lambda: None
) -> CtaTable:
    """The table over the scenario's grid. ``each`` is called after every cell."""
    predictor = predictor or Predictor.of(profile, scenario)
    space = Space.of_table(scenario.grid, scenario.config, predictor.resident_times)
    noise = noise_of(profile)
    measured = [r for kind in JUDGING for r in profile.store.rows(kind)] if profile.model == scenario.model_name else []
    band = profile.band_of(scenario.config)
    rows = []
    for workload in scenario.cells:
        rows.append(_row(predictor, space, workload, scenario.config, noise, measured))
        each()
    wanted = scenario.workload.miss_rate
    return CtaTable(
        profile=profile.name,
        tier=profile.tier,
        gpu=profile.machine.gpu,
        model=scenario.model_name,
        policy=scenario.config.policy,
        band=band.p90 if band.count else None,
        noise=noise,
        miss_rate=min(scenario.grid.miss_rate, key=lambda m: (abs(m - wanted), m)),
        rows=tuple(rows),
        # One tier for all contexts, as a rule.
        selection="; ".join(t for t in dict.fromkeys(map(predictor.misses_from, scenario.grid.context_tokens)) if t),
    )


def _row(
    predictor: Predictor, space: Space, workload: Workload, base: Config, noise: float, measured: Sequence[Row]
) -> TableRow:
    best = pick(enumerate_space(predictor, space, workload, base), noise)
    p, c = best.best, best.best.config
    public = public_ctas(workload.batch)
    rule = predictor(workload, replace(c, prefetch_ctas=public))
    # The miss rate that was played: of a selection, not the grid's.
    workload = p.workload
    verdict = cell_verdict(workload, c, measured)
    return TableRow(
        context_tokens=workload.context_tokens,
        batch=workload.batch,
        miss_rate=workload.miss_rate,
        top_k=c.top_k,
        prefetch_ctas=c.prefetch_ctas,
        prefetch_warps=c.prefetch_warps,
        prefetch_stages=c.prefetch_stages,
        lookahead=c.lookahead,
        resident_blocks=c.resident_blocks,
        step_us=p.step_us,
        tokens_per_s=p.tokens_per_s,
        low=p.low,
        high=p.high,
        public_ctas=public,
        gain=p.tokens_per_s / rule.tokens_per_s - 1,
        tied_ctas=tuple(sorted({t.config.prefetch_ctas for t in best.ties})),
        inside=p.inside,
        fits=p.fits,
        limit_reason=p.limit_reason,
        confirmed=verdict.confirmed,
        measured_gain=verdict.gain_public,
        quality=p.quality,
        floor_reason=p.broken.reason,
    )
