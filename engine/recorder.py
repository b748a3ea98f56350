"""Records what a running decoder chooses: after every step the blocks in the chosen slots, brought to the host.

Nothing is added to the step itself, captured or not; reading waits for it to end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sparda.engine.decoder import Decoder
from sparda.engine.dynamics.choices import Blocks, Choices, TraceFacts
from sparda.engine.errors import SpardaError
from sparda.engine.graph import Replayable
from sparda.engine.prefill import Prefilled
from sparda.engine.run import layer_of


@dataclass(slots=True)
class _Sequence:
    """What one sequence chose: ``steps`` of int16 [layers, KV heads, top_k], from position ``start`` on."""

    start: int
    steps: list[Blocks] = field(default_factory=list)


class Recorder:
    """Stands in a decoder's place for its graph: replays it, then reads what was chosen.

    A row of a ``Batch`` that is given to another prompt begins another sequence. Use ``recording``.
    """

    def __init__(self, decoder: Decoder) -> None:
        plan = decoder.plan
        self.decoder, self.inner = decoder, decoder.graph
        self.layers = sorted({layer_of(op) for op in plan.of_kind("select")})
        if not self.layers:
            raise SpardaError(
                f"policy {plan.config.policy} attends to all blocks and chooses none; record one that chooses."
            )
        self.sequences: list[_Sequence] = []
        self._rows: dict[int, _Sequence] = {}

    def replay(self) -> None:
        """One step, as the decoder would take it, and its choices."""
        if self.inner is not None:
            self.inner.replay()
        else:
            self.decoder.issue()
        self.take()

    def take(self) -> None:
        """Keep what the last step chose, of every row that is in use. Waits for the step."""
        positions = self.decoder.tiers.positions.tolist()
        found = self._chosen().cpu().numpy()
        for row, after in enumerate(positions):
            # Position 0 marks a row that no sequence uses; any other has just moved on by one.
            if after == 0:
                self._rows.pop(row, None)
                continue
            if row not in self._rows:
                self._rows[row] = _Sequence(after - 1)
                self.sequences.append(self._rows[row])
            self._rows[row].steps.append(found[:, row].copy())

    def admitted(self, row: int, _prompt: Prefilled) -> None:
        """A prompt enters the row: its next step is the first of another sequence."""
        self._rows.pop(row, None)

    def _chosen(self) -> Tensor:
        """Int16 [layers, B, KV heads, top_k]: chosen blocks, ascending as their slots are listed, -1 after them."""
        d = self.decoder
        found = []
        for layer in self.layers:
            slots, count = d.chosen_slots[layer].long(), d.chosen_count[layer][..., None]
            blocks = d.tiers.layers[layer].block_of_slot.gather(-1, slots.clamp(min=0))
            there = torch.arange(slots.shape[-1], device=slots.device) < count
            found.append(blocks.masked_fill(~there, -1).to(torch.int16))
        return torch.stack(found)

    def choices(self, *, source: str = "", seed: int = 0, conditions: str = "") -> Choices:
        """What was chosen so far, each sequence from its own first step on; those that end early have -1 from there.

        Raises SpardaError where no step was taken.
        """
        if not self.sequences:
            raise SpardaError("no step was recorded; decode at least one token after a prompt's first.")
        plan = self.decoder.plan
        heads, top_k = plan.shape.kv_heads, plan.config.top_k
        steps = max(len(s.steps) for s in self.sequences)
        size = (steps, len(self.layers), len(self.sequences), heads, top_k)
        blocks = np.full(size, -1, dtype=np.int16)
        for index, sequence in enumerate(self.sequences):
            blocks[: len(sequence.steps), :, index] = np.stack(sequence.steps)
        facts = TraceFacts(
            model=plan.shape.name,
            source=source or plan.config.policy,
            block=plan.spec.block,
            init_blocks=plan.spec.init_blocks,
            local_blocks=plan.spec.local_blocks,
            top_k=top_k,
            layers=tuple(self.layers),
            kv_heads=heads,
            context_tokens=tuple(s.start for s in self.sequences),
            seed=seed,
            conditions=conditions,
        )
        return Choices(facts, blocks.reshape(*size[:2], -1, top_k))


@contextmanager
def recording(decoder: Decoder) -> Iterator[Recorder]:
    """Record the steps that a decoder takes inside, a ``Batch``'s too; capture it before, if it is to be captured."""
    recorder = Recorder(decoder)
    graph: Replayable | None = decoder.graph
    decoder.graph = recorder
    decoder.tiers.side.append(recorder.admitted)
    try:
        yield recorder
    finally:
        decoder.graph = graph
        decoder.tiers.side.remove(recorder.admitted)
