"""Token biases, their means, and the blocks that a query and the biases name together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from sparda.kernels.eviction import bias_reference, eviction_bias, shortlist, shortlist_reference  # noqa: E402

INF = float("inf")
GEOMETRIES = [(64, 32, 16), (16, 8, 4), (16, 16, 16)]
"""(block, kernel, stride)"""


def _decoded(
    device: str,
    contexts: list[int],
    steps: int,
    *,
    kv_heads: int = 2,
    dim: int = 32,
    block: int = 16,
    kernel: int = 8,
    stride: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    sign: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Biases and means after ``steps`` tokens from each context on, NaN where nothing was written; values [B, H, T, D].

    Block m lies in slot (m + b) % M, and NaN stands wherever no key or value of the kernel's business is.
    """
    random = torch.Generator().manual_seed(len(contexts) + steps)
    batch, blocks = len(contexts), max(contexts) // block + steps // block + 2
    tokens = blocks * block
    values = torch.randn(batch, kv_heads, tokens, dim, generator=random).to(dtype)
    cache = torch.full((batch, kv_heads, blocks, 2, block, dim), float("nan"), dtype=dtype)
    place = torch.stack([(torch.arange(blocks, dtype=torch.int32) + b) % blocks for b in range(batch)])
    slot_of_block = place[:, None].expand(batch, kv_heads, blocks).contiguous()
    for b in range(batch):
        cache[b, :, place[b].long(), 1] = values[b].view(kv_heads, blocks, block, dim)
    scale = sign * torch.rand(kv_heads, generator=random)
    head = torch.randn(kv_heads, kv_heads * dim, generator=random) * 2
    bias = bias_reference(values, scale, head)
    for b, context in enumerate(contexts):
        bias[b, :, context:] = float("nan")
    means = torch.full((batch, kv_heads, (tokens - kernel) // stride + 1), float("nan"))
    moved = [x.to(device) for x in (cache, slot_of_block, scale, head, bias, means)]
    for step in range(steps):
        positions = torch.tensor([c + step for c in contexts], dtype=torch.int32, device=device)
        eviction_bias(moved[0], moved[1], positions, *moved[2:], kernel=kernel, stride=stride)
    expected = bias_reference(values, scale, head)
    for b, context in enumerate(contexts):
        got = moved[4][b].cpu()
        torch.testing.assert_close(got[:, : context + steps], expected[b, :, : context + steps], rtol=2e-5, atol=2e-5)
        assert bool(got[:, context + steps :].isnan().all())
    return expected, moved[5].cpu(), values


@pytest.mark.parametrize(("block", "kernel", "stride"), GEOMETRIES)
@pytest.mark.parametrize(
    ("kv_heads", "dim", "dtype"), [(1, 64, torch.bfloat16), (2, 32, torch.float32), (3, 16, torch.bfloat16)]
)
def test_each_token_gets_its_bias_and_each_window_its_mean_when_it_is_whole(
    device: str, kv_heads: int, dim: int, block: int, kernel: int, stride: int, dtype: torch.dtype
) -> None:
    contexts, steps = [3 * block - 5, 0], 2 * stride + kernel
    expected, means, _ = _decoded(
        device, contexts, steps, kv_heads=kv_heads, dim=dim, block=block, kernel=kernel, stride=stride, dtype=dtype
    )
    for b, context in enumerate(contexts):
        for j in range(means.shape[2]):
            end = stride * j + kernel
            if context < end <= context + steps:
                window = expected[b, :, end - kernel : end].mean(-1)
                torch.testing.assert_close(means[b, :, j], window, rtol=2e-5, atol=2e-5)
            else:
                assert bool(means[b, :, j].isnan().all())


def test_a_bias_takes_its_sign_from_the_scale(device: str) -> None:
    up, _, _ = _decoded(device, [20], 1, sign=1.0)
    down, _, _ = _decoded(device, [20], 1, sign=-1.0)
    assert torch.equal(up, -down)
    assert float(up.min()) >= 0.0


def test_large_products_do_not_overflow(device: str) -> None:
    cache = torch.full((1, 1, 1, 2, 16, 16), 100.0, dtype=torch.bfloat16, device=device)
    head = torch.full((1, 16), 100.0, device=device)
    bias, means = torch.zeros(1, 1, 16, device=device), torch.zeros(1, 1, 3, device=device)
    slots, at = (torch.zeros(size, dtype=torch.int32, device=device) for size in ((1, 1, 1), (1,)))
    for sign, wanted in ((1.0, 160000.0), (-1.0, 0.0)):
        eviction_bias(cache, slots, at, torch.ones(1, device=device), sign * head, bias, means, kernel=8, stride=4)
        assert float(bias[0, 0, 0]) == wanted


def test_a_token_past_the_room_is_left_out(device: str) -> None:
    cache = torch.ones((1, 1, 2, 2, 16, 16), dtype=torch.bfloat16, device=device)
    slots = torch.tensor([[[0, 1]]], dtype=torch.int32, device=device)
    # The row of the first sequence ends where the second's begins.
    cache, slots = cache.expand(2, 1, 2, 2, 16, 16).contiguous(), slots.expand(2, 1, 2).contiguous()
    bias, means = torch.zeros(2, 1, 18, device=device), torch.zeros(2, 1, 3, device=device)
    at = torch.tensor([18, 17], dtype=torch.int32, device=device)
    weights = torch.ones(1, device=device), torch.ones(1, 16, device=device)
    eviction_bias(cache, slots, at, *weights, bias, means, kernel=8, stride=4)
    assert bias.nonzero().tolist() == [[1, 0, 17]]


def _scored(device: str, positions: list[int], blocks: int, block: int, stride: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(blocks + sum(positions))
    scores = torch.randn(len(positions), 2, blocks, generator=random)
    means = torch.randn(len(positions), 2, blocks * (block // stride), generator=random)
    return [scores.to(device), means.to(device), torch.tensor(positions, dtype=torch.int32, device=device)]


@pytest.mark.parametrize(("block", "kernel", "stride"), GEOMETRIES)
@pytest.mark.parametrize("count", [1, 4, 9, 40])
@pytest.mark.parametrize("blocks", [13, 40])
def test_the_combined_scores_are_those_of_the_reference(
    device: str, block: int, kernel: int, stride: int, count: int, blocks: int
) -> None:
    scores, means, positions = _scored(device, [12 * block + 7, 5 * block, 3, kernel], blocks, block, stride)
    sizes = {"count": count, "init_blocks": 1, "local_blocks": 2, "block": block, "kernel": kernel, "stride": stride}
    out = torch.full_like(scores, float("nan"))
    shortlist(scores, means, positions, out, **sizes)
    assert torch.equal(out, shortlist_reference(scores, means, positions, **sizes))
    shortlist(scores, means, positions, scores, **sizes)
    assert torch.equal(scores, out)


def test_the_query_names_the_forced_blocks_first_and_then_its_best(device: str) -> None:
    scores = torch.tensor([[[0.0, 5.0, 1.0, 5.0, 9.0, 2.0, 0.0, 0.0]]], device=device)
    means = torch.zeros(1, 1, 8 * 4, device=device)
    at, out = torch.tensor([16 * 7], dtype=torch.int32, device=device), torch.empty_like(scores)
    shortlist(scores, means, at, out, count=5, init_blocks=1, local_blocks=1, block=16, kernel=8, stride=4)
    assert (out[0, 0] == INF).nonzero().flatten().tolist() == [0, 1, 4, 6, 7]


def test_a_score_that_is_no_number_is_the_worst(device: str) -> None:
    scores = torch.tensor([[[0.0, float("nan"), -9.0, 0.0]]], device=device)
    at, out = torch.tensor([16 * 3], dtype=torch.int32, device=device), torch.empty_like(scores)
    means = torch.zeros(1, 1, 16, device=device)
    shortlist(scores, means, at, out, count=3, init_blocks=1, local_blocks=0, block=16, kernel=8, stride=4)
    assert out[0, 0].tolist() == [INF, 0.0, INF, INF]


def test_what_does_not_fit_is_refused(device: str) -> None:
    scores, means, positions = _scored(device, [50], 5, 16, 4)
    sizes = {"count": 3, "init_blocks": 1, "local_blocks": 1, "block": 16, "kernel": 8, "stride": 4}
    with pytest.raises(ValueError, match="positions: given"):
        shortlist(scores, means, positions.long(), scores, **sizes)
    with pytest.raises(ValueError, match="means: given"):
        shortlist(scores, means.double(), positions, scores, **sizes)
    with pytest.raises(ValueError, match=r"count, blocks: given 0, 5"):
        shortlist(scores, means, positions, scores, **{**sizes, "count": 0})
    cache = torch.zeros((1, 1, 1, 2, 16, 16), dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="cache: given"):
        eviction_bias(cache, positions, positions, means, means, means, means, kernel=8, stride=4)
