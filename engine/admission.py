"""Rows of a running batch change hands: a prompt's keys and values enter, an unused row is parked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparda.engine.errors import SpardaError
from sparda.engine.prefill import Prefilled

if TYPE_CHECKING:
    from sparda.engine.tiers import LayerTier, Tiers


def admit(tiers: Tiers, sequence: int, prefilled: Prefilled) -> None:
    """Let row ``sequence`` go on after a prompt; other rows are untouched, and everything is written in place.

    Its keys and values go to the GPU layers and to host memory, and slots hold the blocks that are always chosen,
    then the newest others. Raises SpardaError where the prompt is of another model or does not fit in the row, and
    where the host pool is not exact: aliased rows belong to several sequences.
    """
    spec, length = tiers.spec, prefilled.tokens
    # The next token's block is among them, empty as it may be.
    count = spec.blocks(length + 1)
    _check(tiers, sequence, prefilled, count)
    kept, keys = _newest(tiers, count), spec.compressed(length)
    for layer, tier in enumerate(tiers.layers):
        blocks = _blocks_of(tiers, prefilled.keys[layer], prefilled.values[layer], count)
        if tier.pool_base < 0:
            tier.cache[sequence, :, :count] = blocks
            tiers.place(tier, tiers.all_blocks(), sequence)
        else:
            _to_pool(tiers, tier, sequence, blocks)
            tier.cache[sequence, :, : kept.numel()] = blocks[:, kept.long()]
            tiers.place(tier, kept, sequence)
        if keys:
            windows = prefilled.keys[layer].float().unfold(1, spec.kernel, spec.stride)
            tier.keys[sequence, :, :keys] = windows.mean(-1).to(tiers.dtype)
    tiers.positions[sequence] = length


def park(tiers: Tiers, sequence: int) -> None:
    """Leave row ``sequence`` unused: at position 0, where it stays, it steps on one block and fetches nothing."""
    tiers.positions[sequence] = 0
    for tier in tiers.layers:
        tiers.place(tier, tiers.all_blocks()[: None if tier.pool_base < 0 else 1], sequence)


def _check(tiers: Tiers, sequence: int, prefilled: Prefilled, count: int) -> None:
    s, batch = tiers.shape, tiers.workload.batch
    size = (s.layers, s.kv_heads, prefilled.tokens, s.head_dim)
    if tiers.aliased:
        raise SpardaError(
            f"a host pool of {tiers.pool.shape[0]} blocks is shared by sequences, fit for a benchmark only; decoding "
            f"prompts needs {tiers.offloaded * tiers.heads * tiers.blocks}."
        )
    if not 0 <= sequence < batch:
        raise SpardaError(f"there is no row {sequence}; the batch has rows 0 to {batch - 1}.")
    if tuple(prefilled.keys.shape) != size or prefilled.keys.dtype != tiers.dtype:
        raise SpardaError(
            f"the prompt's keys are {prefilled.keys.dtype} {tuple(prefilled.keys.shape)}, prefilled with another "
            f"model; {s.name} has {tiers.dtype} {size}."
        )
    if count > tiers.blocks:
        raise SpardaError(
            f"a prompt of {prefilled.tokens} tokens and one more do not fit in a row of "
            f"{tiers.blocks * tiers.spec.block}; give the batch a larger capacity."
        )


def _newest(tiers: Tiers, count: int) -> Tensor:
    """Of a sequence's ``count`` blocks those that slots hold at its start, ascending: int32."""
    initial = min(tiers.spec.init_blocks, count)
    # The last slot stays empty: the next block is born there. Initial blocks are chosen in every step.
    newest = max(initial, count - (tiers.slots - 1 - initial))
    kept = [*range(initial), *range(newest, count)]
    return torch.tensor(kept, dtype=torch.int32, device=tiers.device)


def _blocks_of(tiers: Tiers, keys: Tensor, values: Tensor, count: int) -> Tensor:
    """[H, count, 2, block, head_dim] of keys and values [H, S, head_dim]; zeros where no token is yet."""
    heads, length, dim = keys.shape
    block = tiers.spec.block
    blocks = torch.zeros(heads, 2, count * block, dim, dtype=tiers.dtype, device=tiers.device)
    blocks[:, 0, :length] = keys
    blocks[:, 1, :length] = values
    return blocks.view(heads, 2, count, block, dim).transpose(1, 2)


def _to_pool(tiers: Tiers, tier: LayerTier, sequence: int, blocks: Tensor) -> None:
    # Head by head, each a contiguous piece of pinned memory: the copy then needs no staging and no wait.
    for head, rows in enumerate(blocks.flatten(2).contiguous()):
        first = tier.pool_base + (sequence * tiers.shape.kv_heads + head) * tiers.blocks
        tiers.pool[first : first + len(rows)].copy_(rows, non_blocking=True)
