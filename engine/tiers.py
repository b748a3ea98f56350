"""The two tiers of the KV cache: every block in pinned host memory, some blocks in slots on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparda.engine import admission
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.partial import PartialKeys, random_basis
from sparda.engine.policies import resident_layers, side_data
from sparda.engine.prefill import Prefilled
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.weights import DTYPES
from sparda.kernels.eviction import bias_reference
from sparda.kernels.prefetch import prefetch

SEED_CTAS = 16
"""Prefetch CTAs that fill the slots at the start: nothing runs beside them."""


@dataclass(frozen=True, slots=True)
class LayerTier:
    """One layer's slots and maps. S slots, M blocks at the most, B sequences, H KV heads.

    ``cache`` bf16 [B, H, S, 2, block, head_dim] (K, then V); ``block_of_slot``, ``stamp`` int32 [B, H, S];
    ``slot_of_block`` int32 [B, H, M]; ``keys`` bf16 [B, H, C, head_dim] compressed keys; ``pool_base`` the row of
    the host pool where this layer's blocks begin, -1 for a layer that is wholly on the GPU.
    """

    cache: Tensor
    block_of_slot: Tensor
    stamp: Tensor
    slot_of_block: Tensor
    victims: Tensor
    keys: Tensor
    pool_base: int

    @property
    def slots(self) -> int:
        return int(self.cache.shape[2])

    @property
    def rows(self) -> Tensor:
        """The cache as [B * H * S, values of one block]: what the miss list's destinations index."""
        return self.cache.view(-1, self.cache[0, 0, 0].numel())


class Tiers:
    """KV cache, maps and counters of a batch. ``capacity`` tokens per sequence are preallocated.

    ``bias`` fp32 [L, B, H, tokens] and its compressed ``bias_keys`` [L, B, H, C]; without layers where the policy keeps
    no biases.

    ``pool_rows`` below the exact number makes sequences alias the same pinned blocks: right for a benchmark, where
    the contents mean nothing, and said in its result; ``aliased`` tells. ``partial`` is there for policies that ask.
    """

    def __init__(
        self,
        shape: ModelShape,
        spec: SparseSpec,
        workload: Workload,
        config: Config,
        device: torch.device | str,
        *,
        capacity: int,
        pool: Tensor | None = None,
    ) -> None:
        if shape.cached_bytes != shape.value_bytes:
            raise SpardaError(
                f"{shape.name}: kv_bytes is {shape.kv_bytes}; the engine keeps keys and values as it keeps weights, in "
                f"{shape.value_bytes} bytes: give 0 to run it. Other sizes can be planned and simulated."
            )
        self.shape, self.spec, self.workload = shape, spec, workload
        self.device = torch.device(device)
        self.whole = resident_layers(config, shape.layers)
        self.blocks = spec.blocks(capacity) + 1
        self.slots = min(config.slots + 1, self.blocks)
        batch, kv, layers = workload.batch, shape.kv_heads, shape.layers
        self.heads = batch * kv
        self.offloaded = layers - self.whole
        self.values = 2 * spec.block * shape.head_dim
        self.dtype = DTYPES[shape.value_bytes]
        exact = self.offloaded * self.heads * self.blocks
        self.pool = new_pool(max(1, exact), self.values, self.device, self.dtype) if pool is None else pool
        self.aliased = self.pool.shape[0] < exact

        def ints(*size: int, fill: int = 0) -> Tensor:
            return torch.full(size, fill, dtype=torch.int32, device=self.device)

        def kv_slots(count: int, slots: int) -> Tensor:
            size = (count, batch, kv, slots, 2, spec.block, shape.head_dim)
            return torch.zeros(size, dtype=self.dtype, device=self.device)

        self.whole_cache = kv_slots(self.whole, self.blocks)
        self.slot_cache = kv_slots(self.offloaded, self.slots)
        self.slot_of_block = ints(layers, batch, kv, self.blocks, fill=-1)
        keys = spec.compressed(self.blocks * spec.block)
        self.keys = torch.zeros(layers, batch, kv, keys, shape.head_dim, dtype=self.dtype, device=self.device)
        self.partial = self._partial_keys() if "partial" in side_data(config) else None
        biased = layers if "bias" in side_data(config) else 0
        self.bias = torch.zeros(biased, batch, kv, self.blocks * spec.block, device=self.device)
        self.bias_keys = torch.zeros(biased, batch, kv, keys, device=self.device)
        self.layers = tuple(self._layer(layer) for layer in range(layers))
        self.positions = ints(batch, fill=workload.context_tokens)
        self.step = ints(1)
        self.miss_count = ints(layers)
        self.miss_total = torch.zeros(layers, dtype=torch.int64, device=self.device)
        self.counted_from = 0
        self.side: list[Callable[[int, Prefilled], None]] = []
        """Called with a row and its prompt by ``admit``: fills what a policy keeps of tokens besides K and V."""
        if self.partial is not None:
            self.side.append(self._admit_partial)

    @property
    def sample(self) -> int:
        """The tokens whose queries are wanted with the next prompt: ``prefill`` is to be asked for them."""
        return self.partial.sample if self.partial is not None else 0

    def _layer(self, layer: int) -> LayerTier:
        whole = layer < self.whole
        cache = self.whole_cache[layer] if whole else self.slot_cache[layer - self.whole]
        size = cache.shape[:3]

        def make() -> Tensor:
            return torch.full(size, -1, dtype=torch.int32, device=self.device)

        return LayerTier(
            cache=cache,
            block_of_slot=make(),
            stamp=make(),
            slot_of_block=self.slot_of_block[layer],
            victims=make(),
            keys=self.keys[layer],
            pool_base=-1 if whole else (layer - self.whole) * self.heads * self.blocks,
        )

    def _partial_keys(self) -> PartialKeys:
        s, room = self.shape, self.blocks * self.spec.block
        size = (self.offloaded, self.workload.batch, s.kv_heads, room, s.partial_dims)
        rows = torch.zeros(size, dtype=self.dtype, device=self.device)
        return PartialKeys(random_basis(s, self.offloaded, self.device), rows)

    def seed(self, seed: int = 0, eviction: Sequence[tuple[Tensor, Tensor] | None] = ()) -> None:
        """Random KV for the whole context, compressed keys to match, and the blocks a prefill would leave resident.

        With an exact pool the contents depend on (seed, layer) alone, so every policy decodes the same history.
        ``eviction``: each layer's weights (``LayerWeights.eviction``). Biases follow from them and the values; without
        them, or with an aliased pool, they are random.
        """
        if self.aliased:
            self._seed_aliased(seed)
        else:
            for layer in range(self.shape.layers):
                self._seed_layer(layer, seed, eviction[layer] if eviction else None)
        self.reset_residents()

    def _seed_aliased(self, seed: int) -> None:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        rows = max(1, (1 << 28) // self.values)
        for start in range(0, self.pool.shape[0], rows):
            part = self.pool[start : start + rows]
            part.copy_(torch.randn(part.shape, dtype=self.dtype, device=self.device, generator=generator))
        # Means of 32 keys: a thirty-second of the variance.
        for keys in (*self.keys, *self.whole_cache.flatten(0, 1)):
            keys.normal_(0.0, 32**-0.5, generator=generator)
        if self.partial is not None:
            self.partial.rows.normal_(generator=generator)
        for layer in range(len(self.bias)):
            self._keep_bias(layer, self.bias[layer].uniform_(generator=generator))

    def _seed_layer(self, layer: int, seed: int, eviction: tuple[Tensor, Tensor] | None) -> None:
        generator = torch.Generator(device=self.device).manual_seed(seed * 1009 + layer)
        tier, spec = self.layers[layer], self.spec
        size = (self.workload.batch, self.shape.kv_heads, self.blocks, 2, spec.block, self.shape.head_dim)
        history = torch.randn(size, dtype=self.dtype, device=self.device, generator=generator)
        if tier.pool_base < 0:
            tier.cache.copy_(history)
        else:
            self.pool[tier.pool_base : tier.pool_base + self.heads * self.blocks].copy_(history.view(-1, self.values))
        flat = history[:, :, :, 0].flatten(2, 3).float()
        windows = flat.unfold(2, spec.kernel, spec.stride)
        tier.keys.copy_(windows.mean(-1)[:, :, : tier.keys.shape[2]].to(self.dtype))
        if self.partial is not None and layer >= self.whole:
            self.partial.fill(layer - self.whole, flat)
        if len(self.bias):
            random = torch.rand(self.bias[layer].shape, device=self.device, generator=generator)
            known = bias_reference(history[:, :, :, 1].flatten(2, 3), *eviction) if eviction else random
            self._keep_bias(layer, known)

    def _keep_bias(self, layer: int, bias: Tensor) -> None:
        self.bias[layer].copy_(bias)
        windows = bias.unfold(2, self.spec.kernel, self.spec.stride)
        self.bias_keys[layer].copy_(windows.mean(-1)[:, :, : self.bias_keys.shape[3]])

    def reset_residents(self) -> None:
        """Put each sequence back at its context length with forced blocks, then the oldest, in the slots."""
        context = self.workload.context_tokens
        self.positions.fill_(context)
        self.step.zero_()
        self.miss_count.zero_()
        self.count_misses()
        count = self.spec.blocks(context + 1)
        local = range(max(0, count - 1 - self.spec.local_blocks), count)
        kept = list(local) + [m for m in range(count) if m not in local]
        for tier in self.layers:
            if tier.pool_base < 0:
                self.place(tier, self.all_blocks())
            else:
                # The last slot stays empty: the next block is born there.
                chosen = torch.tensor(sorted(kept[: tier.slots - 1]), dtype=torch.int32, device=self.device)
                self.place(tier, chosen)
                self._fill(tier, chosen)

    def admit(self, sequence: int, prefilled: Prefilled) -> None:
        """Let row ``sequence`` go on after a prompt: see ``admission.admit``."""
        admission.admit(self, sequence, prefilled)
        for fill in self.side:
            fill(sequence, prefilled)

    def _admit_partial(self, sequence: int, prefilled: Prefilled) -> None:
        assert self.partial is not None
        queries = None if prefilled.queries is None else prefilled.queries[self.whole :]
        self.partial.admit(sequence, prefilled.keys[self.whole :], queries)

    def park(self, sequence: int) -> None:
        """Leave row ``sequence`` unused: see ``admission.park``."""
        admission.park(self, sequence)

    def count_misses(self) -> None:
        """Count fetched blocks from here on. The first steps after a start fetch what any later step already has."""
        self.miss_total.zero_()
        self.counted_from = int(self.step)

    def misses_per_layer(self) -> float:
        """Mean blocks fetched per offloaded layer and step since counting began. Synchronises."""
        steps = int(self.step) - self.counted_from
        fetched = int(self.miss_total[self.whole :].sum())
        return fetched / max(1, self.offloaded) / steps if steps else 0.0

    def all_blocks(self) -> Tensor:
        return torch.arange(self.blocks, dtype=torch.int32, device=self.device)

    def place(self, tier: LayerTier, blocks: Tensor, sequence: int | None = None) -> None:
        """Let slot i hold ``blocks[i]``, as of this step, and the others nothing; in one row or in all."""
        n, at = blocks.numel(), slice(None) if sequence is None else slice(sequence, sequence + 1)
        tier.slot_of_block[at] = -1
        tier.block_of_slot[at] = -1
        tier.stamp[at] = -1
        tier.block_of_slot[at, :, :n] = blocks
        tier.stamp[at, :, :n] = self.step
        tier.slot_of_block[at, :, blocks.long()] = torch.arange(n, dtype=torch.int32, device=self.device)

    def _fill(self, tier: LayerTier, blocks: Tensor) -> None:
        pairs = torch.arange(self.heads, device=self.device)[:, None]
        source = (tier.pool_base + pairs * self.blocks + blocks.long()) % self.pool.shape[0]
        target = pairs * tier.slots + torch.arange(blocks.numel(), device=self.device)
        src, dst = source.flatten().int(), target.flatten().int()
        count = torch.tensor([src.numel()], dtype=torch.int32, device=self.device)
        prefetch(self.pool, tier.rows, src, dst, count, ctas=SEED_CTAS, warps=4, stages=4)


def new_pool(rows: int, values: int, device: torch.device, dtype: torch.dtype = DTYPES[2]) -> Tensor:
    """A host pool of ``rows`` blocks, pinned where there is a GPU to read it. Pinning takes most of a second per GiB.

    Raises SpardaError when the memory cannot be locked.
    """
    try:
        return torch.empty(rows, values, dtype=dtype, pin_memory=device.type == "cuda")
    except RuntimeError as e:
        gib = rows * values * dtype.itemsize / 2**30
        raise SpardaError(
            f"cannot lock {gib:.1f} GiB of host memory for the KV pool ({str(e).splitlines()[0]}); "
            "lower the batch or the context, or give a smaller pool that sequences share."
        ) from None
