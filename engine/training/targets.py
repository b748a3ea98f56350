"""What a layer's teacher says of a chunk of queries: scores of compressed keys, and the blocks that it would choose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparda.engine.shapes import SparseSpec
from sparda.engine.training.walk import LayerView
from sparda.kernels.forecast_loss import forecast_loss, forecast_loss_reference
from sparda.kernels.teacher import fine_keys, teacher_reference, teacher_scores

TEACHER_BYTES = 1 << 28
"""Scores that are kept at a time: queries come in chunks that make no more of them."""


@dataclass(frozen=True, slots=True)
class Targets:
    """For N queries from ``start`` on: ``teacher`` fp32 [H, N, C], ``retained`` int8 [H, N, M], not 0 where chosen."""

    start: int
    teacher: Tensor
    retained: Tensor


@dataclass(slots=True)
class Teacher:
    """The teacher of one layer. ``compressed`` [H, C, head_dim]: the deployed grid, which a student is scored on.

    On a CPU the kernels' references run in their place.
    """

    view: LayerView
    spec: SparseSpec
    top_k: int
    compressed: Tensor
    fine: Tensor

    @classmethod
    def of(cls, view: LayerView, spec: SparseSpec, top_k: int) -> Teacher:
        """The teacher of ``top_k`` blocks, those always chosen among them."""
        windows = view.keys.float().unfold(1, spec.kernel, spec.stride).mean(-1).to(view.keys.dtype).contiguous()
        return cls(view, spec, top_k, windows, fine_keys(view.keys))

    @property
    def chunk(self) -> int:
        """Queries of a chunk."""
        return max(1, TEACHER_BYTES // (4 * self.compressed.shape[0] * self.compressed.shape[1]))

    def targets(self, start: int, end: int) -> Targets:
        """Those of the queries from ``start`` up to ``end``."""
        scores = teacher_scores if self.fine.is_cuda else teacher_reference
        q = self.view.queries[:, start:end]
        teacher = scores(q, self.fine, start, windows=self.compressed.shape[1], stride=self.spec.stride)
        return Targets(start, teacher, self._retained(teacher, start))

    def _retained(self, teacher: Tensor, start: int) -> Tensor:
        """The best blocks that are not forced, as many as top-k leaves for them."""
        spec, free = self.spec, self.top_k - self.spec.forced
        blocks = spec.blocks(self.view.keys.shape[1])
        scores = block_scores(teacher, blocks, spec.keys_per_block)
        candidate = free_blocks(spec, start, scores.shape[1], blocks, scores.device)
        scores = scores.masked_fill(~candidate, -1.0)
        best = scores.topk(min(max(free, 0), blocks), dim=-1)
        retained = torch.zeros(scores.shape, dtype=torch.int8, device=scores.device)
        return retained.scatter_(-1, best.indices, (best.values >= 0).to(torch.int8))

    def loss(self, f: Tensor, targets: Targets) -> Tensor:
        """KL divergence of Forecast queries f [H * n, N, head_dim] from the teacher, fp32 [H, N]: see the kernel."""
        how = forecast_loss if f.is_cuda else forecast_loss_reference
        return how(
            f, self.compressed, targets.teacher, targets.retained, targets.start, stride=self.spec.stride,
            per_block=self.spec.keys_per_block,
        )  # fmt: skip

    @torch.no_grad()
    def recall(self, f: Tensor, targets: Targets) -> Tensor:
        """Share of the retained blocks that the Forecast chooses, as many as were retained: fp32 [H, N].

        NaN for queries of which none was retained.
        """
        spec, (kv_heads, count, blocks) = self.spec, targets.retained.shape
        heads = f.float().view(kv_heads, -1, count, f.shape[-1])
        logits = torch.einsum("hnqd,hcd->hnqc", heads, self.compressed.float()) * f.shape[-1] ** -0.5
        start = torch.arange(self.compressed.shape[1], device=f.device) * spec.stride
        t = torch.arange(targets.start, targets.start + count, device=f.device)
        probable = logits.masked_fill(start > t[:, None], -torch.inf).softmax(-1).mean(1)
        free = free_blocks(spec, targets.start, count, blocks, f.device)
        scores = block_scores(probable, blocks, spec.keys_per_block).masked_fill(~free, -1.0)
        best = scores.topk(min(max(self.top_k - spec.forced, 0), blocks), dim=-1)
        caught = targets.retained.gather(-1, best.indices) * (best.values >= 0)
        return caught.sum(-1) / targets.retained.sum(-1)


def block_scores(scores: Tensor, blocks: int, per: int) -> Tensor:
    """The largest of scores [..., C], none below 0, that touch each block: ``per`` that begin in it, one before."""
    # Beyond the last compressed key there is nothing to lose by a zero.
    whole = torch.nn.functional.pad(scores, (0, blocks * per - scores.shape[-1]))
    grouped = whole.unflatten(-1, (blocks, per))
    before = torch.nn.functional.pad(grouped[..., :-1, -1], (1, 0))
    return torch.maximum(grouped.amax(-1), before)


def free_blocks(spec: SparseSpec, start: int, count: int, blocks: int, device: torch.device) -> Tensor:
    """Boolean [count, blocks]: blocks that a query from ``start`` on may choose, none of the forced ones."""
    own = torch.arange(start, start + count, device=device)[:, None] // spec.block
    m = torch.arange(blocks, device=device)
    return (m >= spec.init_blocks) & (m < own - spec.local_blocks)
