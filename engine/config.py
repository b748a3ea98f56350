"""What a user states (Workload) and what a user may turn (Config), each checked where it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sparda.engine.errors import SpardaError
from sparda.engine.shapes import ModelShape, SparseSpec


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise SpardaError(message)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be decoded.

    ``miss_rate`` is the share of each KV head's ``top_k`` blocks that is not resident when it is chosen,
    averaged over steps: the selection dynamics, seen through ``resident_blocks`` slots.
    """

    batch: int = 16
    context_tokens: int = 131072
    miss_rate: float = 0.06

    def __post_init__(self) -> None:
        _require(1 <= self.batch <= 1024, f"workload.batch is {self.batch}; allowed are 1 to 1024.")
        _require(
            1 <= self.context_tokens <= 1 << 22,
            f"workload.context_tokens is {self.context_tokens}; allowed are 1 to {1 << 22}.",
        )
        _require(
            0.0 <= self.miss_rate <= 1.0,
            f"workload.miss_rate is {self.miss_rate}; it is a share of top_k, allowed are 0 to 1.",
        )


POLICIES = (
    "dense",
    "sparse",
    "sparse-resident",
    "sparda",
    "sparda-on-demand",
    "sparda-resident",
    "infinigen",
    "nosa",
    "shallow",
)
"""What ``engine.policies`` has a module for; each says there what it is."""

TRANSFERS = ("uva", "gather", "blocks", "batch")
"""How missing blocks come from host memory. ``uva``: a kernel reads them in place. The others go by way of the host,
which is told what is missing. ``gather``: it gathers the blocks in staging memory, one copy takes them over, a kernel
spreads them. ``blocks``: it starts one copy a block on the GPU's copy engines. ``batch``: the same copies in one call.
"""

FETCHING = ("sparse", "sparda", "sparda-on-demand", "nosa", "shallow")
"""Policies that fetch blocks by whatever path they are told to."""

OF_SHALLOW = ("score_layer", "refresh_steps", "reserve")
"""Values that the policy ``shallow`` alone reads."""


@dataclass(frozen=True, slots=True)
class Config:
    """What a user may turn. ``resident_blocks`` 0 means "as many as top_k".

    Of ``shallow``: layer ``score_layer`` chooses for all later ones, again every ``refresh_steps`` steps, and keeps a
    random ``reserve`` of the context's blocks. 0 steps: only once, as the method was described; the default of 16 lets
    the choice follow the text at a sixteenth of the cost.

    ``transfer``: see TRANSFERS. Policies without a fetch have no use for it; ``infinigen`` gathers and may say so.
    """

    policy: str = "sparda"
    top_k: int = 96
    lookahead: int = 1
    prefetch_ctas: int = 2
    prefetch_warps: int = 1
    prefetch_stages: int = 8
    resident_blocks: int = 0
    score_layer: int = 6
    refresh_steps: int = 16
    reserve: float = 0.01
    transfer: str = "uva"

    def __post_init__(self) -> None:
        _require(
            self.policy in POLICIES,
            f"config.policy is {self.policy!r}; allowed are {', '.join(POLICIES)}.",
        )
        _require(1 <= self.top_k <= 4096, f"config.top_k is {self.top_k}; allowed are 1 to 4096 blocks.")
        _require(0 <= self.lookahead <= 4, f"config.lookahead is {self.lookahead}; allowed are 0 to 4 layers.")
        _require(
            1 <= self.prefetch_ctas <= 1024,
            f"config.prefetch_ctas is {self.prefetch_ctas}; allowed are 1 to 1024.",
        )
        _require(
            self.prefetch_warps in (1, 2, 4, 8),
            f"config.prefetch_warps is {self.prefetch_warps}; allowed are 1, 2, 4, 8.",
        )
        _require(
            1 <= self.prefetch_stages <= 12,
            f"config.prefetch_stages is {self.prefetch_stages}; allowed are 1 to 12.",
        )
        _require(
            self.resident_blocks == 0 or self.resident_blocks >= self.top_k,
            f"config.resident_blocks is {self.resident_blocks} with top_k {self.top_k}; every chosen block needs a "
            "slot: give at least top_k, or 0 for exactly top_k.",
        )
        _require(0 <= self.score_layer < 1024, f"config.score_layer is {self.score_layer}; allowed are 0 to 1023.")
        _require(
            0 <= self.refresh_steps <= 1 << 20,
            f"config.refresh_steps is {self.refresh_steps}; allowed are 0 (never again) to {1 << 20}.",
        )
        _require(
            0.0 <= self.reserve <= 1.0,
            f"config.reserve is {self.reserve}; it is a share of the context's blocks, allowed are 0 to 1.",
        )
        _require(
            self.transfer in TRANSFERS,
            f"config.transfer is {self.transfer!r}; allowed are {', '.join(TRANSFERS)}.",
        )

    @property
    def settings(self) -> dict[str, str | int | float]:
        """Every value that the policy reads, by name: what tells two configurations apart.

        ``transfer`` is among them only where it is not ``uva``: cases written before there was a choice mean that.
        """
        unread = set(() if self.policy == "shallow" else OF_SHALLOW)
        if self.transfer == "uva" or self.policy not in FETCHING:
            unread.add("transfer")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in unread}

    @property
    def path(self) -> str:
        """The transfer path that the policy's plan takes: one of TRANSFERS, or empty where nothing is fetched."""
        if self.policy == "infinigen":
            return "gather"
        return self.transfer if self.policy in FETCHING else ""

    @property
    def slots(self) -> int:
        """Resident slots per (layer, sequence, KV head) that selection may fill."""
        return self.resident_blocks or self.top_k


def check_fits(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config) -> None:
    """Refuse a combination that cannot be: top-k above the block count or below the blocks that are always chosen.

    Raises SpardaError naming both values.
    """
    blocks = spec.blocks(workload.context_tokens)
    # A context shorter than init and local blocks together has no others: all its blocks are chosen.
    always = min(spec.forced, blocks)
    _require(
        workload.context_tokens <= shape.max_context,
        f"workload.context_tokens is {workload.context_tokens}; {shape.name} reaches {shape.max_context}.",
    )
    _require(
        config.top_k <= blocks,
        f"config.top_k is {config.top_k} but a context of {workload.context_tokens} tokens has {blocks} blocks of "
        f"{spec.block}; give a top_k of at most {blocks}.",
    )
    _require(
        config.top_k >= always,
        f"config.top_k is {config.top_k} but {always} of the {blocks} blocks of {workload.context_tokens} tokens are "
        f"always chosen ({spec.init_blocks} first, {spec.local_blocks} + 1 last); give a top_k of at least {always}.",
    )
    _require(
        config.lookahead < shape.layers,
        f"config.lookahead is {config.lookahead}; {shape.name} has {shape.layers} layers.",
    )
    if config.policy == "shallow":
        _check_shallow(shape, spec, blocks, config)


def _check_shallow(shape: ModelShape, spec: SparseSpec, blocks: int, config: Config) -> None:
    _require(
        config.score_layer < shape.layers - 1,
        f"config.score_layer is {config.score_layer} but a later layer must share its choice and {shape.name} has "
        f"{shape.layers} layers; give a score_layer of at most {shape.layers - 2}.",
    )
    always = min(spec.forced, config.top_k)
    kept, free = round(config.reserve * blocks), config.top_k - always
    _require(
        kept <= free,
        f"config.reserve is {config.reserve}, {kept} of {blocks} blocks, but a top_k of {config.top_k} leaves {free} "
        f"beside the {always} that are always chosen; lower the reserve or raise top_k.",
    )
