"""Selection traces drawn from parameters: the stack model of least recent choice, fitted to recorded choices.

In every step a stream replaces some of its free picks. What enters is drawn by its depth in the stack of least recent
choice, so that the misses of any number of slots follow the fitted curve (Mattson et al., IBM Systems Journal 9, 1970;
Spirn, Program Behavior, 1977). How many enter differs by layer, by head and by step; steps in which much moves reach
deeper too. Only the time since a block was last chosen decides how likely it returns, not how often it was chosen: sets
many steps apart have less in common than a model's, at the same misses.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sparda.engine.dynamics.choices import Bools, Choices, Ints, TraceFacts
from sparda.engine.dynamics.generator_params import GeneratorParams
from sparda.engine.dynamics.stack import stack_distances
from sparda.engine.errors import SpardaError

Floats = npt.NDArray[np.float64]

TIMES = (1.0, 1.5, 2.0, 4.0)
"""Slots, in multiples of top_k, at which a generated trace is held to a recorded one."""


def generate(
    params: GeneratorParams,
    *,
    steps: int,
    layers: int,
    kv_heads: int,
    sequences: int = 1,
    top_k: int | None = None,
    context_tokens: int | None = None,
    block: int | None = None,
    init_blocks: int | None = None,
    local_blocks: int | None = None,
    seed: int = 0,
) -> Choices:
    """Draw choices that follow ``params``; what is not given is as in their source. The seed decides them.

    Sequences are of one length and have steps of their own kind each. The stack begins in the order in which
    ``Tiers.reset_residents`` leaves blocks, so that slots of any number need no long run to fill. A context with fewer
    blocks than the depths ask for gives its deepest instead.

    Raises SpardaError where forced blocks leave no free pick, or a number is out of range.
    """
    p = params
    facts = TraceFacts(
        model=f"generated from {p.source}",
        source="generator",
        block=block or p.block,
        init_blocks=p.init_blocks if init_blocks is None else init_blocks,
        local_blocks=p.local_blocks if local_blocks is None else local_blocks,
        top_k=top_k or p.top_k,
        layers=tuple(range(layers)),
        kv_heads=kv_heads,
        context_tokens=(p.context_tokens if context_tokens is None else context_tokens,) * sequences,
        seed=seed,
    )
    if facts.free < 1:
        raise SpardaError(
            f"a top_k of {facts.top_k} has no free pick beside {facts.forced} forced blocks; give a higher one."
        )
    if steps < 1:
        raise SpardaError(f"{steps} steps are to be generated; ask for at least 1.")
    return _Drawing(params, facts, steps, np.random.default_rng(seed)).choices()


def max_gap(recorded: Choices, generated: Choices, *, skip: int = 0, skip_generated: int | None = None) -> float:
    """Largest difference of the misses at TIMES, as a share of the free picks: 0.02 is 2 percentage points.

    ``skip`` first steps are left out, of the generated trace ``skip_generated`` where that is given. Traces of
    different top_k are compared at the same ratio of ``MissCurve``.
    """
    first = stack_distances(recorded, skip=skip)
    second = stack_distances(generated, skip=skip if skip_generated is None else skip_generated)
    ratios = [(first.slots_at(times) - recorded.facts.forced) / recorded.facts.free for times in TIMES]
    curves = first.curve(), second.curve()
    return max(abs(curves[0].at(ratio) - curves[1].at(ratio)) for ratio in ratios)


def fitted_gap(params: GeneratorParams, generated: Choices, *, skip: int = 0) -> float:
    """Like ``max_gap``, to the shares in ``params``, which are those of slots without one to spare."""
    found = stack_distances(generated, skip=skip, spare=0)
    mean = np.array(params.layers).mean(axis=0)
    ratios = [(found.slots_at(times) - found.facts.forced) / found.facts.free for times in TIMES]
    wanted = _between(np.array(ratios), np.array(params.ratio), mean)
    return float(max(abs(w - found.curve().at(ratio)) for w, ratio in zip(wanted, ratios, strict=True)))


class _Drawing:
    """State of N streams: ``stack`` int64 [N, C] of unforced blocks, the ``free`` chosen first, newest entry first."""

    def __init__(self, params: GeneratorParams, facts: TraceFacts, steps: int, random: np.random.Generator) -> None:
        self.params, self.facts, self.steps, self.random = params, facts, steps, random
        count = len(params.layers)
        own = np.arange(len(facts.layers)) * count // len(facts.layers)
        self.layer = np.repeat(own, facts.heads)
        self.sequence = np.tile(np.repeat(np.arange(len(facts.context_tokens)), facts.kv_heads), len(facts.layers))
        self.heads = self._head_factors()
        context = facts.context_tokens[0]
        self.existing = (context + np.arange(steps)) // facts.block + 1
        self.first = min(facts.init_blocks, int(self.existing[0]))
        # Unforced blocks in a step; chosen ones among them.
        self.candidates = np.maximum(0, self.existing - facts.forced)
        self.picks = np.minimum(self.candidates, facts.free)
        self.stack = np.tile(facts.init_blocks + np.arange(int(self.candidates[-1])), (facts.streams, 1))
        self.share, self.tail = self._tables(int(self.candidates[-1]) + 1)
        self.kind = self._kinds(len(facts.context_tokens))

    def _head_factors(self) -> Floats:
        """float64 [N], of mean 1 in each layer."""
        f, spread = self.facts, self.params.head_spread
        if not spread:
            return np.ones(f.streams)
        shape = 1 / spread**2
        drawn = self.random.gamma(shape, 1 / shape, (len(f.layers), f.heads))
        return np.asarray((drawn / np.maximum(drawn.mean(1, keepdims=True), 1e-9)).ravel())

    def _kinds(self, sequences: int) -> Ints:
        """int64 [steps, sequences]: the kind of each step, by the rank of a noise that neighbouring steps share.

        As many are of a kind as its weight says: a rare one in which much moves would else decide the mean.
        """
        p = self.params
        noise = self.random.normal(size=(self.steps, sequences))
        for step in range(1, self.steps):
            noise[step] = p.persistence * noise[step - 1] + (1 - p.persistence**2) ** 0.5 * noise[step]
        rank = noise.argsort(axis=0).argsort(axis=0)
        edges = np.cumsum(p.weights) / sum(p.weights)
        return np.asarray(np.searchsorted(edges[:-1], (rank + 0.5) / self.steps, side="right"), dtype=np.int64)

    def _tables(self, depths: int) -> tuple[Floats, Floats]:
        """Share replaced [C, L], and [C, L, depths]: 1 less the share of that from depth j or deeper, ascending.

        Depth j stands for the ratio 1 + j / free: the power law between two ratios, the straight line to a 0.
        """
        p = self.params
        bursts = np.array(p.bursts or [[1.0] * len(p.ratio)])
        rows = np.minimum(np.array(p.layers)[None] * bursts[:, None], 1.0)
        rows = np.minimum.accumulate(rows, axis=-1)
        at = 1 + np.arange(depths) / self.facts.free
        tail = np.ones((*rows.shape[:2], depths))
        for place in np.ndindex(*rows.shape[:2]):
            row = rows[place]
            if row[0] > 0:
                tail[place] = 1 - _between(at, np.array(p.ratio), row / row[0])
        return rows[..., 0], tail

    def choices(self) -> Choices:
        f = self.facts
        blocks = np.full((self.steps, f.streams, f.top_k), -1, dtype=np.int16)
        for step in range(self.steps):
            self._step(step)
            existing, picks = int(self.existing[step]), int(self.picks[step])
            local = np.arange(max(min(f.init_blocks, existing), existing - 1 - f.local_blocks), existing)
            ids = np.concatenate([np.arange(min(f.init_blocks, existing)), local])
            count = len(ids) + picks
            blocks[step, :, : len(ids)] = ids
            blocks[step, :, len(ids) : count] = self.stack[:, :picks]
            blocks[step, :, :count].sort(axis=1)
        return Choices(f, blocks.reshape(self.steps, len(f.layers), f.heads, f.top_k))

    def _step(self, step: int) -> None:
        """Replace; a block that leaves the local window joins the chosen or becomes the newest of the others."""
        if not step:
            return
        had, has = int(self.candidates[step - 1]), int(self.candidates[step])
        free = int(self.picks[step - 1])
        grown = int(self.picks[step]) - free
        streams = self.facts.streams
        joins = np.zeros((streams, has - had), dtype=np.bool_)
        joins[:, :grown] = True
        if free:
            joins[:, grown:] |= self.random.random((streams, has - had - grown)) < self.params.stays
        over = joins.sum(1) - grown
        count = self._replacements(step, free, had - free, over)
        # 0 enters, 1 stays chosen, 2 leaves, 3 stays out: in this order they stand in the next stack.
        key = np.full((streams, has), 3, dtype=np.uint8)
        key[:, :free] = 1
        key[:, had:] = np.where(joins, 0, 2)
        if free:
            key[:, :free][self._leaving(free, count + over)] = 2
        rows, depths = self._depths(step, count, had - free)
        key[rows, free + depths] = 0
        order = np.argsort(key, axis=1, kind="stable")
        self.stack[:, :has] = np.take_along_axis(self.stack[:, :has], order, axis=1)

    def _replacements(self, step: int, free: int, others: int, over: Ints) -> Ints:
        """int64 [N]: how many enter from the stack, never more than are there or may leave."""
        if not free or not others:
            return np.zeros(self.facts.streams, dtype=np.int64)
        rate = np.clip(self.share[self.kind[step, self.sequence], self.layer] * self.heads, 0.0, 1.0)
        rho = self.params.dispersion
        if 0 < rho < 1:
            # A beta variable of this mean gives counts that far apart; at 0 and 1 there is none.
            mean = np.clip(rate, 1e-9, 1 - 1e-9)
            drawn = self.random.beta(mean * (1 / rho - 1), (1 - mean) * (1 / rho - 1))
            rate = np.where((rate > 0) & (rate < 1), drawn, rate)
        count = self.random.binomial(free, rate)
        return np.asarray(np.minimum(count, np.minimum(others, free - over)), dtype=np.int64)

    def _depths(self, step: int, count: Ints, others: int) -> tuple[Ints, Ints]:
        """Rows and depths, ascending and distinct in a row, of what enters.

        The draws of a row are spread evenly over the law, from one random start: each depth is as likely as drawn
        apart, and hardly any comes twice.
        """
        most = int(count.max(initial=0))
        draw = np.arange(most)
        start = self.random.random((self.facts.streams, 1))
        even = (draw + start) / np.maximum(count, 1)[:, None]
        pair = self.kind[step, self.sequence] * len(self.params.layers) + self.layer
        depths = self.tail.shape[-1]
        # One search in all rows, each shifted to an interval of its own.
        flat = (self.tail.reshape(-1, depths) + 2.0 * np.arange(self.tail.size // depths)[:, None]).ravel()
        place = np.searchsorted(flat, np.minimum(even, 1.0) + 2.0 * pair[:, None])
        depth = place - pair[:, None] * depths - 1
        depth = np.maximum.accumulate(np.maximum(depth, 0) - draw, axis=1) + draw
        depth = np.minimum(depth, others - count[:, None] + draw)
        rows, columns = np.nonzero(draw < count[:, None])
        return rows, depth[rows, columns]

    def _leaving(self, free: int, count: Ints) -> Bools:
        """Bool [N, free]: ``count`` of the free picks, drawn without replacement by the weight of their age."""
        weights = np.array(self.params.leave)
        weights = weights[np.arange(free) * len(weights) // free]
        keys = self.random.exponential(size=(self.facts.streams, free)) / np.maximum(weights, 1e-9)
        most = int(count.max(initial=0))
        marked = np.zeros(keys.shape, dtype=np.bool_)
        np.put_along_axis(marked, np.argsort(keys, axis=1)[:, :most], np.arange(most) < count[:, None], axis=1)
        return marked


def _between(at: Floats, ratio: Floats, share: Floats) -> Floats:
    """``share`` of given ``ratio`` at others; 0 beyond the last, where nothing was seen to come from."""
    positive = share > 0
    if not positive.any():
        return np.zeros(len(at))
    power = np.exp(np.interp(np.log(at), np.log(ratio[positive]), np.log(share[positive])))
    end = int(positive.sum()) - 1
    line = np.interp(at, ratio, share)
    found = np.where(at <= ratio[end], power, line)
    return np.asarray(np.where(at > ratio[-1], 0.0, found))
