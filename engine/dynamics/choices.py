"""Chosen blocks, step by step: what a policy or a selector picked for every layer and KV head while it decoded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparda.engine.errors import SpardaError

Blocks = npt.NDArray[np.int16]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MOST_BLOCKS = 32768
"""Blocks of a sequence that the selection kernel can tell apart; so two bytes hold any."""


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Where choices come from. ``source``: the policy or selector that made them; ``conditions``: whatever else to say.

    ``context_tokens``: of each sequence, the tokens before the one that the first step writes: step s is at position
    context_tokens + s * ``positions_per_step``. ``init_blocks`` first and ``local_blocks`` + 1 last blocks are forced.
    ``layers``: indices of the model's layers that chose.
    """

    model: str
    source: str
    block: int
    init_blocks: int
    local_blocks: int
    top_k: int
    layers: tuple[int, ...]
    kv_heads: int
    context_tokens: tuple[int, ...]
    positions_per_step: int = 1
    seed: int = 0
    conditions: str = ""

    def __post_init__(self) -> None:
        least = {"block": 1, "init_blocks": 0, "local_blocks": 0, "top_k": 1, "kv_heads": 1, "positions_per_step": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise SpardaError(f"{name} of a selection trace is {getattr(self, name)}; allowed is {low} or more.")
        if not self.layers or not self.context_tokens or min(self.context_tokens) < 0:
            raise SpardaError(
                f"a selection trace of layers {list(self.layers)} and contexts {list(self.context_tokens)}; give at "
                "least one of each, contexts of 0 tokens or more."
            )

    @property
    def forced(self) -> int:
        """Blocks chosen whatever their score, once the context is long enough."""
        return self.init_blocks + self.local_blocks + 1

    @property
    def free(self) -> int:
        """Picks of ``top_k`` that are not forced, once the context is long enough."""
        return self.top_k - self.forced

    @property
    def streams(self) -> int:
        """Choices of a step: one for each layer, sequence and KV head."""
        return len(self.layers) * self.heads

    @property
    def heads(self) -> int:
        """KV heads of all sequences."""
        return len(self.context_tokens) * self.kv_heads


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """``blocks`` int16 [steps, layers, sequences * KV heads, top_k]: ids ascending, then -1 where fewer were chosen.

    The heads of one sequence lie side by side. A sequence that ends before the others has -1 from there on.
    Raises SpardaError where ids do not ascend, come twice or name blocks that did not exist yet.
    """

    facts: TraceFacts
    blocks: Blocks

    def __post_init__(self) -> None:
        f, shape = self.facts, self.blocks.shape
        wanted = (len(f.layers), f.heads, f.top_k)
        if self.blocks.ndim != 4 or shape[1:] != wanted or self.blocks.dtype != np.int16 or not shape[0]:
            raise SpardaError(
                f"chosen blocks are {self.blocks.dtype} {shape}; the facts of the trace ask for int16 [steps, layers, "
                f"heads, top_k] = [1 or more, {wanted[0]}, {wanted[1]}, {wanted[2]}]."
            )
        if int(self.existing().max()) > MOST_BLOCKS:
            raise SpardaError(f"a trace to {int(self.existing().max())} blocks; {MOST_BLOCKS} can be told apart.")
        # -1 as the largest: rows must then ascend throughout, except that -1 may follow itself.
        order = self.blocks.view(np.uint16)
        bad = (order[..., 1:] <= order[..., :-1]) & (order[..., 1:] != 0xFFFF)
        late = self.blocks.max(-1) >= self.per_stream(self.existing())
        if bool((self.blocks < -1).any()) or bool(bad.any()) or bool(late.any()):
            at = np.argwhere(bad.any(-1) | late | (self.blocks < -1).any(-1))[0]
            raise SpardaError(
                f"the blocks of step {at[0]}, layer {at[1]}, head {at[2]} are {self.blocks[tuple(at)].tolist()}; they "
                "must ascend, each once and below the blocks that exist by then, and -1 may only stand last."
            )

    @property
    def steps(self) -> int:
        return int(self.blocks.shape[0])

    def positions(self) -> Ints:
        """int64 [steps, sequences]: the position that each step writes."""
        first = np.array(self.facts.context_tokens, dtype=np.int64)
        return first[None] + np.arange(self.steps, dtype=np.int64)[:, None] * self.facts.positions_per_step

    def existing(self) -> Ints:
        """int64 [steps, sequences]: blocks that exist in a step, the one being written included."""
        return self.positions() // self.facts.block + 1

    @property
    def room(self) -> int:
        """Blocks that a sequence has at the end, at the most, and the next one."""
        return int(self.existing().max()) + 1

    def per_stream(self, values: Ints) -> Ints:
        """[steps, sequences] spread to [steps, 1, heads], to go with ``blocks``."""
        return np.repeat(values, self.facts.kv_heads, axis=1)[:, None]

    def forced(self) -> Bools:
        """Bool as ``blocks``: which of the chosen blocks are forced."""
        f = self.facts
        local = self.per_stream(self.existing() - 1 - f.local_blocks)[..., None]
        return (self.blocks >= 0) & ((self.blocks < f.init_blocks) | (self.blocks >= local))

    def free_picks(self) -> Ints:
        """int64 [steps, layers, heads]: chosen blocks that are not forced."""
        return np.asarray(((self.blocks >= 0) & ~self.forced()).sum(-1), dtype=np.int64)

    def lengths(self) -> Ints:
        """int64 [sequences]: steps until a sequence ends."""
        shape = (self.steps, len(self.facts.layers), -1, self.facts.kv_heads)
        live = np.any(self.blocks[..., 0].reshape(shape) >= 0, axis=(1, 3))
        return np.asarray(np.where(live.any(0), self.steps - live[::-1].argmax(0), 0), dtype=np.int64)
