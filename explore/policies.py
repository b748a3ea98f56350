"""All policies side by side, from a profile's rows: what was measured in each cell, and what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparda.calibrate.cases import config_of, workload_of
from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Row
from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.loader import to_plain
from sparda.engine.memory import memory_of
from sparda.engine.shapes import ModelShape, SparseSpec, model_named
from sparda.explore.floor import Floor, floor_of
from sparda.explore.text import GIB
from sparda.sim.costs import Machine

MEASURE = "measure them with `sparda measure --parts policies --out FOLDER`"


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy on one workload. ``step_us`` is None where nothing was measured; ``fits``: in the GPU's memory.

    ``pinned_fits``: in the host's; where it does not, what was measured shared host blocks among sequences.
    """

    workload: Workload
    config: Config
    gpu_gib: float
    pinned_gib: float
    fits: bool
    pinned_fits: bool
    step_us: float | None
    misses_per_layer: float | None
    floor: Floor | None

    @property
    def label(self) -> str:
        """The policy, and its lookahead where that is not the usual 1."""
        ahead = self.config.lookahead
        return self.config.policy if ahead == 1 else f"{self.config.policy}, ahead {ahead}"

    @property
    def tokens_per_s(self) -> float | None:
        return self.workload.batch * 1e6 / self.step_us if self.step_us else None

    @property
    def floor_share(self) -> float | None:
        """The floor over what was measured: 1 where nothing could be faster."""
        return self.floor.us / self.step_us if self.floor and self.step_us else None

    @property
    def hbm_share(self) -> float | None:
        return self.floor.hbm_us / self.step_us if self.floor and self.step_us else None

    @property
    def link_share(self) -> float | None:
        return self.floor.link_us / self.step_us if self.floor and self.step_us else None

    def to_dict(self) -> dict[str, object]:
        shares = {"floor_share": self.floor_share, "hbm_share": self.hbm_share, "link_share": self.link_share}
        return {**to_plain(self), "label": self.label, "tokens_per_s": self.tokens_per_s, **shares}


@dataclass(frozen=True, slots=True)
class Residency:
    """One number of resident blocks where ``turnover`` of the free picks is replaced a step. Misses are counted.

    ``times``: slots for free picks over the free picks. ``missed``: share of the free picks that was fetched.
    """

    batch: int
    context_tokens: int
    turnover: float
    resident_blocks: int
    times: float
    gpu_gib: float
    step_us: float
    tokens_per_s: float
    misses_per_layer: float
    missed: float
    tail: float

    @property
    def expected(self) -> float:
        """``missed`` as the reuse states it."""
        return float(self.turnover * self.times**-self.tail)

    def to_dict(self) -> dict[str, object]:
        return {**to_plain(self), "expected": self.expected}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Cells in the order of contexts, policies and batches, measured or not; and the residency rows."""

    profile: str
    model: str
    machine: Machine
    cells: tuple[Cell, ...]
    residency: tuple[Residency, ...]

    @property
    def grids(self) -> list[tuple[int, float]]:
        """Contexts and miss rates."""
        return list(dict.fromkeys((c.workload.context_tokens, c.workload.miss_rate) for c in self.cells))

    @property
    def batches(self) -> list[int]:
        return sorted({c.workload.batch for c in self.cells})

    def grid(self, context: int, miss_rate: float) -> dict[str, dict[int, Cell]]:
        """Cells of one context by label and batch."""
        found: dict[str, dict[int, Cell]] = {}
        for c in self.cells:
            if (c.workload.context_tokens, c.workload.miss_rate) == (context, miss_rate):
                found.setdefault(c.label, {})[c.workload.batch] = c
        return found

    def at(self, batch: int, context: int) -> list[Cell]:
        """The cells of one batch and context. Raises SpardaError where none was measured."""
        found = [c for c in self.cells if (c.workload.batch, c.workload.context_tokens) == (batch, context)]
        if not any(c.step_us for c in found):
            contexts = sorted({c.workload.context_tokens for c in self.cells})
            raise SpardaError(
                f"no policy was measured at batch {batch} and {context} tokens; measured are the batches "
                f"{', '.join(map(str, self.batches))} at {', '.join(map(str, contexts))} tokens."
            )
        return found


def comparison(profile: Profile) -> Comparison:
    """What the profile's rows say. Raises SpardaError where it has no rows of policies, or a damaged one."""
    rows = profile.store.latest("policy")
    if not rows:
        raise SpardaError(f"{profile.label} has no rows of policies; {MEASURE} on its GPU.")
    shape, spec = model_named(profile.model), SparseSpec()
    measured = _fastest(rows)
    configs = {_variant(c): c for _, c in measured}
    order = sorted(configs, key=lambda v: (POLICIES.index(v[0]), v[1]))
    batches = sorted({w.batch for w, _ in measured})
    cells: list[Cell] = []
    for context, rate in sorted({(w.context_tokens, w.miss_rate) for w, _ in measured}):
        there = {_variant(c) for w, c in measured if (w.context_tokens, w.miss_rate) == (context, rate)}
        for variant in order:
            for batch in batches if variant in there else ():
                workload = Workload(batch, context, rate)
                config = next((c for w, c in measured if w == workload and _variant(c) == variant), configs[variant])
                cells.append(_cell(workload, config, measured.get((workload, config)), profile.machine, shape, spec))
    residency = tuple(_residency(r, shape, spec) for r in profile.store.latest("residency"))
    order_by = sorted(residency, key=lambda r: (r.context_tokens, r.batch, r.turnover, r.resident_blocks))
    return Comparison(profile.label, profile.model, profile.machine, tuple(cells), tuple(order_by))


def _variant(config: Config) -> tuple[str, int]:
    """What makes a row of the table of its own."""
    return config.policy, config.lookahead


def _fastest(rows: Sequence[Row]) -> dict[tuple[Workload, Config], Row]:
    """Rows by cell and configuration; of configurations that differ in less than policy and lookahead the fastest."""
    best: dict[tuple[Workload, tuple[str, int]], Row] = {}
    for row in rows:
        key = (workload_of(row), _variant(config_of(row)))
        if key not in best or row.us < best[key].us:
            best[key] = row
    return {(workload, config_of(row)): row for (workload, _), row in best.items()}


def _cell(
    workload: Workload, config: Config, row: Row | None, machine: Machine, shape: ModelShape, spec: SparseSpec
) -> Cell:
    memory = memory_of(shape, spec, workload, config)
    fetched = row.values.get("misses_per_layer") if row else None
    return Cell(
        workload=workload,
        config=config,
        gpu_gib=memory.gpu_bytes / GIB,
        pinned_gib=memory.pinned_bytes / GIB,
        fits=memory.gpu_bytes <= machine.hbm_capacity_bytes,
        pinned_fits=memory.pinned_bytes <= machine.host_pinned_bytes,
        step_us=row.us if row else None,
        misses_per_layer=fetched,
        floor=floor_of(shape, spec, workload, config, machine, fetched) if row else None,
    )


def _residency(row: Row, shape: ModelShape, spec: SparseSpec) -> Residency:
    config, batch, context = config_of(row), int(row.number("batch")), int(row.number("context_tokens"))
    if not batch or not context or "misses_per_layer" not in row.values:
        raise SpardaError(
            f"a residency row of session {row.session} lacks its batch, context or counted misses; remove the row or "
            "measure again."
        )
    free = config.top_k - spec.forced
    counted = row.values["misses_per_layer"]
    return Residency(
        batch=batch,
        context_tokens=context,
        turnover=row.number("turnover"),
        resident_blocks=config.slots,
        times=(config.slots - spec.forced) / free,
        gpu_gib=memory_of(shape, spec, Workload(batch, context), config).gpu_bytes / GIB,
        step_us=row.us,
        tokens_per_s=batch * 1e6 / row.us,
        misses_per_layer=counted,
        missed=counted / (batch * shape.kv_heads * free),
        tail=row.number("tail"),
    )
