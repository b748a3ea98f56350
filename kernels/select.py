"""Block selection and residency: choose blocks, find the missing ones, evict the least recently selected.

Source: SparDA, arXiv 2606.04511 (top-k blocks with forced initial and local blocks, host-resident cache, device slots).
The kernel itself is in select_kernels.
"""

from __future__ import annotations

import torch
import triton

from sparda.kernels.select_kernels import select_kernel


def _check(tensors: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless each named tensor is contiguous with the given shape, int32 (scores: fp32)."""
    for name, shape in shapes.items():
        tensor = tensors[name]
        dtype = torch.float32 if name == "scores" else torch.int32
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name}: given {tuple(tensor.shape)} {tensor.dtype}, allowed: contiguous {shape} {dtype}")


def select_blocks(
    scores: torch.Tensor,
    step: torch.Tensor,
    positions: torch.Tensor,
    block_of_slot: torch.Tensor,
    stamp: torch.Tensor,
    slot_of_block: torch.Tensor,
    chosen_slots: torch.Tensor,
    chosen_count: torch.Tensor,
    miss_src: torch.Tensor,
    miss_dst: torch.Tensor,
    miss_count: torch.Tensor,
    victims: torch.Tensor,
    *,
    phase: int,
    top_k: int,
    init_blocks: int,
    local_blocks: int,
    block: int,
    pool_rows: int,
    pool_base: int,
) -> None:
    """Choose the blocks of this step, give each a slot, and list the copies from host memory (arXiv 2606.04511).

    All tensors are contiguous and int32 but the scores. Blocks m < init_blocks and the last local_blocks + 1 existing
    ones are always chosen, then the best scores (ties: the lowest block; NaN counts as -inf) up to min(top_k,
    existing). The block that the next token opens gets a slot too. Missing blocks, ascending, take the least recently
    selected slots (ties: the lowest slot), assigned in slot order. A block stays in its slot until it is evicted.

    Args:
        scores: [P, B, H, M] fp32; row (step + phase) % P is read.
        step: [1] the step counter, not negative.
        positions: [B] the current token's position t, below M * block.
        block_of_slot: [B, H, S] block in each slot, -1 empty; updated.
        stamp: [B, H, S] step in which the slot was last selected, -1 never; at most `step`; updated.
        slot_of_block: [B, H, M] slot of each block, -1 not resident; updated.
        chosen_slots: [B, H, top_k] out: slots of the chosen blocks in ascending block order; the rest is left alone.
        chosen_count: [B, H] out: number of chosen blocks.
        miss_src: [B*H*S] out: row of the host pool, (pool_base + (b*H+h)*M + m) % pool_rows.
        miss_dst: [B*H*S] out: row of the device cache, (b*H+h)*S + slot.
        miss_count: [1] raised by the number of entries listed; zeroed by the caller. Entry order between (b, h) varies.
        victims: [B, H, S] scratch.
        phase: added to the step to find the row of scores.
        top_k: most blocks chosen.
        init_blocks: blocks at the start that are always chosen.
        local_blocks: blocks before the newest that are always chosen.
        block: tokens of a block.
        pool_rows: rows of the host pool.
        pool_base: row of the host pool where this layer's blocks begin.

    Raises:
        ValueError: a shape, dtype or size is not as above, or S < top_k + 1.

    """
    periods, batch, kv_heads, blocks = scores.shape
    slots = block_of_slot.shape[-1]
    pairs = (batch, kv_heads)
    shapes = {
        "scores": (periods, *pairs, blocks), "step": (1,), "positions": (batch,), "block_of_slot": (*pairs, slots),
        "stamp": (*pairs, slots), "slot_of_block": (*pairs, blocks), "chosen_slots": (*pairs, top_k),
        "chosen_count": pairs, "miss_src": (batch * kv_heads * slots,), "miss_dst": (batch * kv_heads * slots,),
        "miss_count": (1,), "victims": (*pairs, slots),
    }  # fmt: skip
    arrays = (
        scores, step, positions, block_of_slot, stamp, slot_of_block, chosen_slots, chosen_count, miss_src, miss_dst,
        miss_count, victims,
    )  # fmt: skip
    _check(dict(zip(shapes, arrays, strict=True)), shapes)
    if slots < top_k + 1:
        raise ValueError(f"slots: given {slots}, allowed: at least top_k + 1 = {top_k + 1}")
    if blocks > 32768 or top_k > 32767 or top_k < 1:
        raise ValueError(f"blocks, top_k: given {blocks}, {top_k}, allowed: 1..32768, 1..32767")
    if not 0 < pool_rows < 2**31 or pool_base < 0 or phase < 0:
        raise ValueError(f"pool_rows, pool_base, phase: given {pool_rows}, {pool_base}, {phase}, allowed: int32, >= 0")
    select_kernel[(batch * kv_heads,)](
        *arrays, kv_heads, blocks, slots, phase, pool_rows, pool_base, PERIODS=periods, TOP_K=top_k, INIT=init_blocks,
        LOCAL=local_blocks, BLOCK=block, BLOCKS_PAD=max(16, triton.next_power_of_2(blocks)),
        SLOTS_PAD=max(16, triton.next_power_of_2(slots)), num_warps=8,
    )  # fmt: skip


def select_reference(
    scores: torch.Tensor,
    step: int,
    positions: torch.Tensor,
    block_of_slot: torch.Tensor,
    stamp: torch.Tensor,
    slot_of_block: torch.Tensor,
    *,
    phase: int,
    top_k: int,
    init_blocks: int,
    local_blocks: int,
    block: int,
    pool_rows: int,
    pool_base: int,
) -> tuple[list[list[list[int]]], set[tuple[int, int]]]:
    """select_blocks in plain Python: updates the three maps; returns the chosen slots [B][H][...] and the copies.

    The copies are (pool row, cache row) pairs, a set because select_blocks lists them in no fixed order over (b, h).
    """
    period, _, kv_heads, blocks = scores.shape
    slots = block_of_slot.shape[-1]
    chosen_slots: list[list[list[int]]] = []
    copies: set[tuple[int, int]] = set()
    for b, t in enumerate(positions.tolist()):
        chosen_slots.append([])
        existing = min(t // block + 1, blocks)
        for h in range(kv_heads):
            row = scores[(step + phase) % period, b, h]
            values = row.masked_fill(row.isnan(), float("-inf")).tolist()
            forced = [m for m in range(existing) if m < init_blocks or m >= existing - 1 - local_blocks]
            others = sorted((m for m in range(existing) if m not in forced), key=lambda m: (-values[m], m))
            chosen = sorted((forced + others)[: min(top_k, existing)])
            opened = [(t + 1) // block] if (t + 1) % block == 0 and (t + 1) // block < blocks else []
            place, inside, last = slot_of_block[b, h], block_of_slot[b, h], stamp[b, h]
            wanted = chosen + opened
            missing = [m for m in wanted if place[m] < 0]
            kept = {int(place[m]) for m in wanted} - {-1}
            free = sorted((s for s in range(slots) if s not in kept), key=lambda s: (int(last[s]), s))
            for m, s in zip(missing, sorted(free[: len(missing)]), strict=True):
                if inside[s] >= 0:
                    place[int(inside[s])] = -1
                place[m], inside[s] = s, m
                if m * block < t:
                    pair = b * kv_heads + h
                    copies.add(((pool_base + pair * blocks + m) % pool_rows, pair * slots + s))
            for m in wanted:
                last[int(place[m])] = step
            chosen_slots[b].append([int(place[m]) for m in chosen])
    return chosen_slots, copies
