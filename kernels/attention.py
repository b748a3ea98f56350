"""Decode attention over the chosen blocks of a slot cache, with the blocks of one head split over thread blocks."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sparda.kernels.launch import dependent

VALUES = (torch.bfloat16, torch.float32)
"""Types of queries, cache and output; all three alike."""
STAGES = 9
"""Pipeline depth: the loads of slot indices take half of it, which leaves four blocks of keys and values in flight.

They fill more than half of a multiprocessor's shared memory, so that no two thread blocks of a single wave meet on one
while another stands empty.
"""
IN_PLACE_STAGES = 5
"""The same depth where there are no slot indices to load."""
WIDE_STAGES = 2
"""The same for fp32 caches, whose blocks take twice the shared memory."""


@triton.jit
def _product(a: tl.tensor, b: tl.tensor, DOT: tl.constexpr) -> tl.tensor:
    """a @ b in fp32; fp32 operands are not rounded to tf32."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision="ieee")


@triton.jit
def _attend(
    q: tl.tensor, cache: tl.tensor, chosen: tl.tensor, block_of_slot: tl.tensor, bias: tl.tensor, first: tl.tensor,
    last: tl.tensor, count: tl.tensor, tail: tl.tensor, scale: tl.tensor, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, TABLE: tl.constexpr, BIASED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Softmax over the entries [first, last) of one head: its maximum (log2 units), sum and weighted values."""
    tokens = tl.arange(0, BLOCK)
    dims = tl.arange(0, D)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for entry in tl.range(first, last, num_stages=STAGES):
        slot = tl.load(chosen + entry) if TABLE else entry
        rows = cache + slot.to(tl.int64) * (2 * BLOCK * D)
        length = tl.where(entry == count - 1, tail, BLOCK)
        k = tl.load(rows + tokens[None, :] * D + dims[:, None])
        # Rows past the newest token were never written: a NaN there would survive a weight of zero, so load zeros.
        v = tl.load(rows + BLOCK * D + tokens[:, None] * D + dims[None, :], mask=tokens[:, None] < length, other=0.0)
        scores = _product(q, k, DOT) * scale
        if BIASED:
            # The bias is added to the scaled product, as in the definition (q.k / sqrt(D) + c). NOSA's public decode
            # kernel adds it before the scaling and so divides it by sqrt(D) too, unlike its own prefill.
            place = tl.load(block_of_slot + slot) * BLOCK + tokens
            shift = tl.load(bias + place, mask=tokens < length, other=0.0)
            # Scores are powers of two: log2(e) is part of the scale.
            scores += shift[None, :] * 1.4426950408889634
        scores = tl.where(tokens[None, :] < length, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + _product(weights.to(v.dtype), v, DOT)
        top = new_top
    return top, total, acc


@triton.jit
def _block_attention_kernel(
    q: tl.tensor, cache: tl.tensor, chosen_slots: tl.tensor, chosen_count: tl.tensor, positions: tl.tensor,
    block_of_slot: tl.tensor, bias: tl.tensor, out: tl.tensor, partial: tl.tensor, stats: tl.tensor, q_row: tl.tensor,
    q_head: tl.tensor, heads: tl.tensor, slots: tl.tensor, top_k: tl.tensor, tokens: tl.tensor, splits: tl.tensor,
    scale: tl.tensor, G: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
    SINGLE: tl.constexpr, DOT: tl.constexpr, TABLE: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0)
    owner = tl.program_id(1).to(tl.int64)
    sequence = owner // heads
    position = tl.load(positions + sequence)
    count = tl.load(chosen_count + owner) if TABLE else position // BLOCK + 1
    tail = position % BLOCK + 1
    share = tl.cdiv(count, splits)
    first = split * share
    last = tl.minimum(first + share, count)

    group = tl.arange(0, ROWS)
    real = group < G
    dims = tl.arange(0, D)
    q_rows = q + sequence * q_row + ((owner % heads) * G + group) * q_head
    queries = tl.load(q_rows[:, None] + dims[None, :], mask=real[:, None], other=0.0)
    cache += owner * slots * (2 * BLOCK * D)
    chosen_slots += owner * top_k
    if BIASED:
        block_of_slot += owner * slots
        bias += owner * tokens
    top, total, acc = _attend(
        queries, cache, chosen_slots, block_of_slot, bias, first, last, count, tail, scale, ROWS, BLOCK, D, STAGES,
        DOT, TABLE, BIASED,
    )  # fmt: skip
    if SINGLE:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out + (owner * G + group[:, None]) * D + dims[None, :], acc.to(out.dtype.element_ty), mask=real[:, None]
        )
    else:
        row = (owner * splits + split) * G + group
        tl.store(stats + row * 2, top, mask=real)
        tl.store(stats + row * 2 + 1, total, mask=real)
        tl.store(partial + row[:, None] * D + dims[None, :], acc, mask=real[:, None])


@triton.jit
def _merge_kernel(
    partial: tl.tensor, stats: tl.tensor, out: tl.tensor, splits: tl.tensor, G: tl.constexpr, SPLITS: tl.constexpr,
    D: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program a query head: its attention from the results of all splits, added in split order.

    A kernel of its own, and not the last split's business: read by one thread block per KV head, the partial results
    took several times as long as the attention itself.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dims = tl.arange(0, D)
    known = split < splits
    row = (head // G * splits + split) * G + head % G
    tops = tl.load(stats + row * 2, mask=known, other=float("-inf"))
    totals = tl.load(stats + row * 2 + 1, mask=known, other=0.0)
    weights = tl.exp2(tops - tl.max(tops, 0))
    values = tl.load(partial + row[:, None] * D + dims[None, :], mask=known[:, None], other=0.0)
    merged = tl.sum(values * weights[:, None], 0) / tl.sum(totals * weights, 0)
    tl.store(out + head * D + dims, merged.to(out.dtype.element_ty))


def block_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    chosen_slots: torch.Tensor,
    chosen_count: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    stats: torch.Tensor,
    *,
    splits: int,
) -> None:
    """Fill ``out`` with each query head's softmax attention over the tokens of its KV head's chosen blocks.

    q: [B, Hq, D] bf16 or fp32; any strides with the last dimension contiguous. Query heads of one KV head are adjacent.
    cache: [B, H, S, 2, block, D], of the type of q, contiguous, keys then values.
    chosen_slots: [B, H, T] int32, slots of the chosen blocks in ascending block order; the last valid one is the tail
    block, which holds ``positions[b] % block + 1`` tokens, and all others are full.
    chosen_count: [B, H] int32, valid entries, 1 to T. positions: [B] int32, position of the token being decoded.
    out: [B, Hq, D], of the type of q, contiguous. Scratch, fp32: partial [B, H, splits, G, D] and stats
    [B, H, splits, G, 2] (maximum, in log2 units, and sum).
    splits: thread blocks per KV head. The result depends on it, and not on which slots hold the blocks or on timing.

    Raises ValueError for shapes or types that do not fit together.
    """
    others = {"chosen_slots": chosen_slots, "chosen_count": chosen_count, "positions": positions}
    group = _check(q, cache, splits, {**others, "out": out, "partial": partial, "stats": stats})
    _launch(q, cache, chosen_slots, chosen_count, positions, out, partial, stats, splits, group, table=True)


def dense_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    stats: torch.Tensor,
    *,
    splits: int,
) -> None:
    """As ``block_attention`` over blocks 0 to ``positions[b] // block``, block m in slot m: full attention in place.

    Raises ValueError as ``block_attention`` does.
    """
    group = _check(q, cache, splits, {"positions": positions, "out": out, "partial": partial, "stats": stats})
    _launch(q, cache, positions, positions, positions, out, partial, stats, splits, group, table=False)


def biased_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    chosen_slots: torch.Tensor,
    chosen_count: torch.Tensor,
    positions: torch.Tensor,
    block_of_slot: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    stats: torch.Tensor,
    *,
    splits: int,
) -> None:
    """As ``block_attention``, with a bias for each token and KV head added to the logits of q . k / sqrt(D).

    block_of_slot: [B, H, S] int32, the block in each slot. bias: [B, H, T] fp32 by position; block m's begin at
    m * block. T covers every chosen block's tokens up to ``positions[b]``.

    Raises ValueError as ``block_attention`` does.
    """
    others = {"chosen_slots": chosen_slots, "chosen_count": chosen_count, "positions": positions, "bias": bias}
    others |= {"block_of_slot": block_of_slot, "out": out, "partial": partial, "stats": stats}
    group = _check(q, cache, splits, others)
    _launch(
        q, cache, chosen_slots, chosen_count, positions, out, partial, stats, splits, group, table=True,
        biases=(block_of_slot, bias),
    )  # fmt: skip


def _launch(
    q: torch.Tensor, cache: torch.Tensor, chosen_slots: torch.Tensor, chosen_count: torch.Tensor,
    positions: torch.Tensor, out: torch.Tensor, partial: torch.Tensor, stats: torch.Tensor, splits: int, group: int,
    *, table: bool, biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """``biases``: block_of_slot and bias; without them the kernel is compiled without."""
    batch, heads, slots, _, block, head_dim = cache.shape
    scale = math.log2(math.e) / math.sqrt(head_dim)
    block_of_slot, bias = biases or (positions, stats)
    sizes = (q.stride(0), q.stride(1), heads, slots, chosen_slots.shape[-1], bias.shape[-1], splits, scale)
    compiled = isinstance(_block_attention_kernel, triton.runtime.JITFunction)
    _block_attention_kernel[(splits, batch * heads)](
        q, cache, chosen_slots, chosen_count, positions, block_of_slot, bias, out, partial, stats, *sizes,
        G=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        BLOCK=block,
        D=head_dim,
        STAGES=WIDE_STAGES if cache.element_size() > 2 else STAGES if table else IN_PLACE_STAGES,
        SINGLE=splits == 1,
        # Triton's interpreter multiplies the bits of bf16 as integers; fp32 gives it the products of the tensor cores.
        DOT=tl.bfloat16 if compiled and cache.dtype == torch.bfloat16 else tl.float32,
        TABLE=table,
        BIASED=biases is not None,
        num_warps=4,
        **dependent(q),
    )  # fmt: skip
    if splits > 1:
        padded = triton.next_power_of_2(splits)
        _merge_kernel[(batch * heads * group,)](
            partial, stats, out, splits, G=group, SPLITS=padded, D=head_dim, num_warps=4, **dependent(q)
        )


def block_attention_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    chosen_slots: torch.Tensor,
    chosen_count: torch.Tensor,
    positions: torch.Tensor,
    block_of_slot: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dense fp32 attention over the gathered tokens: [B, Hq, D] fp32; inputs as for ``biased_attention``."""
    batch, heads, _, _, block, head_dim = cache.shape
    queries = q.float().reshape(batch, heads, -1, head_dim)
    out = torch.empty_like(queries)
    for b, position in enumerate(positions.tolist()):
        for h, count in enumerate(chosen_count[b].tolist()):
            tokens = (count - 1) * block + position % block + 1
            chosen = cache[b, h, chosen_slots[b, h, :count].long()].float()
            keys, values = (chosen[:, half].reshape(-1, head_dim)[:tokens] for half in (0, 1))
            logits = queries[b, h] @ keys.T / math.sqrt(head_dim)
            if bias is not None and block_of_slot is not None:
                at = block_of_slot[b, h, chosen_slots[b, h, :count].long()].long()[:, None] * block
                logits += bias[b, h, (at + torch.arange(block, device=at.device)).flatten()[:tokens]]
            out[b, h] = torch.softmax(logits, dim=-1) @ values
    return out.reshape(batch, -1, head_dim)


def _check(q: torch.Tensor, cache: torch.Tensor, splits: int, others: dict[str, torch.Tensor]) -> int:
    """Query heads per KV head, once all tensors (``others`` by argument name) are known to fit together."""
    if cache.dim() != 6 or cache.shape[3] != 2 or cache.dtype not in VALUES or not cache.is_contiguous():
        raise ValueError(
            f"cache must be contiguous bf16 or fp32 [B, H, S, 2, block, D], got {cache.dtype} {tuple(cache.shape)}"
        )
    batch, heads, _, _, block, head_dim = cache.shape
    if block < 16 or block & (block - 1) or head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"block and D must be powers of two from 16 up, got {block} and {head_dim}")
    if q.dim() != 3 or q.shape[0] != batch or q.shape[1] % heads or q.shape[1] < 1 or q.shape[2] != head_dim:
        raise ValueError(f"q must be [{batch}, a multiple of {heads}, {head_dim}], got {tuple(q.shape)}")
    if q.dtype != cache.dtype or q.stride(2) != 1:
        raise ValueError(
            f"q must be {cache.dtype} like cache, its last dimension contiguous, got {q.dtype}, strides {q.stride()}"
        )
    if splits < 1:
        raise ValueError(f"splits must be at least 1, got {splits}")
    group = int(q.shape[1]) // int(heads)
    table = others.get("chosen_slots")
    allowed = {
        "chosen_slots": ((batch, heads, table.shape[-1] if table is not None else 0), torch.int32),
        "chosen_count": ((batch, heads), torch.int32),
        "positions": ((batch,), torch.int32),
        "block_of_slot": (tuple(cache.shape[:3]), torch.int32),
        "bias": ((batch, heads, others["bias"].shape[-1] if "bias" in others else 0), torch.float32),
        "out": (tuple(q.shape), cache.dtype),
        "partial": ((batch, heads, splits, group, head_dim), torch.float32),
        "stats": ((batch, heads, splits, group, 2), torch.float32),
    }
    for name, tensor in others.items():
        shape, dtype = allowed[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
        if tensor.device != cache.device:
            raise ValueError(f"{name} must be on {cache.device} like cache, got {tensor.device}")
    return group
