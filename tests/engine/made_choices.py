"""Choices made without the generator: by scores that drift, and any that hypothesis thinks of."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from sparda.engine.dynamics.choices import Choices, TraceFacts


def facts_of(**given: Any) -> TraceFacts:
    known: dict[str, Any] = {
        "model": "made", "source": "scores", "block": 16, "init_blocks": 1, "local_blocks": 1, "top_k": 8,
        "layers": (0, 1), "kv_heads": 2, "context_tokens": (500,),
    }  # fmt: skip
    return TraceFacts(**{**known, **given})


def drifting(
    steps: int, *, keep: float = 0.97, noise: float = 0.5, burst: float = 3.0, seed: int = 0, **given: Any
) -> Choices:
    """The best of scores that drift, with noise, and favour what is near; some steps move more, some streams too."""
    facts = facts_of(**given)
    random = np.random.default_rng(seed)
    probe = Choices(facts, np.full((steps, len(facts.layers), facts.heads, facts.top_k), -1, np.int16))
    existing, blocks = probe.existing(), np.arange(probe.room)
    scores = random.normal(size=(len(facts.layers), facts.heads, probe.room))
    loud = noise * random.uniform(0.3, 1.6, size=scores.shape[:2])[..., None]
    found = probe.blocks.copy()
    for step in range(steps):
        moved = burst if random.random() < 0.1 else 1.0
        stay = 1 - (1 - keep) * moved
        scores = stay * scores + np.sqrt(1 - stay * stay) * random.normal(size=scores.shape)
        last = np.repeat(existing[step], facts.kv_heads)[None, :, None]
        now = scores + moved * loud * random.normal(size=scores.shape) + np.exp((blocks - last) / 4)
        forced = (blocks < facts.init_blocks) | (blocks >= last - 1 - facts.local_blocks)
        now = np.where(blocks >= last, -np.inf, np.where(forced, np.inf, now))
        best = np.argsort(-now, axis=-1, kind="stable")[..., : facts.top_k]
        chosen = np.where(np.take_along_axis(now, best, axis=-1) > -np.inf, best, -1).astype(np.int16)
        found[step] = np.sort(chosen.view(np.uint16), axis=-1).view(np.int16)
    return Choices(facts, found)


@st.composite
def any_choices(draw: st.DrawFn, forced: bool = False) -> Choices:
    """Any choices; with ``forced`` those that choose the forced blocks, as the engine does, and as many as it would."""
    block = draw(st.sampled_from([1, 3, 8]))
    top_k = draw(st.integers(4 if forced else 1, 9))
    facts = facts_of(
        block=block,
        local_blocks=draw(st.integers(0, 1)),
        top_k=top_k,
        layers=tuple(range(draw(st.integers(1, 2)))),
        kv_heads=draw(st.integers(1, 2)),
        context_tokens=tuple(draw(st.lists(st.integers(0, 14 * block), min_size=1, max_size=2))),
        positions_per_step=1 if forced else draw(st.integers(1, 3)),
    )
    steps = draw(st.integers(1, 24))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    turnover = draw(st.sampled_from([0.0, 0.2, 1.0]))
    blocks = np.full((steps, len(facts.layers), facts.heads, top_k), -1, np.int16)
    existing = np.repeat(Choices(facts, blocks).existing(), facts.kv_heads, axis=1)
    for layer, head in np.ndindex(blocks.shape[1:3]):
        ends = steps if forced else int(random.integers(0, steps + 1))
        order = random.random(int(existing.max()) + 1)
        for step in range(ends):
            order = np.where(random.random(len(order)) < turnover, random.random(len(order)), order)
            last = int(existing[step, head])
            always = {m for m in range(last) if m < facts.init_blocks or m >= last - 1 - facts.local_blocks}
            others = [m for m in np.argsort(order).tolist() if m < last and m not in always]
            count = top_k if forced else int(random.integers(0, top_k + 1))
            ids = sorted([*always, *others][: min(last, count)] if forced else others[: min(len(others), count)])
            blocks[step, layer, head, : len(ids)] = ids
    return Choices(facts, blocks)
