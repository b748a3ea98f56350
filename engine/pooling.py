"""Block scores out of the scores of compressed keys or tokens, for many queries at once, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from sparda.engine.shapes import SparseSpec


def pooled(scores: Tensor, blocks: int, per: int) -> Tensor:
    """The largest of the scores [..., C] that touch each block: the ``per`` that begin in it and the one before.

    As ``reference_scores.pooled``, which does it block by block; a score of minus infinity counts as none.
    """
    padded = torch.nn.functional.pad(scores, (1, blocks * per - scores.shape[-1]), value=-torch.inf)
    best = padded[..., 1:].unflatten(-1, (blocks, per)).amax(-1)
    return torch.maximum(best, padded[..., : blocks * per : per])


def free_blocks(spec: SparseSpec, positions: Tensor, blocks: int) -> Tensor:
    """Boolean [N, blocks]: blocks that queries at ``positions``, int64 [N], may choose, none of the forced ones."""
    m = torch.arange(blocks, device=positions.device)
    return (m >= spec.init_blocks) & (m < positions[:, None] // spec.block - spec.local_blocks)
