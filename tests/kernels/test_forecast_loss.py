"""The Forecast's loss and its gradient agree with what autograd makes of the same loss in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sparda.kernels.forecast_loss import forecast_loss, forecast_loss_reference


@dataclass(frozen=True)
class Case:
    f: Tensor
    keys: Tensor
    teacher: Tensor
    retained: Tensor
    start: int = 0
    stride: int = 4
    per_block: int = 4

    def loss(self) -> tuple[Tensor, Tensor]:
        return self._run(forecast_loss)

    def reference(self) -> tuple[Tensor, Tensor]:
        return self._run(forecast_loss_reference)

    def _run(self, how: object) -> tuple[Tensor, Tensor]:
        f = self.f.clone().requires_grad_()
        given = (f, self.keys, self.teacher, self.retained, self.start)
        loss: Tensor = how(*given, stride=self.stride, per_block=self.per_block)  # type: ignore[operator]
        weight = torch.arange(1, loss.numel() + 1, device=f.device).view_as(loss) / loss.numel()
        (loss * weight).sum().backward()
        assert f.grad is not None
        return loss.detach(), f.grad


def _case(
    device: str, count: int = 70, *, start: int = 90, kv_heads: int = 2, heads: int = 1, dim: int = 16, stride: int = 4,
    dtype: torch.dtype = torch.float32,
) -> Case:  # fmt: skip
    torch.manual_seed(count + heads + dim)
    tokens = start + count
    rows = max(1, (tokens - 2 * stride) // stride + 1)
    blocks = -(-tokens // (4 * stride))
    f = torch.randn(kv_heads * heads, count, dim, device=device).to(dtype)
    keys = torch.randn(kv_heads, rows, dim, device=device).to(dtype)
    t = torch.arange(start, tokens, device=device)
    future = torch.arange(rows, device=device) * stride > t[:, None]
    teacher = (torch.rand(kv_heads, count, rows, device=device) ** 8).masked_fill(future, 0.0)
    own = t // (4 * stride)
    m = torch.arange(blocks, device=device)
    retained = (torch.rand(kv_heads, count, blocks, device=device) < 0.4) & (m > 0) & (m < own[:, None])
    return Case(f, keys, teacher, retained.to(torch.int8), start, stride)


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 40), (90, 70), (500, 33)])
def test_loss_and_gradient_agree_with_the_reference(device: str, heads: int, start: int, count: int) -> None:
    case = _case(device, count, start=start, heads=heads)
    for found, expected in zip(case.loss(), case.reference(), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(("kv_heads", "dim", "stride"), [(1, 16, 16), (3, 64, 4), (2, 128, 16)])
def test_any_head_size_and_stride_agrees_with_the_reference(device: str, kv_heads: int, dim: int, stride: int) -> None:
    case = _case(device, 45, kv_heads=kv_heads, dim=dim, stride=stride)
    for found, expected in zip(case.loss(), case.reference(), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-6)


def test_bf16_queries_and_keys_come_within_their_rounding(device: str) -> None:
    case = _case(device, dtype=torch.bfloat16)
    loss, gradient = case.loss()
    expected, slope = case.reference()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-4)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient, slope, rtol=0.05, atol=0.01 * float(slope.abs().max()))


def test_probabilities_under_the_least_count_as_the_least_and_have_no_gradient(device: str) -> None:
    case = _case(device)
    far = replace(case, f=case.f * 30, teacher=case.teacher.where(case.teacher > 0.3, 0.0))
    for found, expected in zip(far.loss(), far.reference(), strict=True):
        assert bool(found.isfinite().all())
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_query_whose_teacher_chose_only_forced_blocks_loses_nothing_and_teaches_nothing(device: str) -> None:
    case = _case(device)
    nothing = replace(case, retained=torch.zeros_like(case.retained))
    loss, gradient = nothing.loss()
    assert float(loss.abs().max()) < 1e-6
    assert float(gradient.abs().max()) < 1e-6


def test_a_student_that_equals_its_teacher_loses_nothing(device: str) -> None:
    case = _case(device, heads=2)
    logits = torch.einsum("hnqd,hcd->hnqc", case.f.view(2, 2, *case.f.shape[1:]), case.keys) * case.f.shape[2] ** -0.5
    t = torch.arange(case.start, case.start + case.f.shape[1], device=device)
    future = torch.arange(case.keys.shape[1], device=device) * case.stride > t[:, None]
    same = replace(case, teacher=logits.masked_fill(future, -torch.inf).softmax(-1).sum(1))
    loss, gradient = same.loss()
    assert float(loss.abs().max()) < 1e-5
    assert float(gradient.abs().max()) < 1e-4


def test_what_does_not_fit_is_refused(device: str) -> None:
    case = _case(device)
    for bad, message in (
        (replace(case, f=case.f.bfloat16()), "both bfloat16"),
        (replace(case, teacher=case.teacher[:, 1:]), "teacher"),
        (replace(case, retained=case.retained[..., 3:].contiguous()), "blocks"),
        (replace(case, retained=case.retained.bool()), "int8"),
        (replace(case, keys=case.keys.transpose(1, 2).contiguous().transpose(1, 2)), "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            bad.loss()
