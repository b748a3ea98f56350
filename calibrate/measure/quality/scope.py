"""How much is measured: windows, top-ks, and which choices in which part."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from sparda.calibrate.measure.quality.materials import REFRESH_STEPS, SHARING_LAYER, Materials, missing
from sparda.calibrate.quality import SELECTORS, Choice
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import ModelShape, SparseSpec

PARTS = ("recall", "perplexity", "retrieval", "dynamics")
"""What may be measured, in the order in which it is. The model's own loss always is."""

AHEAD = {"untrained": 4, "proxy": 4, "infinigen": 1, "shared": 3}
"""Selectors with a lookahead that nobody trained, and how far they are tried."""

LOSS_AHEAD = {"proxy": 2, "shared": 1}
"""The same, where each choice takes a run of its own."""

ASKED = ("oracle", "sparse", "forecast", "untrained", "infinigen", "previous", "shared", "shallow", "recency")
"""Selectors that are tried on retrieval; those with a lookahead at ``ASKED_AHEAD``."""

ASKED_AHEAD = (1, 4)


@dataclass(frozen=True, slots=True)
class Scope:
    """What ``measure_quality`` takes of each text, and which choices it tries.

    ``context_tokens``: the first so many tokens of each document; of these the last ``recall_tokens`` and
    ``loss_tokens`` are measured on. ``skip_steps``: steps before misses are counted. ``sharing_layer``: the layer of
    ``early`` and ``shallow``. ``selectors``: those to try. ``trace_top_k``: what selection traces are recorded at.
    """

    context_tokens: int = 8192
    recall_tokens: int = 2048
    loss_tokens: int = 1024
    question_tokens: int = 256
    skip_steps: int = 512
    top_ks: tuple[int, ...] = (4, 6, 8, 12, 16, 24, 32, 48, 64)
    loss_top_ks: tuple[int, ...] = (6, 8, 16, 32, 64)
    retrieval_top_ks: tuple[int, ...] = (16,)
    dynamics_top_ks: tuple[int, ...] = (8, 16, 32)
    trace_top_k: int = 16
    selectors: tuple[str, ...] = tuple(SELECTORS)
    sharing_layer: int = SHARING_LAYER
    refresh_steps: int = REFRESH_STEPS
    seed: int = 0

    def check(self, shape: ModelShape, spec: SparseSpec) -> None:
        """Refuse what cannot be. Raises SpardaError that says what was given and what is allowed."""
        unknown = [name for name in self.selectors if name not in SELECTORS]
        if unknown:
            raise SpardaError(f"selector {unknown[0]!r} is not known; allowed are {', '.join(SELECTORS)}.")
        if not 3 <= self.context_tokens <= shape.max_context:
            raise SpardaError(
                f"context_tokens is {self.context_tokens}; {shape.name} takes 3 to {shape.max_context} tokens."
            )
        for name in ("recall_tokens", "loss_tokens"):
            # Before the window a token at least has been read, and one more gives the step before.
            if not 1 <= getattr(self, name) <= self.context_tokens - 2:
                raise SpardaError(
                    f"{name} is {getattr(self, name)}; of {self.context_tokens} tokens 1 to {self.context_tokens - 2} "
                    "can be measured on."
                )
        given = (*self.top_ks, *self.loss_top_ks, *self.retrieval_top_ks, *self.dynamics_top_ks, self.trace_top_k)
        for top_k in given:
            if not spec.forced < top_k <= spec.blocks(self.context_tokens):
                raise SpardaError(
                    f"top_k {top_k}: {spec.forced} blocks are always chosen and {self.context_tokens} tokens have "
                    f"{spec.blocks(self.context_tokens)}; give {spec.forced + 1} to {spec.blocks(self.context_tokens)}."
                )

    def recall_choices(self, m: Materials) -> list[Choice]:
        """All selectors at all of ``top_ks``."""
        return self._at(self.top_ks, self._families(m, AHEAD), m)

    def loss_choices(self, m: Materials) -> list[Choice]:
        """Fewer lookaheads; ``forced`` at one top-k alone, for it is the same at each."""
        chosen = self._at(self.loss_top_ks, self._families(m, {**AHEAD, **LOSS_AHEAD}), m)
        return [c for c in chosen if c.selector != "forced" or c.top_k == self.loss_top_ks[0]]

    def retrieval_choices(self, m: Materials) -> list[Choice]:
        """The main selectors."""
        families = [
            c
            for c in self._families(m, {**AHEAD, "shared": 1})
            if c.selector in ASKED
            and (not c.lookahead or c.lookahead in ASKED_AHEAD)
            and (c.selector != "untrained" or c.lookahead == 1)
            and c.heads <= 1
        ]
        return self._at(self.retrieval_top_ks, families, m)

    def _families(self, m: Materials, ahead: dict[str, int]) -> list[Choice]:
        found = []
        for name in (s for s in SELECTORS if s in self.selectors):
            if name == "forecast":
                found += [Choice(name, 1, d, n) for d, n in sorted(m.forecasts)]
            elif name in ahead:
                heads = 1 if name == "untrained" else 0
                found += [Choice(name, 1, d, heads) for d in range(1, ahead[name] + 1)]
            else:
                found.append(Choice(name, 1))
        return [c for c in found if _has_layers(c, m)]

    def _at(self, top_ks: Collection[int], families: Iterable[Choice], m: Materials) -> list[Choice]:
        chosen = (replace(family, top_k=top_k) for family in families for top_k in top_ks)
        return [c for c in chosen if not missing(c, m)]


def _has_layers(choice: Choice, m: Materials) -> bool:
    """Whether the model has a layer that the selector would choose in."""
    first = m.sharing_layer + 1 if choice.selector in ("early", "shallow") else choice.lookahead
    return first < m.weights.shape.layers


def choice_key(choice: Choice) -> str:
    """A name of a choice that a file may bear."""
    return f"{choice.selector}-d{choice.lookahead}-x{choice.heads}-k{choice.top_k}"
