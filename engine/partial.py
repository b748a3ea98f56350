"""InfiniGen's partial keys (arXiv 2406.19707): the directions that are kept, and the keys along them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparda.engine.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class PartialKeys:
    """Partial keys of the layers that are scored by them, the offloaded ones, counted from the first of these.

    ``basis`` fp32 [L, H, head_dim, R]: R orthonormal directions, as columns. ``rows`` [L, B, H, C, R] in the type of
    the cache: the rotated key of each of C tokens along them.
    """

    basis: Tensor
    rows: Tensor

    def fill(self, layer: int, keys: Tensor) -> None:
        """Set a layer's partial keys from its rotated keys [B, H, T, head_dim], T at the most C."""
        self.rows[layer, :, :, : keys.shape[2]] = along(keys, self.basis[layer])

    def admit(self, sequence: int, keys: Tensor) -> None:
        """Set the partial keys of one row of the batch from rotated keys [L, H, T, head_dim]."""
        for layer, own in enumerate(keys):
            self.rows[layer, sequence, :, : own.shape[1]] = along(own[None], self.basis[layer])[0]


def along(x: Tensor, basis: Tensor) -> Tensor:
    """Vectors [B, H, ..., head_dim] along each head's directions [H, head_dim, R], fp32 [B, H, ..., R]."""
    turned: Tensor = torch.einsum("bh...d,hdr->bh...r", x.float(), basis)
    return turned


def partial_basis(queries: Tensor, keys: Tensor, dims: int) -> Tensor:
    """The ``dims`` directions that matter most for scores on a sample of tokens: fp32 [H, head_dim, dims].

    queries: [H, group, N, head_dim], rotated. keys: [H, N, head_dim], rotated.

    InfiniGen skews: with V the right singular vectors of the queries (here, of their mean over the group), the turned
    queries have most of their length along few columns, and (q V) (k V) is still q k. Of these columns it keeps those
    along which the sample is largest. A column adds (q V)_i (k V)_i to a score, so what is compared here is the sum
    over tokens of the absolute values for the queries of the whole group, times that for the keys.
    """
    _, _, right = torch.linalg.svd(queries.float().mean(1), full_matrices=True)
    skew: Tensor = right.mT
    large = (queries.float() @ skew[:, None]).abs().sum((1, 2)) * (keys.float() @ skew).abs().sum(1)
    best = large.topk(dims, dim=-1).indices
    return skew.gather(2, best[:, None].expand(-1, skew.shape[1], -1)).contiguous()


def random_basis(shape: ModelShape, layers: int, device: torch.device | str, seed: int = 0) -> Tensor:
    """The same ``partial_dims`` columns of a random rotation for every layer and head, [layers, H, head_dim, dims].

    For random weights, where no direction matters more than another.
    """
    generator = torch.Generator().manual_seed(seed)
    rotation, _ = torch.linalg.qr(torch.randn(shape.head_dim, shape.head_dim, generator=generator))
    kept: Tensor = rotation[:, : shape.partial_dims].to(device)
    return kept.expand(layers, shape.kv_heads, -1, -1).contiguous()
