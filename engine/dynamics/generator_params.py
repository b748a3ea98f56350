"""What a generated selection trace follows: shares by depth, layer and kind of step; and the mean of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, read_json, write_json

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GeneratorParams:
    """What a generated trace follows. Shares are of the free picks; K depths, L layers, C kinds of steps.

    ``ratio`` [K]: depths as ``MissCurve`` counts them, from 1. ``layers`` [L][K]: mean share that comes from that deep
    or deeper; the first is what is replaced at all. Layers of another number take theirs by relative place.
    ``bursts`` [C][K]: factors of those shares in each kind of steps, which are ``weights`` [C] of all, those in which
    most moves last; ``persistence``: correlation of the kinds of neighbouring steps. ``dispersion``: correlation of a
    stream's replacements within a step, 0 for a binomial number. ``head_spread``: relative deviation between the heads
    of a layer. ``stays``: share of the blocks leaving the local window that are then freely chosen. ``leave``: weight
    of a free pick for leaving, by its age, newest first, in bins of as many picks each. ``block``, ``init_blocks``,
    ``local_blocks``, ``top_k`` and ``context_tokens``: those of the source.
    """

    source: str
    block: int
    init_blocks: int
    local_blocks: int
    top_k: int
    context_tokens: int
    ratio: tuple[float, ...]
    layers: tuple[tuple[float, ...], ...]
    bursts: tuple[tuple[float, ...], ...] = field(default=())
    weights: tuple[float, ...] = (1.0,)
    persistence: float = 0.0
    dispersion: float = 0.0
    head_spread: float = 0.0
    stays: float = 0.0
    leave: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        k = len(self.ratio)
        if k < 2 or self.ratio[0] != 1.0 or any(b <= a for a, b in pairwise(self.ratio)):
            raise SpardaError(f"ratio of a generator is {list(self.ratio)}; give two or more, ascending from 1.")
        if not self.layers or any(not _falls(row, k) or row[0] > 1 for row in self.layers):
            raise SpardaError(
                f"layers of a generator have shares that do not fall from at most 1 to at least 0, {k} of them each; "
                "fit it anew with `sparda trace fit`."
            )
        if len(self.weights) != max(1, len(self.bursts)) or any(len(row) != k for row in self.bursts):
            raise SpardaError(
                f"bursts of a generator are {len(self.bursts)} rows with {len(self.weights)} weights; give as many of "
                f"one as of the other, {k} factors a row."
            )
        if min(*self.weights, *self.leave, 0.0) < 0 or not sum(self.weights) or not sum(self.leave):
            raise SpardaError("weights and leave of a generator must be 0 or more, and not all of them 0.")
        for name in ("persistence", "dispersion", "stays"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise SpardaError(f"{name} of a generator is {getattr(self, name)}; allowed are 0 to 1.")
        if not 0.0 <= self.head_spread <= 4.0:
            raise SpardaError(f"head_spread of a generator is {self.head_spread}; allowed are 0 to 4.")


def _falls(row: tuple[float, ...], length: int) -> bool:
    return len(row) == length and row[-1] >= 0.0 and all(b <= a for a, b in pairwise(row))


def read_params(path: str | Path) -> GeneratorParams:
    """Parameters from a JSON file. Raises SpardaError where it is missing or holds something else."""
    return read(GeneratorParams, read_json(path), where=str(path))


def write_params(path: str | Path, params: GeneratorParams) -> None:
    """Write parameters as JSON, whole or not at all."""
    write_json(path, params)


def merged(fitted: Sequence[GeneratorParams]) -> GeneratorParams:
    """One set of parameters for several traces of the same geometry: means, depth by depth.

    Raises SpardaError where they differ in blocks, forced blocks, top_k or the number of layers.
    """
    first = fitted[0]
    for name in ("block", "init_blocks", "local_blocks", "top_k"):
        if len({getattr(p, name) for p in fitted}) > 1:
            raise SpardaError(
                f"traces whose {name} are {', '.join(str(getattr(p, name)) for p in fitted)} have no fit in common; "
                "fit those that are alike."
            )
    if len({len(p.layers) for p in fitted}) > 1:
        raise SpardaError("traces of models that differ in layers have no fit in common; fit each model alone.")
    ratio = max((p.ratio for p in fitted), key=lambda r: r[-1])

    def mean(rows: Sequence[Floats]) -> Floats:
        return np.asarray(np.mean(rows, axis=0), dtype=np.float64)

    def number(name: str) -> float:
        return float(np.mean([getattr(p, name) for p in fitted]))

    return GeneratorParams(
        source="; ".join(dict.fromkeys(p.source for p in fitted)),
        block=first.block,
        init_blocks=first.init_blocks,
        local_blocks=first.local_blocks,
        top_k=first.top_k,
        context_tokens=round(number("context_tokens")),
        ratio=ratio,
        layers=rows_of(mean([_at(p.ratio, p.layers, ratio) for p in fitted])),
        bursts=rows_of(mean([_at(p.ratio, p.bursts, ratio) for p in fitted])),
        weights=tuple(mean([np.array(p.weights) for p in fitted]).tolist()),
        persistence=number("persistence"),
        dispersion=number("dispersion"),
        head_spread=number("head_spread"),
        stays=number("stays"),
        leave=tuple(mean([np.array(p.leave) for p in fitted]).tolist()),
    )


def rows_of(values: Floats) -> tuple[tuple[float, ...], ...]:
    """An array [R, K] as parameters hold it."""
    return tuple(tuple(round(v, 7) for v in row) for row in values.tolist())


def _at(ratio: Sequence[float], rows: Sequence[Sequence[float]], at: Sequence[float]) -> Floats:
    return np.array([np.interp(at, ratio, row) for row in rows])
