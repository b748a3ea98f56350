"""Which blocks the tokens of a window may choose, and the best of them: everything about blocks that no text changes.

Scores are fp32 [H, Q, M]: of M blocks for each of Q queries and H KV heads. A query at position t has t tokens before
it; it may choose the blocks up to its own, and sees what lies wholly inside these t tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparda.engine.shapes import SparseSpec


@dataclass(frozen=True, slots=True)
class Grid:
    """The queries at positions ``start`` to ``start + count - 1`` and the blocks of all tokens up to the last."""

    spec: SparseSpec
    start: int
    count: int
    device: torch.device

    @property
    def tokens(self) -> int:
        return self.start + self.count

    @property
    def blocks(self) -> int:
        return self.spec.blocks(self.tokens)

    @property
    def positions(self) -> Tensor:
        """int64 [Q]."""
        return torch.arange(self.start, self.tokens, device=self.device)

    @property
    def distance(self) -> Tensor:
        """How many blocks each block lies before the query's own, int64 [Q, M]; negative: after it."""
        blocks = torch.arange(self.blocks, device=self.device)
        return self.positions[:, None] // self.spec.block - blocks

    @property
    def existing(self) -> Tensor:
        """Boolean [Q, M]: blocks up to the query's own."""
        return self.distance >= 0

    @property
    def forced(self) -> Tensor:
        """Boolean [Q, M]: blocks that are chosen whatever their score."""
        first = torch.arange(self.blocks, device=self.device) < self.spec.init_blocks
        distance = self.distance
        return ((distance <= self.spec.local_blocks) | first) & (distance >= 0)

    def visible(self, count: int, *, per_token: bool = False) -> Tensor:
        """Boolean [Q, count]: compressed keys (tokens) that end before the query's position."""
        spec = self.spec
        ends = torch.arange(count, device=self.device) * (1 if per_token else spec.stride)
        return ends + (1 if per_token else spec.kernel) <= self.positions[:, None]

    def with_forced(self, scores: Tensor) -> Tensor:
        """The scores with forced blocks at infinity and those after the query's own at minus infinity."""
        return scores.masked_fill(self.forced, torch.inf).masked_fill(~self.existing, -torch.inf)

    def chosen(self, scores: Tensor, count: int) -> Tensor:
        """Boolean [H, Q, M]: the ``count`` best that exist; of equals the lowest, as the engine chooses."""
        return self.first_of(ranked(scores, count))

    def first_of(self, order: Tensor) -> Tensor:
        """Boolean [H, Q, M] of block ids [H, Q, count]."""
        mask = torch.zeros(*order.shape[:2], self.blocks, dtype=torch.bool, device=order.device)
        return mask.scatter_(-1, order, True) & self.existing


def ranked(scores: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` best blocks (all where there are fewer), best first, of equals the lowest: int64."""
    # `topk` leaves open which of two equals comes first; adjacent blocks that share a window's maximum are equal.
    return scores.sort(stable=True, dim=-1, descending=True).indices[..., :count]
