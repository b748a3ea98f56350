"""What ``sparse`` chooses step after step on a text that is read densely, and how often each distance is chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparda.calibrate.measure.quality.blocks import ranked
from sparda.calibrate.measure.quality.view import View
from sparda.calibrate.measure.quality.window import Prefix, run_window
from sparda.engine.shapes import SparseSpec
from sparda.engine.weights import Weights

Sets = npt.NDArray[np.int16]


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


def distance_counts(sets: Sets, start: int, spec: SparseSpec, top_k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
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


def distance_shares(others: Sequence[Sets], start: int, spec: SparseSpec, top_k: int) -> Tensor:
    """Of the steps in which a distance was free to choose, the share that chose it, over several texts: [L, H, M]."""
    pairs = [distance_counts(sets, start, spec, top_k) for sets in others]
    counts, possible = (np.sum([pair[i] for pair in pairs], axis=0) for i in (0, 1))
    return torch.from_numpy(counts / np.maximum(possible, 1)).float()
