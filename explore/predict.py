"""Predictions: a step played on a profile, with the profile's error band, envelope and memory limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sparda.calibrate.profile import Profile
from sparda.calibrate.quality import load_quality
from sparda.engine.config import Config, Workload
from sparda.engine.loader import to_plain
from sparda.engine.memory import Memory, memory_of
from sparda.engine.plan import Plan
from sparda.engine.policies import make_plan
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.explore.quality import Broken, Quality, QualityLookup, broken_by
from sparda.explore.scenario import Limits, Scenario
from sparda.explore.selection import RESIDENT_TIMES, Selection, load_selection
from sparda.explore.text import GIB, count
from sparda.sim.player import play


@dataclass(frozen=True, slots=True)
class Prediction:
    """One configuration on one workload. Times in microseconds, memory in GiB, speed in tokens per second.

    ``low`` and ``high`` bound tokens/s by the 90th percentile of the profile's held-out step errors; None where no
    step was held out, so that nothing is known of the error.
    """

    workload: Workload
    config: Config
    step_us: float
    tokens_per_s: float
    low: float | None
    high: float | None
    inside: bool
    outside_reasons: tuple[str, ...]
    fits: bool
    limit_reason: str
    gpu_gib: float
    pinned_gib: float
    gpu_over_gib: float
    """GiB above the GPU limit; negative where it fits."""
    pinned_over_gib: float
    quality: Quality | None = None
    """None where the scenario names no quality profile."""
    broken: Broken = field(default_factory=Broken)
    """Which floors of quality it breaks, and by how much."""

    @property
    def feasible(self) -> bool:
        """Whether it fits in memory and keeps every floor of quality."""
        return self.fits and not self.broken.reason

    def to_dict(self) -> dict[str, object]:
        return {**to_plain(self), "feasible": self.feasible}


def predict(
    profile: Profile,
    shape: ModelShape,
    spec: SparseSpec,
    workload: Workload,
    config: Config,
    limits: Limits | None = None,
) -> Prediction:
    """The predicted step of ``config`` on ``workload``.

    Too much memory is reported, not refused: the step's time is the same on a machine with enough of it.
    Raises SpardaError where the combination cannot be (top_k above the block count).
    """
    plan = make_plan(shape, spec, workload, config)
    timeline = play(plan, profile.costs)
    outside = tuple(profile.outside(plan))
    memory = memory_of(shape, spec, workload, config)
    gpu_limit, pinned_limit = limits_gib(profile, limits or Limits())
    gpu, pinned = memory.gpu_bytes / GIB, memory.pinned_bytes / GIB
    reason = _limit_reason(memory, gpu_limit, pinned_limit)
    speed, band = timeline.tokens_per_s, profile.band_of(config)
    return Prediction(
        workload=workload,
        config=config,
        step_us=timeline.step_us,
        tokens_per_s=speed,
        # The band is a share of the measured time, and tokens/s is its reciprocal: measured = predicted * (1 +- e).
        low=speed * max(0.0, 1 - band.p90) if band.count else None,
        high=speed * (1 + band.p90) if band.count else None,
        inside=not outside,
        outside_reasons=outside,
        fits=not reason,
        limit_reason=reason,
        gpu_gib=gpu,
        pinned_gib=pinned,
        gpu_over_gib=gpu - gpu_limit,
        pinned_over_gib=pinned - pinned_limit,
    )


def interval90_us(profile: Profile, plan: Plan) -> tuple[float, float] | None:
    """Microseconds between which nine measured steps of ten should lie, by what calibration left unexplained.

    None where nothing was left to judge by, and for steps that the host has work in, of which no residuals are kept.
    Plays the step on every draw: some 40 times as slow as a prediction.
    """
    intervals = profile.intervals if plan.config.path in ("", "uva") else None
    return intervals.of(plan) if intervals else None


def limits_gib(profile: Profile, limits: Limits) -> tuple[float, float]:
    """GPU and pinned host memory that may be used, GiB."""
    machine = profile.machine
    return (
        limits.gpu_gib or machine.hbm_capacity_bytes / GIB,
        limits.pinned_gib or machine.host_pinned_bytes / GIB,
    )


def _limit_reason(memory: Memory, gpu_limit: float, pinned_limit: float) -> str:
    needs = (
        ("GPU memory", memory.gpu_bytes / GIB, gpu_limit),
        ("pinned memory", memory.pinned_bytes / GIB, pinned_limit),
    )
    return "; ".join(
        f"{name}: {need:.1f} GiB needed, {limit:.1f} GiB there, {need - limit:.1f} GiB too much"
        for name, need, limit in needs
        if need > limit
    )


@dataclass(slots=True)
class Predictor:
    """``predict`` for one profile and model, remembering what it has already played."""

    profile: Profile
    shape: ModelShape
    spec: SparseSpec = field(default_factory=SparseSpec)
    limits: Limits = field(default_factory=Limits)
    quality: QualityLookup | None = None
    selection: Selection | None = None
    """Where it is given, the workload's miss rate is not read: that of a configuration follows from it."""
    played: int = 0
    """Steps simulated so far; less than the questions asked, since answers are kept."""
    _known: dict[tuple[Workload, Config], Prediction] = field(default_factory=dict)

    @classmethod
    def of(cls, profile: Profile, scenario: Scenario) -> Predictor:
        """As the scenario has it. Raises SpardaError where its quality profile or selection is not there."""
        scenario.require_quality()
        shape, spec = scenario.model_shape, SparseSpec()
        quality = QualityLookup(load_quality(scenario.quality), shape.name, spec) if scenario.quality else None
        selection = load_selection(scenario.selection) if scenario.selection else None
        return cls(profile, shape, spec, scenario.limits, quality, selection)

    def __call__(self, workload: Workload, config: Config) -> Prediction:
        """The prediction; ``workload`` of it has the miss rate that was played."""
        if self.selection:
            workload = replace(workload, miss_rate=self.selection.miss_rate(self.spec, workload, config))
        key = (workload, config)
        if key not in self._known:
            self._known[key] = self._predict(workload, config)
            self.played += 1
        return self._known[key]

    def _predict(self, workload: Workload, config: Config) -> Prediction:
        found = predict(self.profile, self.shape, self.spec, workload, config, self.limits)
        if self.selection and (beyond := self.selection.outside(self.spec, workload, config)):
            found = replace(found, inside=False, outside_reasons=(*found.outside_reasons, *beyond))
        if self.quality:
            quality = self.quality(workload, config)
            found = replace(found, quality=quality, broken=broken_by(quality, self.limits))
        return found

    def misses_from(self, context_tokens: int) -> str:
        """What the miss rates rest on, in words; empty where they are as stated."""
        return self.selection.tier(self.shape.name, context_tokens) if self.selection else ""

    @property
    def resident_times(self) -> tuple[float, ...]:
        """Slots for free picks over the free picks to try; none where no selection says what more of them spare."""
        return RESIDENT_TIMES if self.selection else ()

    def top_k_axis(self, workload: Workload, config: Config) -> tuple[int, ...]:
        """Values of top-k to search over; none where no quality says what fewer blocks cost."""
        if not self.quality:
            return ()
        return tuple(sorted({config.top_k, *self.quality.top_ks(workload, config)}))

    def lookaheads(self, config: Config) -> tuple[int, ...]:
        """Lookaheads whose cost in quality was measured; none without a quality profile."""
        return self.quality.lookaheads(config) if self.quality else ()


def prediction_label(config: Config) -> str:
    """The turned values of a configuration in a few words."""
    resident = f", {config.resident_blocks} resident" if config.resident_blocks else ""
    return (
        f"{count(config.prefetch_ctas, 'CTA')} x {count(config.prefetch_warps, 'warp')} x "
        f"{count(config.prefetch_stages, 'stage')}, "
        f"lookahead {config.lookahead}, top-k {config.top_k}{resident}"
    )


def config_dict(config: Config) -> dict[str, int | float | str]:
    """The configuration as plain values, keyed as rows and scenario files key it."""
    plain: Mapping[str, object] = to_plain(config)
    return {k: v for k, v in plain.items() if isinstance(v, int | float | str)}
