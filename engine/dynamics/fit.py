"""Parameters of the generator, fitted to recorded choices: see ``generator.GeneratorParams`` for what each says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sparda.engine.dynamics.choices import Choices, Ints
from sparda.engine.dynamics.choices_code import encode, leave_ranks
from sparda.engine.dynamics.generator import generate
from sparda.engine.dynamics.generator_params import Floats, GeneratorParams, rows_of
from sparda.engine.dynamics.stack import Distances, stack_distances
from sparda.engine.errors import SpardaError

KINDS = (0.5, 0.25, 0.15, 0.07, 0.025, 0.005)
"""Kinds of steps, as shares of all, from those in which least moves to those in which most does."""

MOST_STRETCH = 1.5
"""Most that the variance between kinds of steps is raised by for what they do not tell apart."""

TRIALS, TRIAL_STEPS, WARM = 2, 512, 32
FEW = 100
"""Misses that are too few to correct a depth by: chance alone makes them."""

MOST_LAYERS = 32
AGES = 8
DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
BURST_DEPTHS = (0.0, 0.5, 1.0, 3.0)
"""Ratios, less 1, whose misses say together how much a step moves."""


def fit(recorded: Choices, *, skip: int | None = None) -> GeneratorParams:
    """Parameters of one trace, without its ``skip`` first steps (a quarter unless given).

    Raises SpardaError where nothing is freely chosen or too few steps are left to tell kinds of steps apart.
    """
    f = recorded.facts
    skip = recorded.steps // 4 if skip is None else skip
    if recorded.steps - skip < 32:
        raise SpardaError(f"{recorded.steps} steps, {skip} of them skipped; a fit wants at least 32 to be left.")
    # Without a slot to spare a rank is what the generator draws: top_k and the depth.
    distances = stack_distances(recorded, skip=skip, spare=0)
    if f.free < 1:
        raise SpardaError(
            f"top_k {f.top_k} has no free pick beside {f.forced} forced blocks; record with a higher one."
        )
    depths = _depths(distances)
    layers = np.array([distances.layer_shares(f.top_k + d) for d in depths]).T
    layers = np.minimum.accumulate(np.minimum(layers, 1.0), axis=1)
    kinds, weights, raw, scatter = _bursts(recorded, distances, depths)
    dispersion = _dispersion(distances, kinds, raw[:, 0])
    bursts = _without_chance(raw, weights, scatter, distances, depths, dispersion)
    params = GeneratorParams(
        source=f"{f.model}, {f.source}",
        block=f.block,
        init_blocks=f.init_blocks,
        local_blocks=f.local_blocks,
        top_k=f.top_k,
        context_tokens=int(np.mean(f.context_tokens)),
        ratio=tuple(1 + d / f.free for d in depths),
        layers=rows_of(_thinned(layers)),
        bursts=rows_of(bursts),
        weights=tuple(weights.tolist()),
        persistence=_persistence(kinds),
        dispersion=dispersion,
        head_spread=_head_spread(distances),
        stays=_stays(recorded, skip),
        leave=_leave(recorded, skip),
    )
    for _ in range(TRIALS):
        params = _corrected(params, distances, depths)
    return params


def _corrected(params: GeneratorParams, recorded: Distances, depths: Sequence[int]) -> GeneratorParams:
    """The parameters, shares of each depth changed by what a trace drawn from them misses too much or too little there.

    Blocks that enter together are distinct: where many do, some come from deeper than the law says.
    """
    f = recorded.facts
    trial = generate(
        params,
        steps=min(len(recorded.free), TRIAL_STEPS) + WARM,
        layers=len(f.layers),
        kv_heads=f.kv_heads,
        context_tokens=f.context_tokens[0],
        sequences=len(f.context_tokens),
    )
    found = stack_distances(trial, skip=WARM, spare=0)
    layers = np.array(params.layers)
    for column, depth in enumerate(depths):
        slots = f.top_k + depth
        wanted, drawn = recorded.share(slots) * found.free.sum(), found.missed(slots).sum()
        layers[:, column] *= (wanted + FEW) / (drawn + FEW)
    layers = np.minimum.accumulate(np.minimum(layers, 1.0), axis=1)
    return replace(params, layers=rows_of(layers))


def _depths(distances: Distances) -> list[int]:
    """Depths of the law: close where much comes from, to one deeper than anything did."""
    deepest = int(distances.rank.max(initial=distances.facts.top_k)) - distances.facts.top_k + 1
    return sorted({d for d in DEPTHS if d < deepest} | {deepest})


def _thinned(layers: Floats) -> Floats:
    """[L, K] with at most MOST_LAYERS rows, means of neighbours."""
    while len(layers) > MOST_LAYERS:
        odd = layers[-1:] if len(layers) % 2 else layers[:0]
        layers = np.concatenate([(layers[: len(layers) // 2 * 2 : 2] + layers[1 : len(layers) // 2 * 2 : 2]) / 2, odd])
    return layers


def _bursts(recorded: Choices, distances: Distances, depths: Sequence[int]) -> tuple[Ints, Floats, Floats, Floats]:
    """Kind of each step [steps, sequences] (-1 where it has ended), weights [C], factors [C, K], variances [K]."""
    f = distances.facts
    sequences = len(f.context_tokens)
    steps = recorded.steps - distances.skip
    sequence = distances.stream % f.heads // f.kv_heads
    place = (distances.step - distances.skip).astype(np.int64) * sequences + sequence

    def totals(depth: int) -> Floats:
        deep = distances.rank >= f.top_k + depth
        return np.bincount(place[deep], minlength=steps * sequences).astype(np.float64)

    live = (np.arange(steps)[:, None] + distances.skip < recorded.lengths()).ravel()
    score = np.zeros(steps * sequences)
    for ratio in BURST_DEPTHS:
        total = totals(round(ratio * f.free))
        score += total / max(total[live].mean(), 1e-9)
    order = np.flatnonzero(live)[np.argsort(score[live], kind="stable")]
    edges = np.rint(np.cumsum(KINDS) * len(order)).astype(np.int64)
    kinds = np.full(steps * sequences, -1, dtype=np.int64)
    kinds[order] = np.searchsorted(edges, np.arange(len(order)), side="right").clip(0, len(KINDS) - 1)
    weights = np.bincount(kinds[live], minlength=len(KINDS)) / len(order)
    factors = np.ones((len(KINDS), len(depths)))
    scatter = np.zeros(len(depths))
    for column, depth in enumerate(depths):
        total = totals(depth)
        mean = total[live].mean()
        scatter[column] = total[live].var()
        for kind in range(len(KINDS)):
            if weights[kind] and mean > 0:
                factors[kind, column] = total[kinds == kind].mean() / mean
    return kinds.reshape(steps, sequences), np.asarray(weights), factors, scatter


def _without_chance(
    factors: Floats,
    weights: Floats,
    scatter: Floats,
    distances: Distances,
    depths: Sequence[int],
    dispersion: float,
) -> Floats:
    """Factors [C, K] less far from 1: steps in which much moves owe some of it to the chance that each stream draws by.

    The generator draws that chance anew; what a step's totals vary beyond it is what streams have in common.
    """
    f = distances.facts
    found = factors.copy()
    for column, depth in enumerate(depths):
        # Of a mean step and sequence; each stream's number is about binomial.
        mean = distances.missed(f.top_k + depth) / max(1, len(distances.free))
        chance = float((mean * (1 - mean / f.free)).sum()) / len(f.context_tokens)
        chance *= 1 + (f.free - 1) * dispersion
        between = float((weights * (factors[:, column] - 1) ** 2).sum()) * (mean.sum() / len(f.context_tokens)) ** 2
        common = max(0.0, scatter[column] - chance) / between if between > 0 else 0.0
        found[:, column] = np.maximum(0.0, 1 + (factors[:, column] - 1) * np.sqrt(min(common, MOST_STRETCH)))
    # Those below 0 were raised: the mean is to stay what it was.
    return np.asarray(found / np.maximum(weights @ found, 1e-9))


def _persistence(kinds: Ints) -> float:
    """Correlation of the kinds of neighbouring steps."""
    now, before = kinds[1:].ravel(), kinds[:-1].ravel()
    both = (now >= 0) & (before >= 0)
    if both.sum() < 2 or not now[both].std() or not before[both].std():
        return 0.0
    return float(np.clip(np.corrcoef(now[both], before[both])[0, 1], 0.0, 0.95))


def _replaced(distances: Distances) -> Floats:
    """float64 [steps, streams]: blocks that enter."""
    shape = distances.free.shape
    flat = (distances.step - distances.skip).astype(np.int64) * shape[1] + distances.stream
    return np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape).astype(np.float64)


def _dispersion(distances: Distances, kinds: Ints, factors: Floats) -> float:
    """What the numbers of a stream vary beyond binomial ones of its mean and the kind of the step (by moments)."""
    f = distances.facts
    found = _replaced(distances)
    factor = np.where(kinds >= 0, factors[kinds], 0.0)
    per_stream = np.tile(np.repeat(factor, f.kv_heads, axis=1), (1, len(f.layers)))
    rate = found.sum(0) / np.maximum(distances.free.sum(0), 1)
    mean = np.minimum(rate * per_stream * distances.free, distances.free)
    binomial = (mean * (1 - mean / np.maximum(distances.free, 1))).sum()
    if f.free < 2 or not binomial:
        return 0.0
    excess = ((found - mean) ** 2).sum() / binomial - 1
    return float(np.clip(excess / (f.free - 1), 0.0, 0.9))


def _head_spread(distances: Distances) -> float:
    """Relative deviation between the heads of a layer of what they replace, beyond what chance makes of it."""
    f = distances.facts
    if f.heads < 2:
        return 0.0
    found = _replaced(distances).sum(0).reshape(len(f.layers), f.heads)
    mean = found.mean(1)
    between = found.var(1, ddof=1)
    some = mean > 0
    if not some.any():
        return 0.0
    return float(min(4.0, np.sqrt(np.mean(np.maximum(0.0, between - mean)[some] / mean[some] ** 2))))


def _stays(recorded: Choices, skip: int) -> float:
    """Of the blocks that leave the local window, the share that is chosen in that very step."""
    f = recorded.facts
    existing = recorded.per_stream(recorded.existing())
    born = existing[1:] > existing[:-1]
    out = existing[1:] - 1 - f.local_blocks - 1
    counted = (born & (out >= f.init_blocks) & (existing[1:] > f.top_k) & (recorded.blocks[1:, ..., 0] >= 0))[skip:]
    kept = (recorded.blocks[1:] == out[..., None]).any(-1)[skip:]
    return float(kept[counted].mean()) if counted.any() else 0.0


def _leave(recorded: Choices, skip: int) -> tuple[float, ...]:
    """Weights of the ages at which free picks leave, newest first, of mean 1."""
    f = recorded.facts
    free: npt.NDArray[np.int16] = np.where(recorded.forced(), np.int16(-1), recorded.blocks)
    free = np.sort(free.view(np.uint16), axis=-1).view(np.int16)[skip:]
    place = leave_ranks(encode(free.reshape(len(free), -1, f.top_k), recorded.room)) * AGES // max(1, f.free)
    counts = np.bincount(place[(place >= 0) & (place < AGES)], minlength=AGES).astype(np.float64)
    if f.free < AGES or not counts.sum():
        return (1.0,)
    width = np.bincount(np.arange(f.free) * AGES // f.free, minlength=AGES)
    weights = counts / width
    return tuple(np.round(weights / weights.mean(), 6).tolist())
