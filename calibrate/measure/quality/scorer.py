"""Block scores of the shallow scorer for many queries at once."""

from __future__ import annotations

import torch
from torch import Tensor

from sparda.calibrate.measure.quality.view import View, pieces
from sparda.engine.weights import ScorerWeights


def scorer_scores(scorer: ScorerWeights, view: View, due: Tensor) -> Tensor:
    """[N, M] for the window's queries of numbers ``due`` int64 [N]; minus infinity where a block has no key yet.

    As ``engine.reference_scores.scorer_scores``: a block's key is the mean of the compressed keys that lie in it and
    end before the query.
    """
    s, grid = view.shape, view.grid
    width = s.d_model + s.kv_width
    taken = [_scores(scorer, view, due[rows]) for rows in pieces(len(due), grid.blocks * width, due.device)]
    return torch.cat(taken)


def _scores(scorer: ScorerWeights, view: View, due: Tensor) -> Tensor:
    grid, spec = view.grid, view.grid.spec
    per, inside = spec.keys_per_block, (spec.block - spec.kernel) // spec.stride + 1
    count = view.compressed.shape[1]
    room = grid.blocks * per - count
    keys = torch.nn.functional.pad(view.compressed, (0, 0, 0, room)).unflatten(1, (grid.blocks, per))[:, :, :inside]
    seen = torch.nn.functional.pad(grid.visible(count)[due], (0, room)).unflatten(1, (grid.blocks, per))[..., :inside]
    known = seen.sum(-1)
    own = torch.einsum("hmid,nmi->nmhd", keys, seen.float()) / known.clamp(min=1)[..., None, None]
    query = view.grouped[:, :, due].mean(1).transpose(0, 1)
    h = view.inputs[view.layer][due].float()[:, None].expand(-1, grid.blocks, -1)
    features = torch.cat([h, (query[:, None] * own).flatten(2)], -1)
    return scorer.scores(features).masked_fill(known == 0, -torch.inf)
