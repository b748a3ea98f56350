"""What a report shows, computed: the answer, held-out steps, CTA curves, one step's timeline, the top-k front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparda.calibrate.cases import config_of, workload_of
from sparda.calibrate.holdout import HeldOut, error_band
from sparda.calibrate.judged import ErrorBand
from sparda.calibrate.profile import Profile
from sparda.calibrate.quality import QualityProfile, load_quality
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.policies import make_plan
from sparda.engine.shapes import model_named
from sparda.explore.cells import cell_key, cell_verdict, public_ctas
from sparda.explore.front import SPEED_AND_PPL, front_of
from sparda.explore.predict import Prediction, Predictor
from sparda.explore.scenario import Scenario
from sparda.explore.space import Choice, Space, enumerate_space, noise_of, pick
from sparda.explore.table import CtaTable, cta_table
from sparda.explore.text import misses
from sparda.explore.validate import Summary, summary
from sparda.sim.player import play
from sparda.sim.timeline import Timeline

TOP_K = (64, 80, 96, 128, 192)
"""Block budgets that the front tries where the grid names none."""


@dataclass(frozen=True, slots=True)
class Held:
    """A measured step beside its prediction. ``error`` is predicted over measured, less 1."""

    row: Row
    workload: Workload
    config: Config
    predicted_us: float

    @property
    def error(self) -> float:
        return self.predicted_us / self.row.us - 1


@dataclass(frozen=True, slots=True)
class Curve:
    """Predicted steps of one workload over the CTA count, all else as chosen, and rows measured just so."""

    choice: Choice
    points: tuple[Prediction, ...]
    public: Prediction
    measured: tuple[tuple[Config, Row], ...]

    @property
    def gain(self) -> float:
        """Predicted tokens/s of the chosen count over the public rule's, less 1."""
        return self.choice.best.tokens_per_s / self.public.tokens_per_s - 1


@dataclass(frozen=True, slots=True)
class Report:
    """All of it. ``answer`` is the curve of the scenario's own workload; ``rule_step`` its public-rule timeline."""

    profile: Profile
    scenario: Scenario
    table: CtaTable
    measured: Summary
    answer: Curve
    held: tuple[Held, ...]
    curves: tuple[Curve, ...]
    step: Timeline
    rule_step: Timeline
    fronts: tuple[tuple[float, tuple[Prediction, ...]], ...]
    rows: tuple[Row, ...]
    quality: QualityProfile | None = None
    """That of the scenario, or that of its selection."""
    trade: tuple[Prediction, ...] = ()
    """The front of speed against the increase of perplexity, most lost first; empty where that is not known."""

    def misses(self, rate: float) -> str:
        """A stated miss rate in words, or that it follows from what is resident."""
        return "the misses of its resident blocks" if self.table.selection else f"{misses(rate)} misses"


def collect(profile: Profile, scenario: Scenario) -> Report:
    """Predict everything, each step once. Raises SpardaError where the scenario or a row cannot be."""
    predictor = Predictor.of(profile, scenario)
    same_model = scenario.model_name == profile.model
    # Measured steps had the misses that their rows state, whatever the scenario takes its own from.
    known = predictor if same_model and not scenario.selection else Predictor(profile, model_named(profile.model))
    rows = profile.store.rows()
    steps = _latest(rows)
    own_steps = steps if same_model else ()
    table = cta_table(profile, scenario, predictor)
    w = scenario.workload
    answer = _curve(predictor, scenario, w, own_steps)
    batches = [replace(w, batch=b) for b in scenario.grid.batch]
    rates = [w.miss_rate] if scenario.selection else sorted({*scenario.grid.miss_rate, w.miss_rate})
    named = scenario.quality or scenario.selection
    return Report(
        profile=profile,
        scenario=scenario,
        table=table,
        measured=_judged(table, rows if same_model else ()),
        answer=answer,
        held=tuple(_held(known, row) for row in steps if row.us > 0),
        curves=tuple(answer if b == w else _curve(predictor, scenario, b, own_steps) for b in batches),
        step=_played(predictor, answer.choice.best),
        rule_step=_played(predictor, answer.public),
        fronts=tuple((m, _front(predictor, scenario, m)) for m in rates),
        rows=tuple(rows),
        quality=load_quality(named) if named else None,
        trade=_trade(predictor, scenario) if scenario.quality else (),
    )


def _latest(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The last step or validation row of every case: whole steps, which no cost is fitted to."""
    return tuple({r.key: r for r in rows if r.kind in ("step", "validation")}.values())


def _judged(table: CtaTable, rows: Sequence[Row]) -> Summary:
    """What measurements say of the table's own choices."""
    found = []
    for r in table.rows:
        chosen = r.config(table.policy)
        found.append(cell_verdict(r.workload, chosen, rows))
    return summary(found)


def _held(predictor: Predictor, row: Row) -> Held:
    try:
        workload, config = workload_of(row), config_of(row)
        return Held(row, workload, config, predictor(workload, config).step_us)
    except SpardaError as e:
        raise SpardaError(f"{predictor.profile.label}: {e}") from None


def _curve(predictor: Predictor, scenario: Scenario, workload: Workload, rows: Sequence[Row]) -> Curve:
    space = Space.of_table(scenario.grid, scenario.config, predictor.resident_times)
    choice = pick(enumerate_space(predictor, space, workload, scenario.config), noise_of(predictor.profile))
    chosen, rule = choice.best.config, public_ctas(workload.batch)
    workload = choice.best.workload
    counts = sorted({*space.prefetch_ctas, rule})
    return Curve(
        choice=choice,
        points=tuple(predictor(workload, replace(chosen, prefetch_ctas=n)) for n in counts),
        public=predictor(workload, replace(chosen, prefetch_ctas=rule)),
        measured=tuple((config_of(r), r) for r in rows if _on_curve(r, workload, chosen)),
    )


def _on_curve(row: Row, workload: Workload, chosen: Config) -> bool:
    if cell_key(workload_of(row)) != cell_key(workload):
        return False
    config = config_of(row)
    like = replace(config, prefetch_ctas=chosen.prefetch_ctas, resident_blocks=chosen.resident_blocks)
    return like == chosen and config.slots == chosen.slots


def _played(predictor: Predictor, p: Prediction) -> Timeline:
    return play(make_plan(predictor.shape, predictor.spec, p.workload, p.config), predictor.profile.costs)


def _front(predictor: Predictor, scenario: Scenario, miss_rate: float) -> tuple[Prediction, ...]:
    """The choice at each block budget that can be, smallest budget first."""
    workload, base = replace(scenario.workload, miss_rate=miss_rate), scenario.config
    budgets = sorted({*(scenario.grid.top_k or TOP_K), base.top_k})
    found = []
    for top_k in budgets:
        space = replace(Space.of_table(scenario.grid, base, predictor.resident_times), top_k=(top_k,))
        try:
            predictions = enumerate_space(predictor, space, workload, base)
        except SpardaError:
            continue  # above the context's blocks, below those always chosen, or above the resident slots
        found.append(pick(predictions, noise_of(predictor.profile)).best)
    return tuple(found)


def _trade(predictor: Predictor, scenario: Scenario) -> tuple[Prediction, ...]:
    """Over every measured top-k and lookahead, all else as a table tries it."""
    workload, base, grid = scenario.workload, scenario.config, scenario.grid
    space = replace(
        Space.of_table(grid, base, predictor.resident_times),
        top_k=grid.top_k or predictor.top_k_axis(workload, base),
        lookahead=grid.lookahead or predictor.lookaheads(base) or (base.lookahead,),
    )
    found = enumerate_space(predictor, space, workload, base)
    return front_of(found, noise_of(predictor.profile), SPEED_AND_PPL)


def undominated(points: Sequence[Prediction]) -> list[Prediction]:
    """Those that no larger budget outruns, smallest budget first."""
    best: list[Prediction] = []
    for p in sorted(points, key=lambda p: -p.config.top_k):
        if not best or p.tokens_per_s > best[-1].tokens_per_s:
            best.append(p)
    return best[::-1]


def band_of(held: Sequence[Held]) -> ErrorBand | None:
    """Errors of these steps as a profile states them; None without steps."""
    if not held:
        return None
    return error_band([HeldOut(h.workload, h.config, h.row.us, h.predicted_us, h.row.spread) for h in held])
