"""Write the newest token's key and value of every layer through to the pinned host pool, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

VALUES = (torch.bfloat16, torch.float32)
"""Types of caches and pool; both alike."""


@triton.jit
def _write_newest_kernel(
    caches: tl.tensor,
    slot_of_block: tl.tensor,
    positions: tl.tensor,
    pool: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    slots: tl.tensor,
    capacity: tl.tensor,
    pool_base: tl.tensor,
    host_rows: tl.tensor,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
) -> None:
    owner = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + (owner // heads) % batch)
    index = position // BLOCK
    # A position past the capacity has no entry to read; it is left alone like a block that holds no slot.
    slot = tl.load(slot_of_block + owner * capacity + index, mask=index < capacity, other=-1).to(tl.int64)
    if slot >= 0:
        row = (pool_base + owner * capacity + index) % host_rows
        halves = tl.arange(0, 2)[:, None] * (BLOCK * D)
        inside = (position % BLOCK) * D + halves + tl.arange(0, D)[None, :]
        newest = tl.load(caches + (owner * slots + slot) * (2 * BLOCK * D) + inside)
        tl.store(pool + row * (2 * BLOCK * D) + inside, newest)


def write_newest(
    caches: torch.Tensor,
    slot_of_block: torch.Tensor,
    positions: torch.Tensor,
    pool: torch.Tensor,
    *,
    block: int,
    pool_base: int = 0,
) -> None:
    """Copy token ``positions[b]``'s key and value from its GPU slot to its place in the pool, for every layer.

    caches: [L, B, H, S, 2, block, D] bf16 or fp32, contiguous, keys then values.
    slot_of_block: [L, B, H, M] int32, the slot of each block or a negative number; a block in no slot is skipped.
    positions: [B] int32, the 0-based position of the token being decoded, already appended to its slot.
    pool: [host_rows, 2 * block * D], of the type of caches, pinned host memory (or GPU memory), written in place.
    Block m of (l, b, h) is row ``(pool_base + ((l * B + b) * H + h) * M + m) % host_rows``.
    block: tokens in a block, a power of two. pool_base: at least 0.

    Raises ValueError for shapes or types that do not fit together.
    """
    _check(caches, slot_of_block, positions, pool, block, pool_base)
    layers, batch, heads, slots = caches.shape[:4]
    _write_newest_kernel[(layers * batch * heads,)](
        caches,
        slot_of_block,
        positions,
        pool,
        batch,
        heads,
        slots,
        slot_of_block.shape[3],
        pool_base,
        pool.shape[0],
        BLOCK=block,
        D=caches.shape[6],
        num_warps=1,
    )


def write_newest_reference(
    caches: torch.Tensor,
    slot_of_block: torch.Tensor,
    positions: torch.Tensor,
    pool: torch.Tensor,
    *,
    block: int,
    pool_base: int = 0,
) -> None:
    """What ``write_newest`` does, one (layer, sequence, KV head) at a time on the host; shapes as there."""
    layers, batch, heads = caches.shape[:3]
    capacity = slot_of_block.shape[3]
    rows = pool.view(pool.shape[0], 2, block, caches.shape[6])
    for layer in range(layers):
        for b, position in enumerate(positions.tolist()):
            for h in range(heads):
                index, token = divmod(position, block)
                slot = int(slot_of_block[layer, b, h, index]) if index < capacity else -1
                if slot >= 0:
                    row = (pool_base + ((layer * batch + b) * heads + h) * capacity + index) % pool.shape[0]
                    rows[row, :, token] = caches[layer, b, h, slot, :, token].to(pool.device)


def _check(
    caches: torch.Tensor,
    slot_of_block: torch.Tensor,
    positions: torch.Tensor,
    pool: torch.Tensor,
    block: int,
    pool_base: int,
) -> None:
    if caches.dim() != 7 or caches.dtype not in VALUES or not caches.is_contiguous():
        raise ValueError(
            "caches must be contiguous bf16 or fp32 [L, B, H, S, 2, block, D], got "
            f"{caches.dtype} {tuple(caches.shape)}"
        )
    head_dim = int(caches.shape[6])
    if tuple(caches.shape[4:6]) != (2, block) or block < 1 or block & (block - 1) or head_dim & (head_dim - 1):
        raise ValueError(
            f"caches must end in [2, {block}, D], block and D powers of two, got {tuple(caches.shape[4:])}"
        )
    _check_int32("slot_of_block", slot_of_block, (*caches.shape[:3], slot_of_block.shape[-1]), caches.device)
    _check_int32("positions", positions, (caches.shape[1],), caches.device)
    if pool.dim() != 2 or pool.dtype != caches.dtype or not pool.is_contiguous() or pool.shape[0] < 1:
        raise ValueError(
            f"pool must be contiguous {caches.dtype} [host_rows, values] like caches, got {pool.dtype} "
            f"{tuple(pool.shape)}"
        )
    if pool.shape[1] != 2 * block * head_dim:
        raise ValueError(f"pool must have 2 * block * D = {2 * block * head_dim} values a row, got {pool.shape[1]}")
    if caches.is_cuda and not (pool.is_cuda or pool.is_pinned()):
        raise ValueError("pool must be pinned host memory for the GPU to write it, got pageable memory")
    if pool_base < 0:
        raise ValueError(f"pool_base must be at least 0, got {pool_base}")


def _check_int32(name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous int32 {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like caches, got {tensor.device}")
