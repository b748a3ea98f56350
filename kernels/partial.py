"""Partial keys: a token's rotated key along a few directions, and a selection query along the same.

Source: InfiniGen, arXiv 2406.19707 (section 4: most of a score lies along few directions once queries and keys are
turned by an orthogonal matrix, so those directions of every key stay on the GPU and say which tokens to fetch).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparda.kernels.launch import dependent

_DTYPES = (torch.bfloat16, torch.float32)


@triton.jit
def _along(row: tl.tensor, basis: tl.tensor, DIM: tl.constexpr, RANK: tl.constexpr) -> tl.tensor:
    """The product of a row [DIM] with the basis [DIM, RANK] at that address, in fp32."""
    d = tl.arange(0, DIM)
    r = tl.arange(0, RANK)
    directions = tl.load(basis + d[:, None] * RANK + r[None, :])
    return tl.sum(tl.load(row + d).to(tl.float32)[:, None] * directions, axis=0)


@triton.jit
def _append_kernel(
    caches: tl.tensor,
    slot_of_block: tl.tensor,
    positions: tl.tensor,
    basis: tl.tensor,
    partial: tl.tensor,
    batch: tl.tensor,
    kv_heads: tl.tensor,
    slots: tl.tensor,
    blocks: tl.tensor,
    capacity: tl.tensor,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
):
    owner = tl.program_id(0).to(tl.int64)
    t = tl.load(positions + (owner // kv_heads) % batch)
    # A position past the room has no row; it is left alone like a block that holds no slot.
    index = t // BLOCK
    slot = tl.load(slot_of_block + owner * blocks + index, mask=index < blocks, other=-1).to(tl.int64)
    if (slot >= 0) & (t < capacity):
        key = caches + (owner * slots + slot) * (2 * BLOCK * DIM) + (t % BLOCK) * DIM
        pair = owner // (batch * kv_heads) * kv_heads + owner % kv_heads
        values = _along(key, basis + pair * (DIM * RANK), DIM, RANK)
        target = partial + (owner * capacity + t) * RANK + tl.arange(0, RANK)
        tl.store(target, values.to(partial.dtype.element_ty))


@triton.jit
def _query_kernel(
    query: tl.tensor,
    basis: tl.tensor,
    out: tl.tensor,
    kv_heads: tl.tensor,
    stride_b: tl.tensor,
    stride_h: tl.tensor,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    h = pair % kv_heads
    row = query + pair // kv_heads * stride_b + h * stride_h
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = _along(row, basis + h * (DIM * RANK), DIM, RANK)
    tl.store(out + pair * RANK + tl.arange(0, RANK), values.to(out.dtype.element_ty))


def append_partial(
    caches: torch.Tensor,
    slot_of_block: torch.Tensor,
    positions: torch.Tensor,
    basis: torch.Tensor,
    partial: torch.Tensor,
) -> None:
    """Write the partial key of token ``positions[b]`` of every layer, from its key in its slot (arXiv 2406.19707).

    One launch for all layers: no score of this step reads the newest token. A token whose block is in no slot, or
    whose position is past the room, is skipped.

    Args:
        caches: [L, B, H, S, 2, block, D] bf16 or fp32, contiguous, rotated keys then values.
        slot_of_block: [L, B, H, M] int32, contiguous: the slot of each block or a negative number.
        positions: [B] int32, the position of the token being decoded, already appended to its slot.
        basis: [L, H, D, R] fp32, contiguous: R directions of each layer and head, as columns.
        partial: [L, B, H, C, R] of the caches' type, contiguous; row ``positions[b]`` is written.

    Raises:
        ValueError: a shape or type is not as above, or block, D or R is no power of two.

    """
    layers, batch, kv_heads, slots, _, block, dim = caches.shape
    capacity, rank = partial.shape[-2:]
    _check("caches", caches, (layers, batch, kv_heads, slots, 2, block, dim), _DTYPES)
    _check("slot_of_block", slot_of_block, (layers, batch, kv_heads, slot_of_block.shape[-1]), (torch.int32,))
    _check("positions", positions, (batch,), (torch.int32,))
    _check("basis", basis, (layers, kv_heads, dim, rank), (torch.float32,))
    _check("partial", partial, (layers, batch, kv_heads, capacity, rank), (caches.dtype,))
    _check_powers(block=block, D=dim, R=rank)
    _append_kernel[(layers * batch * kv_heads,)](
        caches, slot_of_block, positions, basis, partial, batch, kv_heads, slots, slot_of_block.shape[3], capacity,
        BLOCK=block, DIM=dim, RANK=rank, num_warps=4,
    )  # fmt: skip


def project_query(query: torch.Tensor, basis: torch.Tensor, out: torch.Tensor) -> None:
    """Write a selection query along the directions of the partial keys (arXiv 2406.19707).

    Args:
        query: [B, H, D] bf16 or fp32, any strides, last dimension contiguous.
        basis: [H, D, R] fp32, contiguous.
        out: [B, H, R] of the query's type, contiguous.

    Raises:
        ValueError: a shape or type is not as above, or D or R is no power of two.

    """
    batch, kv_heads, dim = query.shape
    rank = out.shape[-1]
    if query.dtype not in _DTYPES or query.stride(2) != 1:
        raise ValueError(f"query: given {query.dtype}, strides {query.stride()}, allowed: bf16 or fp32 rows")
    _check("basis", basis, (kv_heads, dim, rank), (torch.float32,))
    _check("out", out, (batch, kv_heads, rank), (query.dtype,))
    _check_powers(D=dim, R=rank)
    _query_kernel[(batch * kv_heads,)](
        query, basis, out, kv_heads, query.stride(0), query.stride(1), DIM=dim, RANK=rank, num_warps=4,
        **dependent(out),
    )  # fmt: skip


def append_partial_reference(
    caches: torch.Tensor,
    slot_of_block: torch.Tensor,
    positions: torch.Tensor,
    basis: torch.Tensor,
    partial: torch.Tensor,
) -> None:
    """What append_partial does, one (layer, sequence, KV head) at a time, in place, for the same arguments."""
    layers, _, kv_heads = caches.shape[:3]
    block = caches.shape[5]
    for layer in range(layers):
        for b, t in enumerate(positions.tolist()):
            for h in range(kv_heads):
                index = t // block
                slot = int(slot_of_block[layer, b, h, index]) if index < slot_of_block.shape[3] else -1
                if slot >= 0 and t < partial.shape[3]:
                    key = caches[layer, b, h, slot, 0, t % block].float()
                    partial[layer, b, h, t] = (key @ basis[layer, h]).to(partial.dtype)


def project_query_reference(query: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """What project_query writes, by plain PyTorch: [B, H, R] of the query's type."""
    return torch.einsum("bhd,hdr->bhr", query.float(), basis).to(query.dtype)


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: given {tuple(tensor.shape)} {tensor.dtype}, allowed: contiguous {shape} {allowed}")


def _check_powers(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1 or size & (size - 1):
            raise ValueError(f"{name}: given {size}, allowed: a power of two")
