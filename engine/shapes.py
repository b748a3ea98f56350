"""What is decoded: the shape of a model and the geometry of its block-sparse attention. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from sparda.engine.errors import SpardaError

SCORER_WIDTH = 256
"""Hidden units of the block scorer of the policy ``shallow``."""

VALUE_BYTES = (2, 4)
"""Bytes of a weight, an activation or a cached value: bf16, or fp32 where tokens must equal another fp32 program's."""


PARTIAL_DIMS = 32
"""Directions of a key that InfiniGen keeps on the GPU for every token (arXiv 2406.19707)."""


@dataclass(frozen=True, slots=True)
class SparseSpec:
    """Geometry of InfLLM-V2 block selection (arXiv 2606.04511, section 3), in tokens and blocks.

    A compressed key is the mean of ``kernel`` consecutive post-rope keys, one every ``stride`` tokens.
    ``init_blocks`` at the start of the context and the last ``local_blocks`` + 1 blocks (the one being
    written included) are always chosen; they count towards top-k.
    """

    block: int = 64
    kernel: int = 32
    stride: int = 16
    init_blocks: int = 1
    local_blocks: int = 32

    def __post_init__(self) -> None:
        if self.kernel != 2 * self.stride or self.block % self.stride:
            raise SpardaError(
                f"SparseSpec: kernel {self.kernel}, stride {self.stride}, block {self.block}; the kernel must be "
                "twice the stride and the block a multiple of the stride."
            )

    @property
    def keys_per_block(self) -> int:
        """Compressed keys that begin inside one block (4 for 64/16)."""
        return self.block // self.stride

    def blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens, the last one possibly part-filled."""
        return -(-tokens // self.block)

    def compressed(self, tokens: int) -> int:
        """Compressed keys whose window lies wholly inside the first ``tokens`` tokens."""
        return max(0, (tokens - self.kernel) // self.stride + 1)

    @property
    def forced(self) -> int:
        """Blocks chosen whatever their score, once the context is long enough (34 for MiniCPM4.1)."""
        return self.init_blocks + self.local_blocks + 1


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer with grouped-query attention; every linear is bias-free."""

    name: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float = 10000.0
    rope_factors: tuple[float, ...] = ()
    """Divisors of the head_dim / 2 rotary frequencies, as in LongRoPE; none leaves them alone."""
    rope_amplitude: float = 1.0
    """Multiplies cosine and sine, as in LongRoPE and YaRN."""
    norm_eps: float = 1e-6
    max_context: int = 131072
    scale_emb: float = 1.0
    scale_depth: float = 0.0
    """muP: each residual branch is multiplied by scale_depth / sqrt(layers); 0 means no scaling."""
    dim_model_base: int = 0
    """muP: the last hidden state is divided by d_model / dim_model_base; 0 means no scaling."""
    value_bytes: int = 2
    kv_bytes: int = 0
    """Bytes of a cached key's or value's element; 0: as of a weight. 1 is FP8, which can be planned but not run."""

    def __post_init__(self) -> None:
        if self.value_bytes not in VALUE_BYTES:
            raise SpardaError(f"{self.name}: value_bytes is {self.value_bytes}; allowed are 2 (bf16) and 4 (fp32).")
        if self.kv_bytes not in (0, 1, *VALUE_BYTES):
            raise SpardaError(f"{self.name}: kv_bytes is {self.kv_bytes}; allowed are 0 (as the weights), 1, 2 and 4.")
        if self.rope_factors and len(self.rope_factors) != self.head_dim // 2:
            raise SpardaError(
                f"{self.name}: {len(self.rope_factors)} rope_factors for a head_dim of {self.head_dim}; "
                f"give {self.head_dim // 2}, or none."
            )
        if self.heads % self.kv_heads:
            raise SpardaError(
                f"{self.name}: {self.heads} query heads over {self.kv_heads} KV heads; "
                "the first must be a multiple of the second."
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkvf_width(self) -> int:
        """Rows of the fused projection: Q, K, V and the Forecast (one head per KV head)."""
        return self.q_width + 3 * self.kv_width

    @property
    def partial_dims(self) -> int:
        """Values of a partial key: a short head is kept whole."""
        return min(PARTIAL_DIMS, self.head_dim)

    @property
    def residual_scale(self) -> float:
        return self.scale_depth / self.layers**0.5 if self.scale_depth else 1.0

    @property
    def logit_scale(self) -> float:
        return self.dim_model_base / self.d_model if self.dim_model_base else 1.0

    def block_bytes(self, spec: SparseSpec) -> int:
        """Bytes of one block of one KV head, K and V: the unit that a miss moves (32 KiB for 64 x 128)."""
        return 2 * spec.block * self.head_dim * self.cached_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of one element of a cached key or value."""
        return self.kv_bytes or self.value_bytes

    @property
    def layer_weight_bytes(self) -> int:
        linear = self.qkvf_width * self.d_model + self.d_model * self.q_width + 3 * self.ffn * self.d_model
        return linear * self.value_bytes

    @property
    def weight_bytes(self) -> int:
        """All weights, embedding and untied head included."""
        return self.layers * self.layer_weight_bytes + 2 * self.vocab * self.d_model * self.value_bytes


MODELS: dict[str, ModelShape] = {
    m.name: m
    for m in (
        ModelShape(
            name="minicpm4.1-8b",
            layers=32,
            d_model=4096,
            heads=32,
            kv_heads=2,
            head_dim=128,
            ffn=16384,
            vocab=73448,
            scale_emb=12.0,
            scale_depth=1.4,
            dim_model_base=256,
        ),
    )
}
"""Models by name. Sizes of MiniCPM4.1-8B: its public configuration."""


def model_named(name: str) -> ModelShape:
    """The model of that name.

    Raises SpardaError with the known names where there is none.
    """
    try:
        return MODELS[name]
    except KeyError:
        known = ", ".join(sorted(MODELS))
        raise SpardaError(f"unknown model {name!r}; known models: {known}.") from None
