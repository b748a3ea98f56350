"""Decoding real prompts: rows of a batch that differ in length, end on their own and are given to the next prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch

from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.errors import SpardaError
from sparda.engine.policies import make_plan
from sparda.engine.prefill import CHUNK, prefill
from sparda.engine.room import check_room
from sparda.engine.shapes import SparseSpec
from sparda.engine.tiers import Tiers
from sparda.engine.weights import Weights


@dataclass(slots=True)
class Generation:
    """What a prompt of ``prompt`` tokens becomes. ``tokens``: the new ones so far, without the stop token.

    ``reason``: empty while it goes on, then ``stop`` (a stop token came), ``length`` (``max_new`` tokens are there) or
    ``capacity`` (its row is full).
    """

    prompt: int
    max_new: int
    tokens: list[int] = field(default_factory=list)
    reason: str = ""


class Batch:
    """``rows`` sequences of up to ``capacity`` tokens, prompt and new ones together, decoded greedily under ``config``.

    Everything is allocated and captured here; rows then come and go without either. A ``top_k`` above the blocks of
    the capacity is lowered to them: all are chosen. ``stop``: tokens that end a sequence. ``chunk``: see ``prefill``.
    Raises SpardaError where memory does not suffice, before it takes any.

    Partial keys of all prompts lie along the directions of the first that enters a row (``PartialKeys``). Let that be a
    long one, of ``partial.SAMPLE`` tokens at best: a prompt of a few words says little about the model's directions.
    """

    def __init__(
        self,
        weights: Weights,
        config: Config,
        *,
        rows: int,
        capacity: int,
        spec: SparseSpec | None = None,
        stop: Collection[int] = (),
        chunk: int = CHUNK,
    ) -> None:
        shape, spec, device = weights.shape, spec or SparseSpec(), weights.embed.device
        self.weights, self.capacity, self.stop, self.chunk = weights, capacity, frozenset(stop), chunk
        top_k = min(config.top_k, spec.blocks(capacity))
        self.config = replace(config, top_k=top_k)
        workload = Workload(rows, capacity, 0.0)
        plan = make_plan(shape, spec, workload, self.config)
        check_room(shape, spec, workload, self.config, device)
        self.tiers = Tiers(shape, spec, workload, self.config, device, capacity=capacity)
        self.decoder = Decoder(plan, weights, self.tiers)
        for row in range(rows):
            self.tiers.park(row)
        if device.type == "cuda":
            self.decoder.capture()
        self.generations: list[Generation | None] = [None] * rows
        """What each row decodes, or decoded last."""

    @property
    def free(self) -> list[int]:
        """Rows that a prompt can have."""
        return [row for row, g in enumerate(self.generations) if g is None or g.reason]

    @property
    def live(self) -> dict[int, Generation]:
        """What goes on, by row."""
        return {row: g for row, g in enumerate(self.generations) if g is not None and not g.reason}

    def admit(self, prompt: Sequence[int], max_new: int) -> int:
        """Prefill a prompt and give it a row, which is returned; its first new token is in ``generations`` then.

        Raises SpardaError where no row is free, and for an empty prompt, one above the capacity, a token that the
        model has not, and fewer than one new token.
        """
        self._check(prompt, max_new)
        free = self.free
        if not free:
            raise SpardaError(f"all {len(self.generations)} rows are in use; step until one ends.")
        row, generation = free[0], Generation(len(prompt), max_new)
        tokens = torch.tensor(prompt, dtype=torch.int64)
        prefilled = prefill(self.weights, tokens, chunk=self.chunk, sample=self.tiers.sample)
        first = int(prefilled.logits.argmax())
        self._take(generation, first)
        self.generations[row] = generation
        if not generation.reason:
            self.tiers.admit(row, prefilled)
            self.decoder.tokens[row] = first
        return row

    def step(self) -> list[tuple[int, int]]:
        """Decode one token in every live row: (row, token) in row order, without stop tokens. Waits for the tokens."""
        live = self.live
        if not live:
            return []
        self.decoder.step()
        sampled: list[int] = self.decoder.tokens.tolist()
        found = []
        for row, generation in live.items():
            if self._take(generation, sampled[row]):
                found.append((row, sampled[row]))
            if generation.reason:
                self.tiers.park(row)
        return found

    def generate(self, prompts: Sequence[Sequence[int]], max_new: int) -> list[Generation]:
        """Decode any number of prompts, each as soon as a row is free; returns what became of each, in their order.

        Raises SpardaError as ``admit`` does, before the first of them is begun.
        """
        for prompt in prompts:
            self._check(prompt, max_new)
        waiting, found = deque(prompts), []
        while waiting or self.live:
            while waiting and self.free:
                row = self.admit(waiting.popleft(), max_new)
                found.append(self.generations[row])
            self.step()
        return [g for g in found if g is not None]

    def _take(self, generation: Generation, token: int) -> bool:
        """Keep a sampled token unless it is a stop token, and see whether the sequence ends; returns whether kept.

        The host counts: a row's next token is written at prompt + new tokens - 1, so it needs no word of the device.
        """
        if token in self.stop:
            generation.reason = "stop"
            return False
        generation.tokens.append(token)
        if len(generation.tokens) == generation.max_new:
            generation.reason = "length"
        elif generation.prompt + len(generation.tokens) > self.capacity:
            generation.reason = "capacity"
        return True

    def _check(self, prompt: Sequence[int], max_new: int) -> None:
        vocab = self.weights.shape.vocab
        if not 1 <= len(prompt) <= self.capacity:
            raise SpardaError(f"a prompt of {len(prompt)} tokens; a row of this batch holds 1 to {self.capacity}.")
        if max_new < 1:
            raise SpardaError(f"{max_new} new tokens are asked for; ask for at least 1.")
        odd = next((t for t in prompt if not 0 <= t < vocab), None)
        if odd is not None:
            raise SpardaError(
                f"token {odd} is not in the vocabulary of {self.weights.shape.name}; allowed are 0 to {vocab - 1}."
            )
