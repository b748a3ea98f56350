"""The least work of every kind of operation: flops, HBM bytes and link bytes from the shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, cast

from sparda.engine.config import Config, Workload
from sparda.engine.plan import Work
from sparda.engine.shapes import SCORER_WIDTH, ModelShape, SparseSpec

P = ParamSpec("P")


def once(size: Callable[Concatenate[Sizes, P], Work]) -> Callable[Concatenate[Sizes, P], Work]:
    """A size that is worked out once for all layers that ask for it."""

    @wraps(size)
    def looked_up(self: Sizes, *args: P.args, **kwargs: P.kwargs) -> Work:
        key = (size.__name__, args, *kwargs.items())
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = size(self, *args, **kwargs)
        return found

    # mypy takes what ``wraps`` returns for a function whose first argument has a name of its own.
    return cast("Callable[Concatenate[Sizes, P], Work]", looked_up)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Work of each kind for one (model, geometry, workload, configuration)."""

    shape: ModelShape
    spec: SparseSpec
    workload: Workload
    config: Config
    known: dict[tuple[object, ...], Work] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def value(self) -> int:
        return self.shape.value_bytes

    @property
    def batch(self) -> int:
        return self.workload.batch

    @property
    def heads(self) -> int:
        """(sequence, KV head) pairs: what selection, misses and attention are counted in."""
        return self.workload.batch * self.shape.kv_heads

    @property
    def blocks(self) -> int:
        return self.spec.blocks(self.workload.context_tokens)

    @property
    def chosen(self) -> int:
        return min(self.config.top_k, self.blocks)

    @property
    def misses(self) -> int:
        """Blocks that one layer fetches in one step, over all sequences and KV heads."""
        return round(self.workload.miss_rate * self.config.top_k * self.heads)

    @once
    def linear(self, out_features: int, in_features: int) -> Work:
        b = self.batch
        moved = out_features * in_features + b * (in_features + out_features)
        return Work(flops=2 * b * out_features * in_features, hbm_bytes=moved * self.value)

    @once
    def embed(self) -> Work:
        return Work(hbm_bytes=2 * self.batch * self.shape.d_model * self.value)

    @once
    def norm(self) -> Work:
        return Work(hbm_bytes=4 * self.batch * self.shape.d_model * self.value)

    @once
    def gated(self, out_features: int, in_features: int) -> Work:
        """Two linears of ``out_features`` and their gated product, written once."""
        b = self.batch
        moved = 2 * out_features * in_features + b * (in_features + out_features)
        return Work(flops=4 * b * out_features * in_features, hbm_bytes=moved * self.value)

    @once
    def append(self, width: int) -> Work:
        return Work(hbm_bytes=2 * self.batch * width * self.value)

    @once
    def score(self) -> Work:
        keys = self.heads * self.spec.compressed(self.workload.context_tokens)
        return Work(
            flops=2 * keys * self.shape.head_dim,
            hbm_bytes=keys * self.shape.head_dim * self.value + 4 * self.heads * self.blocks,
        )

    @once
    def headscore(self) -> Work:
        keys = self.heads * self.spec.compressed(self.workload.context_tokens)
        return Work(
            flops=4 * keys * self.shape.group * self.shape.head_dim,
            hbm_bytes=2 * keys * self.shape.head_dim * self.value + 4 * self.heads * self.blocks,
        )

    @once
    def bias(self) -> Work:
        """The newest token's bias, and the mean that every ``stride``-th token completes."""
        head = self.shape.kv_heads * self.shape.kv_width
        means = self.heads * (self.spec.kernel + 1) // self.spec.stride
        return Work(
            flops=2 * self.batch * head,
            hbm_bytes=self.batch * self.shape.kv_width * self.value + 4 * (head + self.heads + means),
        )

    @once
    def shortlist(self) -> Work:
        keys = self.heads * self.spec.compressed(self.workload.context_tokens)
        return Work(hbm_bytes=8 * self.heads * self.blocks + 4 * keys)

    @once
    def shallow_score(self) -> Work:
        """The mean over the steps between two choices: in most of them the kernels look at the step and return."""
        every = self.config.refresh_steps
        if not every:
            return Work(hbm_bytes=4)
        s, b, width = self.shape, self.batch, SCORER_WIDTH
        keys = self.heads * self.spec.compressed(self.workload.context_tokens) * s.head_dim
        weights = width * (s.d_model + s.kv_width)
        inputs = b * (s.d_model + s.q_width)
        moved = (keys + weights + inputs) * self.value + 4 * self.heads * self.blocks
        flops = 2 * b * width * (s.d_model + self.blocks * (s.kv_width + 1)) + keys
        return Work(flops=flops // every, hbm_bytes=moved // every + 4)

    @once
    def select(self) -> Work:
        return Work(hbm_bytes=self.heads * (8 * self.blocks + 12 * self.config.slots + 8 * self.chosen))

    @once
    def prefetch(self) -> Work:
        moved = self.misses * self.shape.block_bytes(self.spec)
        return Work(hbm_bytes=moved, h2d_bytes=moved, ctas=self.config.prefetch_ctas)

    @once
    def attention(self) -> Work:
        return self._attention(self.chosen)

    @once
    def biased_attention(self) -> Work:
        """Attention and one fp32 bias a token."""
        plain = self.attention()
        biases = self.heads * self.chosen * self.spec.block
        return Work(flops=plain.flops + biases * self.shape.group, hbm_bytes=plain.hbm_bytes + 4 * biases)

    @once
    def dense_attention(self) -> Work:
        return self._attention(self.blocks)

    def _attention(self, blocks: int) -> Work:
        tokens = self.heads * blocks * self.spec.block
        kv = self.heads * blocks * self.shape.block_bytes(self.spec)
        return Work(
            flops=4 * tokens * self.shape.group * self.shape.head_dim,
            hbm_bytes=kv + 2 * self.batch * self.shape.q_width * self.value,
        )

    @once
    def partial_query(self) -> Work:
        s, dims = self.shape, self.shape.partial_dims
        moved = self.heads * (s.head_dim + dims) * self.value + s.kv_width * dims * 4
        return Work(flops=2 * self.heads * s.head_dim * dims, hbm_bytes=moved)

    @once
    def partial_score(self) -> Work:
        values = self.heads * self.workload.context_tokens * self.shape.partial_dims
        return Work(flops=2 * values, hbm_bytes=values * self.value + 4 * self.heads * self.blocks)

    @once
    def partial_keys(self, layers: int) -> Work:
        one = self.partial_query()
        return Work(flops=layers * one.flops, hbm_bytes=layers * one.hbm_bytes)

    @once
    def report(self) -> Work:
        """The miss list and its length; where the host copies into slots by itself, the list of these slots too."""
        lists = 1 if self.config.path == "gather" else 2
        moved = 4 * (lists * self.heads * (self.config.slots + 1) + 1)
        return Work(hbm_bytes=moved, d2h_bytes=moved)

    @once
    def enlist(self) -> Work:
        """From a report to copies under way: the host reads the lists and starts every copy."""
        return Work(copies=self.misses)

    @once
    def copy_blocks(self) -> Work:
        moved = self.misses * self.shape.block_bytes(self.spec)
        return Work(hbm_bytes=moved, h2d_bytes=moved, copies=self.misses)

    @once
    def gather(self) -> Work:
        return Work(host_bytes=2 * self.misses * self.shape.block_bytes(self.spec))

    @once
    def upload(self) -> Work:
        moved = self.misses * self.shape.block_bytes(self.spec)
        return Work(hbm_bytes=moved, h2d_bytes=moved)

    @once
    def scatter(self) -> Work:
        return Work(hbm_bytes=2 * self.misses * self.shape.block_bytes(self.spec))

    @once
    def sample(self) -> Work:
        return Work(hbm_bytes=self.batch * self.shape.vocab * self.value)

    @once
    def writeback(self, layers: int) -> Work:
        moved = layers * self.heads * 2 * self.shape.head_dim * self.shape.cached_bytes
        return Work(hbm_bytes=moved, d2h_bytes=moved)
