"""Entering a token writes rotated heads, the cache row and, when due, the compressed key."""

from __future__ import annotations

import pytest
import torch

from sparda.kernels.append import append_reference, append_token

BLOCK, KERNEL, STRIDE, BLOCKS, SLOTS = 16, 8, 4, 6, 7


def _state(
    device: str, spots: list[int], heads: int, extra: int, dim: int, *, kv_heads: int = 2, parts: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, torch.Tensor]:  # fmt: skip
    torch.manual_seed(heads + extra + dim)
    batch = len(spots)
    angles = torch.randn(BLOCKS * BLOCK, dim // 2, device=device)
    slots = torch.stack([torch.randperm(SLOTS)[:BLOCKS] for _ in range(batch * kv_heads)])
    return {
        "parts": torch.randn(parts, batch, (heads + 2 * kv_heads + extra) * dim, device=device),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "positions": torch.tensor(spots, dtype=torch.int32, device=device),
        "slot_of_block": slots.view(batch, kv_heads, BLOCKS).to(device, torch.int32),
        "cache": torch.randn(batch, kv_heads, SLOTS, 2, BLOCK, dim, device=device).to(dtype),
        "keys": torch.full((batch, kv_heads, 20, dim), 77.0, device=device, dtype=dtype),
        "q_out": torch.full((batch, heads + extra, dim), float("nan"), device=device, dtype=dtype),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "extra", "dim", "parts"),
    [(2, 2, 0, 64, 1), (6, 2, 2, 64, 2), (8, 2, 4, 128, 4), (9, 3, 3, 64, 2), (1, 1, 0, 16, 3), (8, 8, 8, 64, 2)],
)
def test_all_outputs_agree_with_the_reference(
    device: str, heads: int, kv_heads: int, extra: int, dim: int, parts: int, dtype: torch.dtype
) -> None:
    spots = [0, 6, 7, 8, 11, 15, 16, 19, 23, 47, 48, 83, 87, 95]
    state = _state(device, spots, heads, extra, dim, kv_heads=kv_heads, parts=parts, dtype=dtype)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    append_token(**state, heads=heads, kv_heads=kv_heads, kernel=KERNEL, stride=STRIDE)
    append_reference(**expected, heads=heads, kv_heads=kv_heads, kernel=KERNEL, stride=STRIDE)
    close = 1e-5 if dtype == torch.float32 else 5e-2
    for name, tensor in state.items():
        # Two roundings to bf16, which need not be to nearest off the GPU.
        torch.testing.assert_close(tensor, expected[name], rtol=close, atol=close, msg=name)


def test_a_window_over_two_blocks_averages_the_keys_that_were_appended(device: str) -> None:
    state = _state(device, [0], 2, 0, 64)
    rotated = []
    for t in range(20):
        state["positions"].fill_(t)
        state["parts"].normal_()
        append_token(**state, heads=2, kv_heads=2, kernel=KERNEL, stride=STRIDE)
        slot = int(state["slot_of_block"][0, 1, t // BLOCK])
        rotated.append(state["cache"][0, 1, slot, 0, t % BLOCK].float())
    for j in range(4):
        mean = torch.stack(rotated[STRIDE * j : STRIDE * j + KERNEL]).mean(0)
        torch.testing.assert_close(state["keys"][0, 1, j].float(), mean, rtol=1e-2, atol=1e-2)
    assert (state["keys"][:, :, 4:] == 77).all()


def test_no_other_cache_row_changes(device: str) -> None:
    state = _state(device, [18], 2, 0, 64)
    before = state["cache"].clone()
    append_token(**state, heads=2, kv_heads=2, kernel=KERNEL, stride=STRIDE)
    changed = (state["cache"] != before).any(-1).nonzero().tolist()
    slots = state["slot_of_block"][0, :, 1].tolist()
    assert changed == [[0, h, slots[h], part, 2] for h in range(2) for part in range(2)]


def test_compressed_keys_beyond_their_capacity_are_dropped(device: str) -> None:
    state = _state(device, [87], 2, 0, 64)
    append_token(**state, heads=2, kv_heads=2, kernel=KERNEL, stride=STRIDE)
    assert (state["keys"] == 77).all()


def test_a_row_of_the_wrong_width_is_refused(device: str) -> None:
    state = _state(device, [3], 2, 0, 64)
    state["parts"] = state["parts"][..., :-64].contiguous()
    with pytest.raises(ValueError, match="parts: given"):
        append_token(**state, heads=2, kv_heads=2, kernel=KERNEL, stride=STRIDE)
