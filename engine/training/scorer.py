"""The block scorer of the policy ``shallow`` in training: it learns the last layer's attention from an early layer.

As described for it: a binary cross-entropy of each block being among those that the last layer attends to most, and a
logistic loss of every such block against one that is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from sparda.engine.pooling import free_blocks
from sparda.engine.reference_scores import windows
from sparda.engine.shapes import SCORER_WIDTH, ModelShape, SparseSpec
from sparda.engine.training.walk import LayerView
from sparda.engine.weights import ScorerWeights, Weights

SAMPLES = 64
"""Queries of a sequence that are learned from."""


@dataclass(slots=True)
class ScorerRows:
    """Parameters, fp32: ``hidden`` [SCORER_WIDTH, d_model + kv_width], ``hidden_bias`` and ``output`` [SCORER_WIDTH].

    Layer ``layer`` scores. ``seen`` holds what it had of the sequence that is being walked.
    """

    shape: ModelShape
    spec: SparseSpec
    layer: int
    top_k: int
    hidden: Tensor
    hidden_bias: Tensor
    output: Tensor
    seen: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    @classmethod
    def begun(cls, weights: Weights, spec: SparseSpec, layer: int, top_k: int, seed: int = 0) -> ScorerRows:
        """A scorer of random rows, on the device of the weights."""
        s, device = weights.shape, weights.embed.device
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            drawn: Tensor = (torch.randn(size, generator=generator) * size[-1] ** -0.5).to(device).requires_grad_()
            return drawn

        hidden = normal(SCORER_WIDTH, s.d_model + s.kv_width)
        bias = torch.zeros(SCORER_WIDTH, device=device, requires_grad=True)
        return cls(s, spec, layer, top_k, hidden, bias, normal(SCORER_WIDTH))

    @property
    def name(self) -> str:
        return f"scorer-{self.layer}"

    @property
    def named(self) -> dict[str, Tensor]:
        """Its parameters by name."""
        return {"scorer.hidden": self.hidden, "scorer.hidden_bias": self.hidden_bias, "scorer.output": self.output}

    @property
    def weights(self) -> ScorerWeights:
        """The scorer as the policy reads it."""
        return ScorerWeights(self.hidden.detach(), self.hidden_bias.detach(), self.output.detach())

    def positions(self, length: int, sequence: int) -> Tensor:
        """Queries of a sequence that are learned from, int64 [SAMPLES], drawn with the sequence's number."""
        generator = torch.Generator().manual_seed(sequence)
        return torch.randint(length // 4, length, (SAMPLES,), generator=generator)

    def visit(self, view: LayerView, positions: Tensor) -> Tensor | None:
        """The loss of a sequence's queries at ``positions``, once its last layer is here."""
        if view.layer == self.layer:
            self.seen = self._features(view, positions)
        if view.layer + 1 < self.shape.layers or self.seen is None:
            return None
        features, known = self.seen
        self.seen = None
        scores = ScorerWeights(self.hidden, self.hidden_bias, self.output).scores(features)
        return self._loss(scores, known, self._attended(view, positions), positions)

    def _features(self, view: LayerView, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[N, M, d_model + kv_width], and which blocks have a compressed key of their own, bool [M]."""
        s, spec = self.shape, self.spec
        blocks, inside = spec.blocks(len(view.inputs)), (spec.block - spec.kernel) // spec.stride + 1
        compressed = windows(view.keys[None].float(), spec)[0]
        starts = torch.arange(blocks, device=compressed.device)[:, None] * spec.keys_per_block
        index = starts + torch.arange(inside, device=compressed.device)
        there = index < compressed.shape[1]
        own = compressed[:, index.clamp(max=compressed.shape[1] - 1)] * there[None, :, :, None]
        key = (own.sum(2) / there.sum(1).clamp(min=1)[None, :, None]).transpose(0, 1)
        query = view.queries[:, positions].float().view(s.kv_heads, s.group, -1, s.head_dim).mean(1).transpose(0, 1)
        product = (query[:, None] * key[None]).flatten(2)
        state = view.inputs[positions].float()[:, None].expand(-1, blocks, -1)
        return torch.cat([state, product], -1), there.any(1)

    @torch.no_grad()
    def _attended(self, view: LayerView, positions: Tensor) -> Tensor:
        """Attention mass of every block, summed over the heads: fp32 [N, M]."""
        s, spec = self.shape, self.spec
        length = view.keys.shape[1]
        grouped = view.queries[:, positions].float().view(s.kv_heads, s.group, -1, s.head_dim)
        logits = torch.einsum("hgnd,hjd->hgnj", grouped, view.keys.float()) * s.head_dim**-0.5
        future = torch.arange(length, device=positions.device) > positions[:, None]
        mass = logits.masked_fill(future, -torch.inf).softmax(-1).sum((0, 1))
        blocks = spec.blocks(length)
        whole: Tensor = functional.pad(mass, (0, blocks * spec.block - length))
        blockwise: Tensor = whole.unflatten(-1, (blocks, spec.block)).sum(-1)
        return blockwise

    def _loss(self, scores: Tensor, known: Tensor, mass: Tensor, positions: Tensor) -> Tensor:
        spec, blocks = self.spec, mass.shape[1]
        free = known & free_blocks(spec, positions, blocks)
        count = min(max(1, self.top_k - spec.forced), blocks)
        best = mass.masked_fill(~free, -1.0).topk(count, dim=-1)
        chosen = torch.zeros_like(free).scatter_(-1, best.indices, True) & free
        logits = scores.masked_fill(~free, 0.0)
        entropy = functional.binary_cross_entropy_with_logits(logits, chosen.float(), reduction="none")
        others = free & ~chosen
        pairs = chosen[:, :, None] & others[:, None, :]
        ranking = functional.softplus(logits[:, None, :] - logits[:, :, None])
        return (entropy * free).sum() / free.sum().clamp(min=1) + (ranking * pairs).sum() / pairs.sum().clamp(min=1)
