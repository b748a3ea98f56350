"""The space of configurations: enumeration (the oracle) and the choice among predictions that tie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import Any

from sparda.calibrate.profile import Profile
from sparda.engine.config import Config, Workload, check_fits
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.explore.predict import Prediction, Predictor
from sparda.explore.scenario import CTA_COUNTS, Grid

LEAST_NOISE = 0.005
"""Two step times closer than half a percent are never told apart, however quiet the machine was."""


@dataclass(frozen=True, slots=True)
class Space:
    """Values to try for each knob. ``resident_blocks`` 0 means "as many as top_k".

    ``resident_times``: slots for free picks over the free picks of the top_k that goes with them, as a miss curve
    counts them; where there are any, ``resident_blocks`` is not read.
    """

    prefetch_ctas: tuple[int, ...] = CTA_COUNTS
    prefetch_warps: tuple[int, ...] = (1,)
    prefetch_stages: tuple[int, ...] = (4, 8, 12)
    lookahead: tuple[int, ...] = (0, 1, 2)
    top_k: tuple[int, ...] = (96,)
    resident_blocks: tuple[int, ...] = (0,)
    resident_times: tuple[float, ...] = ()

    @classmethod
    def of_table(cls, grid: Grid, config: Config, resident_times: tuple[float, ...] = ()) -> Space:
        """The space of one table cell: CTA counts and a lookahead of 1 or 2, the rest as configured.

        ``resident_times``: what to try where neither the grid nor the configuration says how many are resident.
        """
        space = cls._filled(grid, config, {"lookahead": (1, 2)})
        return replace(space, resident_times=resident_times) if _unsaid(grid, config) else space

    @classmethod
    def of_search(cls, grid: Grid, config: Config) -> Space:
        """The space of a search on one workload: every knob that leaves the chosen blocks as they are.

        top_k stays as configured: fewer blocks are always faster, and no simulator can say what they cost in
        quality. ``of_predictor`` is for where a quality profile says it.
        """
        own = cls()
        defaults = {n: getattr(own, n) for n in ("prefetch_warps", "prefetch_stages", "lookahead")}
        return cls._filled(grid, config, defaults)

    @classmethod
    def of_predictor(cls, grid: Grid, predictor: Predictor, workload: Workload, config: Config) -> Space:
        """The space of a search with what the predictor knows: top-k and every measured lookahead with a quality
        profile, resident blocks with a selection.
        """
        space = cls.of_search(grid, config)
        top_k = predictor.top_k_axis(workload, config)
        lookahead = tuple(sorted({*space.lookahead, *predictor.lookaheads(config)}))
        return replace(
            space,
            top_k=grid.top_k or top_k or space.top_k,
            lookahead=grid.lookahead or lookahead,
            resident_times=predictor.resident_times if _unsaid(grid, config) else (),
        )

    @classmethod
    def _filled(cls, grid: Grid, config: Config, defaults: dict[str, tuple[int, ...]]) -> Space:
        names = [f.name for f in fields(cls) if f.name != "resident_times"]
        return cls(**{n: getattr(grid, n) or defaults.get(n, (getattr(config, n),)) for n in names})

    @property
    def size(self) -> int:
        return prod(map(len, self.axes.values()))

    @property
    def axes(self) -> dict[str, tuple[int, ...] | tuple[float, ...]]:
        """Names and values of what is tried."""
        unread = "resident_blocks" if self.resident_times else "resident_times"
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != unread}

    def configs(self, shape: ModelShape, spec: SparseSpec, workload: Workload, base: Config) -> Iterator[Config]:
        """Every configuration that can be; the policy is ``base``'s.

        Raises SpardaError, with the first reason, where not one can be.
        """
        axes, seen, reason = self.axes, set[Config](), ""
        for values in product(*axes.values()):
            try:
                config = config_at(base, dict(zip(axes, values, strict=True)), spec, workload)
                check_fits(shape, spec, workload, config)
            except SpardaError as e:
                reason = reason or str(e)
                continue
            if config not in seen:
                seen.add(config)
                yield config
        if not seen:
            raise SpardaError(
                f"no configuration of the grid is possible: {reason or 'the space is empty; give each axis a value.'}"
            )


def _unsaid(grid: Grid, config: Config) -> bool:
    """Whether neither says how many blocks are resident, and it matters: something is fetched."""
    return bool(config.path) and not grid.resident_blocks and not config.resident_blocks


def config_at(base: Config, values: Mapping[str, int | float], spec: SparseSpec, workload: Workload) -> Config:
    """``base`` with the values of a point of a space. Raises SpardaError where they cannot be together."""
    times = values.get("resident_times")
    known: dict[str, Any] = {n: v for n, v in values.items() if n != "resident_times"}
    if times is not None:
        top_k, blocks = known.get("top_k", base.top_k), spec.blocks(workload.context_tokens)
        forced = min(spec.forced, blocks)
        # Rounded down: a miss curve reaches as far as its last ratio. More than all blocks are as good as all.
        slots = min(forced + int(times * max(0, top_k - forced)), max(top_k, blocks))
        known["resident_blocks"] = 0 if slots <= top_k else slots
    return replace(base, **known)


def enumerate_space(
    predictor: Predictor,
    space: Space,
    workload: Workload,
    base: Config,
    each: Callable[[], None] = lambda: None,
) -> list[Prediction]:
    """A prediction of every possible configuration: the oracle that searches are held to."""
    found = []
    for config in space.configs(predictor.shape, predictor.spec, workload, base):
        found.append(predictor(workload, config))
        each()
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen prediction, the fastest one, and all that cannot be told from the fastest, fewest CTAs first.

    ``fitting``: how many of those considered are feasible, in memory and, where there are floors, in quality.
    """

    best: Prediction
    fastest: Prediction
    ties: tuple[Prediction, ...]
    noise: float
    considered: int
    fitting: int


def noise_of(profile: Profile) -> float:
    """Relative difference of step times below which two configurations tie: the run-to-run spread."""
    return max(LEAST_NOISE, profile.band.spread)


def pick(predictions: Sequence[Prediction], noise: float) -> Choice:
    """The fewest CTAs among those within ``noise`` of the fastest; then the shortest lookahead, the most blocks read,
    the fewest resident ones, then the fastest.

    What does not fit in memory is chosen only where nothing fits, what breaks a floor of quality only where nothing
    keeps it, and then the nearest to it; the choice says so (``best.feasible``).
    CTAs that copy are CTAs that do not compute for anyone else, and a longer lookahead keeps more layers on the GPU
    and chooses on older evidence, so speed that noise could explain buys neither.
    """
    if not predictions:
        raise SpardaError("nothing to choose from: no configuration was predicted; widen the grid.")
    feasible = [p for p in predictions if p.feasible]
    pool = feasible or _nearest(predictions)
    fastest = max(pool, key=lambda p: p.tokens_per_s)
    ties = [p for p in pool if p.tokens_per_s >= fastest.tokens_per_s * (1 - noise)]
    ties.sort(key=lambda p: (*_order(p.config), -p.tokens_per_s))
    return Choice(ties[0], fastest, tuple(ties), noise, len(predictions), len(feasible))


def _order(config: Config) -> tuple[int, int, int, int]:
    return config.prefetch_ctas, config.lookahead, -config.top_k, config.slots


def _nearest(predictions: Sequence[Prediction]) -> Sequence[Prediction]:
    """Where nothing is feasible: what keeps the floors without fitting, else what breaks them least."""

    def missing(p: Prediction) -> float:
        return max(0.0, p.broken.recall_short) + max(0.0, p.broken.ppl_over)

    least = min(map(missing, predictions))
    nearest = [p for p in predictions if missing(p) == least]
    return [p for p in nearest if p.fits] or nearest
