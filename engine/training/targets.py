"""What a layer's teacher says of a chunk of queries: scores of compressed keys, and the blocks that it would choose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparda.engine.pooling import free_blocks, pooled
from sparda.engine.reference_scores import windows
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
        compressed = windows(view.keys[None].float(), spec)[0].to(view.keys.dtype).contiguous()
        return cls(view, spec, top_k, compressed, fine_keys(view.keys))

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
        best, there = self._best(teacher, start)
        blocks = self.spec.blocks(self.view.keys.shape[1])
        retained = torch.zeros((*teacher.shape[:2], blocks), dtype=torch.int8, device=teacher.device)
        return retained.scatter_(-1, best, there.to(torch.int8))

    def _best(self, scores: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Of scores of compressed keys [H, N, C], none below 0: the best free blocks' ids, and which are any."""
        blocks = self.spec.blocks(self.view.keys.shape[1])
        positions = torch.arange(start, start + scores.shape[1], device=scores.device)
        free = free_blocks(self.spec, positions, blocks)
        by_block = pooled(scores, blocks, self.spec.keys_per_block).masked_fill(~free, -1.0)
        best = by_block.topk(min(max(self.top_k - self.spec.forced, 0), blocks), dim=-1)
        return best.indices, best.values >= 0

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
        kv_heads, count = targets.retained.shape[:2]
        heads = f.float().view(kv_heads, -1, count, f.shape[-1])
        logits = torch.einsum("hnqd,hcd->hnqc", heads, self.compressed.float()) * f.shape[-1] ** -0.5
        start = torch.arange(self.compressed.shape[1], device=f.device) * self.spec.stride
        t = torch.arange(targets.start, targets.start + count, device=f.device)
        probable = logits.masked_fill(start > t[:, None], -torch.inf).softmax(-1).mean(1)
        best, there = self._best(probable, targets.start)
        caught = targets.retained.gather(-1, best) * there
        return caught.sum(-1) / targets.retained.sum(-1)
