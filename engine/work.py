"""The least work of every kind of operation: flops, HBM bytes and link bytes from the shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from sparda.engine.config import Config, Workload
from sparda.engine.plan import Work
from sparda.engine.shapes import ModelShape, SparseSpec


@dataclass(frozen=True, slots=True)
class Sizes:
    """Work of each kind for one (model, geometry, workload, configuration)."""

    shape: ModelShape
    spec: SparseSpec
    workload: Workload
    config: Config

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

    def linear(self, out_features: int, in_features: int) -> Work:
        b = self.batch
        moved = out_features * in_features + b * (in_features + out_features)
        return Work(flops=2 * b * out_features * in_features, hbm_bytes=moved * self.value)

    def embed(self) -> Work:
        return Work(hbm_bytes=2 * self.batch * self.shape.d_model * self.value)

    def norm(self) -> Work:
        return Work(hbm_bytes=4 * self.batch * self.shape.d_model * self.value)

    def gated(self, out_features: int, in_features: int) -> Work:
        """Two linears of ``out_features`` and their gated product, written once."""
        b = self.batch
        moved = 2 * out_features * in_features + b * (in_features + out_features)
        return Work(flops=4 * b * out_features * in_features, hbm_bytes=moved * self.value)

    def append(self, width: int) -> Work:
        return Work(hbm_bytes=2 * self.batch * width * self.value)

    def score(self) -> Work:
        keys = self.heads * self.spec.compressed(self.workload.context_tokens)
        return Work(
            flops=2 * keys * self.shape.head_dim,
            hbm_bytes=keys * self.shape.head_dim * self.value + 4 * self.heads * self.blocks,
        )

    def headscore(self) -> Work:
        keys = self.heads * self.spec.compressed(self.workload.context_tokens)
        return Work(
            flops=4 * keys * self.shape.group * self.shape.head_dim,
            hbm_bytes=2 * keys * self.shape.head_dim * self.value + 4 * self.heads * self.blocks,
        )

    def select(self) -> Work:
        return Work(hbm_bytes=self.heads * (8 * self.blocks + 12 * self.config.slots + 8 * self.chosen))

    def prefetch(self) -> Work:
        moved = self.misses * self.shape.block_bytes(self.spec)
        return Work(hbm_bytes=moved, h2d_bytes=moved, ctas=self.config.prefetch_ctas)

    def attention(self) -> Work:
        return self._attention(self.chosen)

    def dense_attention(self) -> Work:
        return self._attention(self.blocks)

    def _attention(self, blocks: int) -> Work:
        tokens = self.heads * blocks * self.spec.block
        kv = self.heads * blocks * self.shape.block_bytes(self.spec)
        return Work(
            flops=4 * tokens * self.shape.group * self.shape.head_dim,
            hbm_bytes=kv + 2 * self.batch * self.shape.q_width * self.value,
        )

    def partial_query(self) -> Work:
        s, dims = self.shape, self.shape.partial_dims
        moved = self.heads * (s.head_dim + dims) * self.value + s.kv_width * dims * 4
        return Work(flops=2 * self.heads * s.head_dim * dims, hbm_bytes=moved)

    def partial_score(self) -> Work:
        values = self.heads * self.workload.context_tokens * self.shape.partial_dims
        return Work(flops=2 * values, hbm_bytes=values * self.value + 4 * self.heads * self.blocks)

    def partial_keys(self, layers: int) -> Work:
        one = self.partial_query()
        return Work(flops=layers * one.flops, hbm_bytes=layers * one.hbm_bytes)

    def report(self) -> Work:
        moved = 4 * (self.heads * (self.config.slots + 1) + 1)
        return Work(hbm_bytes=moved, d2h_bytes=moved)

    def gather(self) -> Work:
        return Work(host_bytes=2 * self.misses * self.shape.block_bytes(self.spec))

    def upload(self) -> Work:
        moved = self.misses * self.shape.block_bytes(self.spec)
        return Work(hbm_bytes=moved, h2d_bytes=moved)

    def scatter(self) -> Work:
        return Work(hbm_bytes=2 * self.misses * self.shape.block_bytes(self.spec))

    def sample(self) -> Work:
        return Work(hbm_bytes=self.batch * self.shape.vocab * self.value)

    def writeback(self, layers: int) -> Work:
        moved = layers * self.heads * 2 * self.shape.head_dim * self.value
        return Work(hbm_bytes=moved, d2h_bytes=moved)
