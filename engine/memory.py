"""How many bytes a configuration takes on the GPU and in pinned host memory."""

from __future__ import annotations

from dataclasses import dataclass

from sparda.engine.config import Config, Workload
from sparda.engine.policies import resident_layers, side_data
from sparda.engine.shapes import SCORER_WIDTH, ModelShape, SparseSpec


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by use; ``gpu_bytes`` and ``pinned_bytes`` are what the two limits apply to."""

    weights_bytes: int
    resident_bytes: int
    compressed_bytes: int
    workspace_bytes: int
    pinned_bytes: int
    side_bytes: int = 0
    """What a policy keeps on the GPU of every token besides its key and value."""

    @property
    def gpu_bytes(self) -> int:
        kept = self.resident_bytes + self.compressed_bytes + self.side_bytes
        return self.weights_bytes + kept + self.workspace_bytes


def memory_of(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config) -> Memory:
    """Bytes of weights, block slots, compressed keys, activations, the pinned pool and what a policy keeps besides.

    One slot more than ``config.slots`` per (layer, sequence, KV head): the room where the next block is born.
    Where the host gathers what is missing, two staging buffers on either side hold all that a layer can choose.
    """
    whole = resident_layers(config, shape.layers)
    blocks = spec.blocks(workload.context_tokens) + 1
    heads = workload.batch * shape.kv_heads
    slots = whole * blocks + (shape.layers - whole) * min(config.slots + 1, blocks)
    keys = spec.compressed(blocks * spec.block)
    compressed = shape.layers * heads * keys * shape.head_dim * shape.value_bytes
    staging = (config.path == "gather") * 2 * heads * config.top_k * shape.block_bytes(spec)
    rows = ("partial" in side_data(config)) * (shape.layers - whole) * heads * blocks * spec.block
    partial = rows * shape.partial_dims * shape.value_bytes
    biases = ("bias" in side_data(config)) * shape.layers * heads * (blocks * spec.block + keys) * 4
    activations = workload.batch * (6 * shape.d_model + shape.qkvf_width + 3 * shape.ffn + 3 * shape.vocab)
    return Memory(
        weights_bytes=shape.weight_bytes + _selection_weight_bytes(shape, config),
        resident_bytes=heads * slots * shape.block_bytes(spec),
        compressed_bytes=compressed,
        workspace_bytes=activations * shape.value_bytes + staging + (1 << 30),
        pinned_bytes=(shape.layers - whole) * heads * blocks * shape.block_bytes(spec) + staging,
        side_bytes=partial + biases,
    )


def _selection_weight_bytes(shape: ModelShape, config: Config) -> int:
    """Weights that only one policy reads: the eviction heads (fp32), the scorer (its vectors fp32)."""
    if "bias" in side_data(config):
        return 4 * shape.layers * shape.kv_heads * (1 + shape.kv_width)
    if config.policy == "shallow":
        return SCORER_WIDTH * ((shape.d_model + shape.kv_width) * shape.value_bytes + 3 * 4)
    return 0
