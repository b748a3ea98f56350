"""What a layer lets a selector see: the window's own hidden states, queries and keys, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sparda.calibrate.measure.quality.blocks import Grid
from sparda.engine.pooling import pooled
from sparda.engine.prefill import rotated
from sparda.engine.reference_scores import windows
from sparda.engine.shapes import ModelShape

ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Logits that are held at once, by kind of device: few enough to stay in a cache's reach, or to fill a GPU."""


@dataclass
class View:
    """One layer of a window of Q queries, after S - Q earlier tokens.

    ``inputs``: normed attention inputs [Q, d_model] of this layer and of some before, by layer. ``q`` [Hq, Q, D] and
    ``keys`` [H, S, D], rotated; the last Q keys are the window's own. ``cos`` and ``sin`` [Q, D / 2].
    """

    shape: ModelShape
    grid: Grid
    layer: int
    inputs: Mapping[int, Tensor]
    q: Tensor
    keys: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def grouped(self) -> Tensor:
        """Queries fp32 [H, G, Q, D]."""
        queries: Tensor = self.q.float().unflatten(0, (self.shape.kv_heads, self.shape.group))
        return queries

    @cached_property
    def compressed(self) -> Tensor:
        """Compressed keys fp32 [H, C, D], rounded to the type of the keys, as the engine stores them."""
        if self.keys.shape[1] < self.grid.spec.kernel:
            return self.keys[:, :0].float()
        return windows(self.keys.float()[None], self.grid.spec)[0].to(self.keys.dtype).float()

    @cached_property
    def sparse(self) -> Tensor:
        """Block scores of ``sparse``, without forced blocks."""
        return self.block_scores(self.grouped)

    @cached_property
    def mass(self) -> Tensor:
        """Attention mass of each block, of all tokens up to the query's, a mean over the group's heads."""
        return torch.cat([self._mass(rows) for rows in self.rows(self.keys.shape[1])], 1)

    def logits(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Fp32 [H, G, Q, N] of queries [H, G, Q, D] and N keys [H, N, D]."""
        # The queries are scaled: there are fewer of them than of the products.
        products: Tensor = (queries * self.shape.head_dim**-0.5) @ keys[:, None].mT
        return products

    def rows(self, columns: int, heads: int | None = None) -> Iterator[slice]:
        """The queries in pieces, so that logits against ``columns`` keys take bounded memory."""
        return pieces(self.grid.count, columns * (heads or self.shape.heads), self.q.device)

    def turned(self, layer: int, rows: Tensor) -> Tensor:
        """Selection queries: ``rows`` [n * D, d_model] of an earlier layer's input, rotated, fp32 [n, Q, D].

        Rounded to the type of the model where the engine stores them.
        """
        dtype = self.q.dtype
        heads = (self.inputs[layer] @ rows.to(dtype).T).view(self.grid.count, -1, self.shape.head_dim).transpose(0, 1)
        return rotated(heads, self.cos, self.sin).float()

    def block_scores(self, queries: Tensor) -> Tensor:
        """Softmax over compressed keys of queries [H, n, Q, D], summed over n, the largest of each block.

        One query per KV head needs no softmax: it would change no order.
        """
        return self._pooled(queries, self.compressed, per_token=False)

    def token_scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The largest product of each block of queries [H, 1, Q, R] with the vectors of tokens [H, S, R]."""
        return self._pooled(queries, keys, per_token=True)

    def _pooled(self, queries: Tensor, keys: Tensor, *, per_token: bool) -> Tensor:
        count, spec = keys.shape[1], self.grid.spec
        per = spec.block if per_token else spec.keys_per_block
        visible = self.grid.visible(count, per_token=per_token)
        found = []
        for rows in self.rows(max(1, count), queries.shape[0] * queries.shape[1]):
            unseen = ~visible[rows]
            logits = self.logits(queries[:, :, rows], keys)
            if queries.shape[1] > 1:
                logits = logits.masked_fill_(unseen, -torch.inf).softmax(-1)
            found.append(pooled(logits.sum(1).masked_fill_(unseen, -torch.inf), self.grid.blocks, per))
        return torch.cat(found, 1)

    def _mass(self, rows: slice) -> Tensor:
        grid, block = self.grid, self.grid.spec.block
        end = grid.start + rows.stop
        logits = self.logits(self.grouped[:, :, rows], self.keys[:, :end].float())
        later = torch.arange(end, device=logits.device) > grid.positions[rows, None]
        share = logits.masked_fill_(later, -torch.inf).softmax(-1).mean(1)
        whole = torch.nn.functional.pad(share, (0, grid.blocks * block - end))
        by_block: Tensor = whole.unflatten(-1, (grid.blocks, block)).sum(-1)
        return by_block


Chooser = Callable[[View], Tensor | None]
"""Blocks that a layer's queries attend to, boolean [H, Q, M]; ``None`` means all."""


def pieces(count: int, elements: int, device: torch.device) -> Iterator[slice]:
    """Slices of ``count`` rows of so many elements each."""
    step = max(1, min(count, ELEMENTS.get(device.type, ELEMENTS["cpu"]) // max(1, elements)))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
