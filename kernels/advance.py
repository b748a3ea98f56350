"""End of a decoding step: move every position but 0 and the step counter on, and bank the miss counts.

One tiny kernel, so that a captured step ends ready for its own replay. Source: SparDA, arXiv 2606.04511.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparda.kernels.launch import dependent


@triton.jit
def _advance_kernel(
    positions: tl.tensor,
    step: tl.tensor,
    miss_count: tl.tensor,
    miss_total: tl.tensor,
    batch: tl.tensor,
    layers: tl.tensor,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, WIDTH)
    position = tl.load(positions + i, mask=i < batch, other=0)
    # A row in use has at least one token behind it. An unused one stays at 0, where it can be stepped for ever.
    tl.store(positions + i, tl.where(position > 0, position + 1, position), mask=i < batch)
    missed = tl.load(miss_count + i, mask=i < layers, other=0)
    banked = tl.load(miss_total + i, mask=i < layers, other=0)
    tl.store(miss_total + i, banked + missed.to(tl.int64), mask=i < layers)
    tl.store(miss_count + i, tl.zeros([WIDTH], tl.int32), mask=i < layers)
    tl.store(step + i, tl.load(step + i, mask=i < 1, other=0) + 1, mask=i < 1)


def advance(positions: torch.Tensor, step: torch.Tensor, miss_count: torch.Tensor, miss_total: torch.Tensor) -> None:
    """Add one to every position above 0 and to the step, bank and zero miss_count; all in place.

    Args:
        positions: [B] int32; 0 marks a row that no sequence uses, and stays 0.
        step: [1] int32.
        miss_count: [L] int32, blocks missed in this step by each layer.
        miss_total: [L] int64, blocks missed since the start.

    Raises:
        ValueError: a shape or dtype is not as above, or a tensor is not contiguous.

    """
    layers = miss_count.numel()
    wanted = {
        "positions": (positions, (positions.numel(),), torch.int32),
        "step": (step, (1,), torch.int32),
        "miss_count": (miss_count, (layers,), torch.int32),
        "miss_total": (miss_total, (layers,), torch.int64),
    }
    for name, (tensor, shape, dtype) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name}: given {tuple(tensor.shape)} {tensor.dtype}, allowed: contiguous {shape} {dtype}")
    width = max(16, triton.next_power_of_2(max(positions.numel(), layers)))
    sizes = (positions.numel(), layers)
    _advance_kernel[(1,)](
        positions, step, miss_count, miss_total, *sizes, WIDTH=width, num_warps=1, **dependent(positions)
    )


def advance_reference(
    positions: torch.Tensor, step: torch.Tensor, miss_count: torch.Tensor, miss_total: torch.Tensor
) -> None:
    """What advance does, by plain PyTorch, in place, for the same arguments."""
    positions += positions > 0
    step += 1
    miss_total += miss_count
    miss_count.zero_()
