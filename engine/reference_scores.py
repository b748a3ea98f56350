"""Scores of blocks in plain PyTorch, for the reference decoder: how good each policy says a block is.

Block scores are fp32 [B, H, blocks]; forced blocks, and a reserve, score infinity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.weights import ScorerWeights


def windows(x: Tensor, spec: SparseSpec) -> Tensor:
    """Means over the windows of compressed keys, [B, H, C, ...], of what tokens have, [B, H, T, ...]."""
    return x.unfold(2, spec.kernel, spec.stride).mean(-1)


def query_scores(keys: Tensor, q: Tensor, selection: Tensor | None, shape: ModelShape) -> Tensor:
    """[B, H, C]: selection query times key, or the group's softmax probabilities summed."""
    if selection is not None:
        return torch.einsum("bhd,bhcd->bhc", selection, keys)
    grouped = q.view(len(q), shape.kv_heads, shape.group, shape.head_dim)
    logits: Tensor = torch.einsum("bhgd,bhcd->bhgc", grouped, keys) * shape.head_dim**-0.5
    return logits.softmax(-1).sum(2)


def pooled(scores: Tensor, blocks: int, per: int) -> Tensor:
    """The largest of the scores [B, H, C] that touch each block: the ``per`` that begin in it and the one before."""
    count = scores.shape[-1]
    best = torch.full((*scores.shape[:2], blocks), -torch.inf, device=scores.device)
    for m in range(blocks):
        low, high = max(0, per * m - 1), min(count, per * m + per)
        if low < high:
            best[..., m] = scores[..., low:high].amax(-1)
    return best


def forced(scores: Tensor, spec: SparseSpec) -> Tensor:
    """The block scores with the first and the last blocks at infinity."""
    scores, blocks = scores.clone(), scores.shape[-1]
    scores[..., : spec.init_blocks] = torch.inf
    scores[..., max(0, blocks - 1 - spec.local_blocks) :] = torch.inf
    return scores


def best_blocks(scores: Tensor, count: int) -> Tensor:
    """Boolean [B, H, blocks]: the ``count`` best."""
    best = scores.topk(count).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def lost(scores: Tensor, given: Tensor) -> float:
    """By how much a block that was given is worse than one that was not, at the worst, in spreads of the scores."""
    worst_in = scores.masked_fill(~given, torch.inf).amin(-1)
    best_out = scores.masked_fill(given, -torch.inf).amax(-1)
    # Two blocks of equal infinite scores lose nothing; their difference is no number.
    difference = torch.where(best_out > worst_in, best_out - worst_in, 0.0)
    known = scores.isfinite()
    mean = scores.masked_fill(~known, 0.0).sum(-1, keepdim=True) / known.sum(-1, keepdim=True)
    spread = (scores - mean).masked_fill(~known, 0.0).square().sum(-1).div(known.sum(-1)).sqrt()
    return float((difference / spread.clamp(min=1e-6)).max())


def token_bias(v: Tensor, eviction: tuple[Tensor, Tensor]) -> Tensor:
    """[B, H, T]: the eviction head's bias of values [B, H, T, head_dim]."""
    scale, head = eviction
    every_head = v.transpose(1, 2).flatten(2)
    return (scale * torch.nn.functional.softplus(every_head @ head.T)).transpose(1, 2)


def scorer_scores(
    scorer: ScorerWeights, h: Tensor, q: Tensor, keys: Tensor, blocks: int, shape: ModelShape, spec: SparseSpec
) -> Tensor:
    """[B, blocks]: the scorer's output for hidden state [B, d_model], queries [B, heads, D] and keys [B, H, C, D]."""
    query = q.view(len(q), shape.kv_heads, shape.group, shape.head_dim).mean(2)
    inside = (spec.block - spec.kernel) // spec.stride + 1
    scores = torch.full((len(h), blocks), -torch.inf, device=h.device)
    for m in range(blocks):
        first = m * spec.keys_per_block
        own = keys[:, :, first : first + inside]
        if own.shape[2]:
            features = torch.cat([h, (query * own.mean(2)).flatten(1)], -1)
            scores[:, m] = scorer.scores(features)
    return scores
