"""What ``sparse`` chooses step after step on a text that is read densely, and how often each distance is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparda.calibrate.measure.quality.blocks import ranked
from sparda.calibrate.measure.quality.view import View
from sparda.calibrate.measure.quality.window import Prefix, run_window
from sparda.calibrate.quality import Dynamics
from sparda.engine.dynamics.choices import Choices, TraceFacts
from sparda.engine.dynamics.curve import MissCurve
from sparda.engine.dynamics.overlap import overlap, reuse, spread
from sparda.engine.dynamics.stack import QUANTILES, stack_distances
from sparda.engine.shapes import SparseSpec
from sparda.engine.weights import Weights

RATIOS = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Slots over top-k that misses are reported at."""

Sets = npt.NDArray[np.int16]
Counts = npt.NDArray[np.int64]


def sparse_sets(weights: Weights, spec: SparseSpec, prefix: Prefix, ids: Tensor, top_k: int) -> Sets:
    """Block ids that ``sparse`` chooses, best first, forced ones before all: [steps, layers, heads, top_k].

    The sets of a smaller top-k are the first of these. -1 where there are fewer blocks.
    """
    found: list[Tensor] = []

    def watch(view: View) -> None:
        grid = view.grid
        order = ranked(grid.with_forced(view.sparse), top_k)
        exists = grid.existing.expand(len(order), -1, -1).gather(-1, order)
        order = torch.nn.functional.pad(order.masked_fill(~exists, -1), (0, top_k - order.shape[-1]), value=-1)
        found.append(order.to(torch.int16).cpu())

    run_window(weights, spec, prefix, ids, watch, loss=False)
    sets: Sets = torch.stack(found).permute(2, 0, 1, 3).contiguous().numpy()
    return sets


def distance_counts(sets: Sets, start: int, spec: SparseSpec, top_k: int) -> tuple[Counts, Counts]:
    """How often each distance from the query's own block was chosen freely, [L, H, M], and could have been, [M]."""
    steps, layers, heads, _ = sets.shape
    chosen = sets[..., :top_k].astype(np.int64)
    own = (start + np.arange(steps)) // spec.block
    distance = own[:, None, None, None] - chosen
    free = (chosen >= spec.init_blocks) & (distance > spec.local_blocks)
    blocks = int(own[-1]) + 1
    stream = (np.arange(layers)[:, None] * heads + np.arange(heads))[None, :, :, None]
    counts = np.bincount((stream * blocks + distance)[free], minlength=layers * heads * blocks)
    apart = np.arange(blocks)
    possible = ((own[:, None] - apart >= spec.init_blocks) & (apart > spec.local_blocks)).sum(0)
    return counts.reshape(layers, heads, blocks), possible


def distance_shares(others: Sequence[tuple[Counts, Counts]]) -> Tensor:
    """Of the steps in which a distance was free to choose, the share that chose it, of several texts: [L, H, M].

    ``others``: what ``distance_counts`` found on each, in windows at the same place.
    """
    counts, possible = (np.sum([pair[i] for pair in others], axis=0) for i in (0, 1))
    return torch.from_numpy(counts / np.maximum(possible, 1)).float()


def choices_of(sets: Sets, start: int, spec: SparseSpec, top_k: int, model: str, conditions: str = "") -> Choices:
    """The sets of a smaller top-k as a selection trace, of the steps from position ``start`` on."""
    _, layers, heads, _ = sets.shape
    facts = TraceFacts(
        model=model,
        source="sparse",
        block=spec.block,
        init_blocks=spec.init_blocks,
        local_blocks=spec.local_blocks,
        top_k=top_k,
        layers=tuple(range(layers)),
        kv_heads=heads,
        context_tokens=(start,),
        conditions=conditions,
    )
    # As the largest number -1 stands last, where a trace wants it.
    ordered = np.sort(sets[..., :top_k].view(np.uint16), axis=-1).view(np.int16)
    return Choices(facts, np.ascontiguousarray(ordered))


def dynamics_row(documents: Mapping[str, Choices], skip: int) -> Dynamics:
    """How the choice moves: means over documents of the same length, spreads over layers and documents.

    Misses are counted after ``skip`` steps, in which the slots fill; all else from the first step on. ``per_step``:
    the mean over documents of each quantile. Raises SpardaError where no block is freely chosen.
    """
    traces = list(documents.values())
    facts = traces[0].facts
    distances = {name: stack_distances(choices, skip=skip) for name, choices in documents.items()}
    slots = {ratio: round(ratio * facts.top_k) for ratio in RATIOS}
    by_lag = [overlap(choices) for choices in traces]
    heads = [head_agreement(choices) for choices in traces]
    return Dynamics(
        top_k=facts.top_k,
        forced=facts.forced,
        reuse=spread(np.mean([reuse(choices) for choices in traces], axis=0)),
        by_lag={str(lag): float(np.mean([found[lag].mean() for found in by_lag])) for lag in by_lag[0]},
        curve=mean_curve([d.curve() for d in distances.values()]),
        at_top_k={
            f"{ratio:g}": spread(np.mean([d.layer_shares(n) for d in distances.values()], axis=0))
            for ratio, n in slots.items()
        },
        documents={
            f"{ratio:g}": spread(np.array([d.share(n) for d in distances.values()])) for ratio, n in slots.items()
        },
        per_step={
            f"{ratio:g}": tuple(
                float(np.mean([np.quantile(d.totals(n), q) for d in distances.values()])) for q in QUANTILES
            )
            for ratio, n in slots.items()
        },
        union=float(np.mean([found[0] for found in heads])),
        same=float(np.mean([found[1] for found in heads])),
        next_layer=float(np.mean([found[2] for found in heads])),
    )


def head_agreement(choices: Choices) -> tuple[float, float, float]:
    """Of the free picks of a head: as many as any head has, as all heads have, and as the next layer's head has too.

    The first is a multiple, the others are shares.
    """
    free = np.where(choices.forced(), -1, choices.blocks)
    picked = np.zeros((*free.shape[:3], choices.room + 1), dtype=np.bool_)
    np.put_along_axis(picked, free.astype(np.int64), True, axis=-1)
    # What -1 has marked.
    picked[..., -1] = False
    total, heads = int(picked.sum()), free.shape[2]
    own = max(1, total) / heads
    following = int((picked[:, 1:] & picked[:, :-1]).sum()) / max(1, int(picked[:, 1:].sum()))
    return float(picked.any(2).sum() / own), float(picked.all(2).sum() / own), following


def mean_curve(curves: Sequence[MissCurve]) -> MissCurve:
    """The mean of several curves at every ratio that one of them was measured at."""
    ratios = sorted({ratio for curve in curves for ratio in curve.ratio})
    missed = [float(np.mean([curve.at(ratio) for curve in curves])) for ratio in ratios]
    # Curves fall; what rounding makes of their mean may rise by a last digit.
    return MissCurve(tuple(ratios), tuple(np.minimum.accumulate(missed).tolist()))
