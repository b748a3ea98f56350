"""The teacher's scores agree with whole matrices in plain PyTorch, wherever a chunk of queries begins."""

from __future__ import annotations

import pytest
import torch

from sparda.kernels.teacher import fine_keys, teacher_reference, teacher_scores

both_types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def _case(
    device: str, tokens: int, *, heads: int = 6, kv_heads: int = 2, dim: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(tokens + heads)
    q = torch.randn(heads, tokens, dim, device=device).to(dtype) * 2
    return q, fine_keys(torch.randn(kv_heads, tokens, dim, device=device).to(dtype) * 2)


@both_types
@pytest.mark.parametrize("tokens", [2, 31, 64, 65, 150, 333])
def test_any_number_of_tokens_agrees_with_the_reference(device: str, tokens: int, dtype: torch.dtype) -> None:
    q, fine = _case(device, tokens, dtype=dtype)
    windows = max(1, (tokens - 8) // 4 + 1)
    found = teacher_scores(q, fine, 0, windows=windows, stride=4)
    expected = teacher_reference(q, fine, 0, windows=windows, stride=4)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 16), (9, 3, 64), (16, 1, 128), (4, 4, 32)])
def test_any_group_and_head_size_agrees_with_the_reference(device: str, heads: int, kv_heads: int, dim: int) -> None:
    q, fine = _case(device, 130, heads=heads, kv_heads=kv_heads, dim=dim)
    found = teacher_scores(q, fine, 0, windows=7, stride=16)
    torch.testing.assert_close(found, teacher_reference(q, fine, 0, windows=7, stride=16), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (63, 64), (64, 130), (129, 200), (199, 200)])
def test_a_chunk_of_queries_gets_what_the_whole_sequence_gets(device: str, start: int, end: int) -> None:
    q, fine = _case(device, 200)
    whole = teacher_scores(q, fine, 0, windows=48, stride=4)
    chunk = teacher_scores(q[:, start:end], fine, start, windows=48, stride=4)
    torch.testing.assert_close(chunk, whole[:, start:end], rtol=1e-5, atol=1e-7)


def test_keys_of_later_tokens_do_not_reach_a_query(device: str) -> None:
    q, fine = _case(device, 96)
    later = fine.clone()
    later[:, 51:] = 100.0
    found = teacher_scores(q[:, :51], later, 0, windows=20, stride=4)
    torch.testing.assert_close(found, teacher_scores(q[:, :51], fine, 0, windows=20, stride=4))
    # Window 13 begins with fine key 51.
    assert not found[:, :, 13:].any()


def test_a_window_takes_in_the_fine_key_before_it(device: str) -> None:
    q, fine = _case(device, 64, heads=1, kv_heads=1)
    fine.zero_()
    fine[0, 15] = q[0, 40] * 10
    scores = teacher_scores(q[:, 40:41], fine, 40, windows=10, stride=4)[0, 0]
    # Fine key 15 is the last of window 3 and the one before window 4.
    assert float(scores[[3, 4]].min()) > 0.9
    assert float(scores[[0, 1, 2, 5, 6, 7, 8, 9]].max()) < 0.1


def test_what_does_not_fit_is_refused(device: str) -> None:
    q, fine = _case(device, 40)
    for bad, message in (
        ((q[:5], fine, 0, 4), "H | Hq"),
        ((q.bfloat16(), fine, 0, 4), "both bfloat16"),
        ((q, fine, 1, 4), "allowed are 0 to 40"),
        ((q, fine, 0, 3), "powers of two"),
        ((q.transpose(1, 2).contiguous().transpose(1, 2), fine, 0, 4), "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            teacher_scores(bad[0], bad[1], bad[2], windows=9, stride=bad[3])
