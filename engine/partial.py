"""InfiniGen's partial keys (arXiv 2406.19707): the directions that are kept, and the keys along them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparda.engine.shapes import ModelShape

SAMPLE = 2048
"""Tokens of a prompt, its first, that directions are taken from at the most."""


@dataclass(slots=True)
class PartialKeys:
    """Partial keys of the layers that are scored by them, the offloaded ones, counted from the first of these.

    ``basis`` fp32 [L, H, head_dim, R]: R orthonormal directions, as columns. ``rows`` [L, B, H, C, R] in the type of
    the cache: the rotated key of each of C tokens along them. ``settled``: keys have been stored, and the basis stays.

    The first prompt gives the directions, short as it may be, and all that follow are scored along the same: keys of
    every row lie along one basis, and those stored cannot be turned to another, for most of each is gone.
    """

    basis: Tensor
    rows: Tensor
    settled: bool = False

    @property
    def sample(self) -> int:
        """How many tokens' queries ``admit`` has a use for: none once the directions are settled."""
        return 0 if self.settled else SAMPLE

    def fill(self, layer: int, keys: Tensor) -> None:
        """Set a layer's partial keys from its rotated keys [B, H, T, head_dim], T at the most C."""
        self.settled = True
        self.rows[layer, :, :, : keys.shape[2]] = along(keys, self.basis[layer])

    def admit(self, sequence: int, keys: Tensor, queries: Tensor | None = None) -> None:
        """Set the partial keys of one row of the batch from rotated keys [L, H, T, head_dim].

        ``queries``, rotated, [L, Hq, N, head_dim] of its first N tokens: give the directions, unless they are settled.
        """
        if queries is not None and not self.settled:
            self._learn(queries, keys[:, :, : queries.shape[2]])
        self.settled = True
        for layer, own in enumerate(keys):
            self.rows[layer, sequence, :, : own.shape[1]] = along(own[None], self.basis[layer])[0]

    def _learn(self, queries: Tensor, keys: Tensor) -> None:
        # In place: a step that was captured before goes on reading here.
        heads, dims = self.basis.shape[1], self.basis.shape[3]
        for basis, q, k in zip(self.basis, queries, keys, strict=True):
            basis.copy_(partial_basis(q.unflatten(0, (heads, -1)), k, dims))


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

    N tokens have N singular vectors. Where these are fewer than head_dim, columns of a random rotation, made orthogonal
    to them, span the rest, and are kept or not by the same comparison.
    """
    _, _, right = torch.linalg.svd(queries.float().mean(1), full_matrices=False)
    skew = _completed(right.mT)
    large = (queries.float() @ skew[:, None]).abs().sum((1, 2)) * (keys.float() @ skew).abs().sum(1)
    best = large.topk(dims, dim=-1).indices
    return skew.gather(2, best[:, None].expand(-1, skew.shape[1], -1)).contiguous()


def _completed(columns: Tensor) -> Tensor:
    """Orthonormal columns [H, D, N], N at the most D, as the first of D such columns, up to their signs."""
    heads, dim, count = columns.shape
    if count == dim:
        return columns
    others = _rotation(dim, 0)[:, : dim - count].to(columns.device).expand(heads, -1, -1)
    whole: Tensor = torch.linalg.qr(torch.cat([columns, others], 2))[0]
    return whole


def random_basis(shape: ModelShape, layers: int, device: torch.device | str, seed: int = 0) -> Tensor:
    """The same ``partial_dims`` columns of a random rotation for every layer and head, [layers, H, head_dim, dims].

    For histories of random numbers, where no direction matters more than another, and until a first prompt comes.
    """
    kept = _rotation(shape.head_dim, seed)[:, : shape.partial_dims].to(device)
    return kept.expand(layers, shape.kv_heads, -1, -1).contiguous()


def _rotation(dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rotation: Tensor = torch.linalg.qr(torch.randn(dim, dim, generator=generator))[0]
    return rotation
