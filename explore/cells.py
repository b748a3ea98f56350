"""Cells of a validation: what was chosen, what was measured there, and whether the measurement agrees.

Nothing here simulates: the machine that measures needs no simulator, it reads predictions from a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sparda.calibrate.cases import config_of, workload_of
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload

TOLERANCE = 0.03
"""A chosen configuration is confirmed when its measured step takes at most 3 % longer than the best measured."""

NOT_RUN = "-"

JUDGING = ("validation", "step")
"""Kinds of rows that judge a choice: the runs of a validation, interleaved and repeated; or, where none has the chosen
configuration, whole steps that one session measured one after the other."""


def public_ctas(batch: int) -> int:
    """CTAs that the public SparDA launcher gives an H100: 16 up to batch 16, else 32.

    The same launcher gives 16 to every GPU it does not know.
    """
    return 16 if batch <= 16 else 32


def cell_key(workload: Workload) -> tuple[int, int, float]:
    """Identity of a cell: batch, context, and the miss rate to a millionth (rows carry it through JSON)."""
    return workload.batch, workload.context_tokens, round(workload.miss_rate, 6)


def _same(a: Config, b: Config) -> bool:
    """Whether two configurations run the same: ``resident_blocks`` 0 and top_k are one setting."""
    return {**a.settings, "resident_blocks": a.slots} == {**b.settings, "resident_blocks": b.slots}


@dataclass(frozen=True, slots=True)
class Run:
    """One configuration of a cell. Times in microseconds; ``error`` is predicted over measured, less 1."""

    config: Config
    predicted_us: float | None
    measured_us: float | None
    spread: float | None
    chosen: bool

    @property
    def error(self) -> float | None:
        if self.predicted_us is None or not self.measured_us:
            return None
        return self.predicted_us / self.measured_us - 1


@dataclass(frozen=True, slots=True)
class CellVerdict:
    """A cell after measuring. ``regret`` is the chosen configuration's time over the best measured, less 1.

    Gains are measured tokens/s of the chosen over the same configuration with 16, 32 and the public rule's CTAs.
    """

    workload: Workload
    chosen: Config
    best: Config | None
    regret: float | None
    gain_16: float | None
    gain_32: float | None
    gain_public: float | None
    runs: tuple[Run, ...] = field(default=())

    @property
    def confirmed(self) -> str:
        if self.regret is None:
            return NOT_RUN
        return "yes" if self.regret <= TOLERANCE else "no"

    @property
    def error(self) -> float | None:
        """Prediction error of the chosen configuration."""
        return next((r.error for r in self.runs if r.chosen), None)


def cell_verdict(
    workload: Workload, chosen: Config, rows: Sequence[Row], predicted: Sequence[tuple[Config, float]] = ()
) -> CellVerdict:
    """Judge ``chosen`` by the rows of its cell (same workload, policy and top_k, one session).

    ``predicted`` holds (configuration, microseconds). Times of two sessions are not compared: the clocks and the
    host may differ by more than what is judged.
    """
    here = _one_session(_rows_of(workload, chosen, rows), chosen)
    measured = [(config_of(r), r) for r in here]

    def row_of(config: Config) -> Row | None:
        return next((r for c, r in measured if _same(c, config)), None)

    known = [c for c, _ in predicted]
    configs = known + [c for c, _ in measured if not any(_same(c, k) for k in known)]
    runs = []
    for config in configs:
        row = row_of(config)
        runs.append(
            Run(
                config=config,
                predicted_us=next((us for c, us in predicted if _same(c, config)), None),
                measured_us=row.us if row else None,
                spread=row.spread if row else None,
                chosen=_same(config, chosen),
            )
        )
    own = row_of(chosen)
    best = min(here, key=lambda r: r.us, default=None)

    def gain(ctas: int) -> float | None:
        # "All else equal": the other CTA count with the chosen lookahead, warps and stages.
        other = next((r for c, r in measured if _same(c, _with_ctas(chosen, ctas))), None)
        return other.us / own.us - 1 if own and other else None

    return CellVerdict(
        workload=workload,
        chosen=chosen,
        best=config_of(best) if best and own else None,
        regret=own.us / best.us - 1 if own and best else None,
        gain_16=gain(16),
        gain_32=gain(32),
        gain_public=gain(public_ctas(workload.batch)),
        runs=tuple(runs),
    )


def _with_ctas(config: Config, ctas: int) -> Config:
    return replace(config, prefetch_ctas=ctas)


def _rows_of(workload: Workload, chosen: Config, rows: Sequence[Row]) -> list[Row]:
    key = cell_key(workload)
    here = [r for r in rows if r.kind in JUDGING and cell_key(workload_of(r)) == key]
    return [r for r in here if (config_of(r).policy, config_of(r).top_k) == (chosen.policy, chosen.top_k)]


def _one_session(rows: Sequence[Row], chosen: Config) -> list[Row]:
    """The rows of one kind of the session that measured the chosen configuration: a validation's before whole steps,
    then those among most others, then the newest.
    """
    by_session: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_session.setdefault((row.session, row.kind), {})[row.key] = row
    if not by_session:
        return []

    def worth(item: tuple[int, list[Row]]) -> tuple[bool, bool, int, int]:
        order, found = item
        own = any(_same(config_of(r), chosen) for r in found)
        return own, found[0].kind == JUDGING[0], len(found), order

    return max(enumerate(list(found.values()) for found in by_session.values()), key=worth)[1]
