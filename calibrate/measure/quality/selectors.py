"""Ways of choosing blocks, those of ``calibrate.quality.SELECTORS``: classes that score a layer's blocks, [H, Q, M].

A selector is made for one run of a window and sees its layers in order; what it takes from an earlier layer or step it
keeps itself. It scores; ``Grid`` imposes the forced blocks and chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparda.calibrate.measure.quality.materials import Materials, missing
from sparda.calibrate.measure.quality.scorer import scorer_scores
from sparda.calibrate.measure.quality.view import Chooser, View
from sparda.calibrate.quality import Choice
from sparda.engine.errors import SpardaError
from sparda.engine.partial import along
from sparda.engine.weights import ScorerWeights, proxy_rows


class Selector(Protocol):
    """Scores of a layer's blocks, without forced ones."""

    def scores(self, view: View) -> Tensor: ...

    def chooses(self, layer: int) -> bool:
        """Whether it is this selector that chooses in a layer, and not ``sparse``, or nothing, in its place."""
        ...


class Sparse:
    """What the others do where they cannot choose: ``sparse`` itself."""

    def scores(self, view: View) -> Tensor:
        return view.sparse

    def chooses(self, layer: int) -> bool:
        return True


class Oracle(Sparse):
    """The attention mass itself."""

    def scores(self, view: View) -> Tensor:
        return view.mass


class Forced(Sparse):
    """No block: whoever chooses takes the forced ones alone."""

    def scores(self, view: View) -> Tensor:
        return torch.full_like(view.grid.distance, -torch.inf, dtype=torch.float32).expand(view.shape.kv_heads, -1, -1)


class Recency(Sparse):
    """The newer, the better."""

    def scores(self, view: View) -> Tensor:
        return -view.grid.distance.float().expand(view.shape.kv_heads, -1, -1)


@dataclass
class Random(Sparse):
    """Other blocks for each query, layer and head; the same for a seed on every device."""

    seed: int

    def scores(self, view: View) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 4096 + view.layer)
        drawn = torch.rand(view.shape.kv_heads, *view.grid.distance.shape, generator=generator)
        return drawn.to(view.q.device)


@dataclass
class Distance(Sparse):
    """``often`` [L, H, M]; of distances that were chosen equally often the nearer is the better."""

    often: Tensor

    def scores(self, view: View) -> Tensor:
        often = self.often[view.layer].to(view.q.device).float()
        nearer = torch.arange(often.shape[-1], device=often.device) * 1e-9
        distance = view.grid.distance.clamp(0, often.shape[-1] - 1)
        return (often - nearer)[:, distance]


class Previous(Sparse):
    """What ``sparse`` chose in the step before: a block that was forced then was chosen, and leads the others.

    The window's first query has no step before it in the run: it takes its own.
    """

    def scores(self, view: View) -> Tensor:
        before = view.grid.with_forced(view.sparse).clamp(max=torch.finfo(torch.float32).max)
        return torch.cat([before[:, :1], before[:, :-1]], 1)


@dataclass
class Ahead(Sparse):
    """Selection queries from the input of the layer ``lookahead`` before, through rows that ``make`` gives."""

    materials: Materials
    choice: Choice

    def chooses(self, layer: int) -> bool:
        return layer >= self.choice.lookahead

    def scores(self, view: View) -> Tensor:
        source = view.layer - self.choice.lookahead if self.chooses(view.layer) else view.layer
        queries = view.turned(source, self._rows(view.layer))
        return view.block_scores(queries.unflatten(0, (view.shape.kv_heads, -1)))

    def _rows(self, layer: int) -> Tensor:
        c, m = self.choice, self.materials
        key = (c.selector, c.lookahead, c.heads, layer)
        if key not in m.rows:
            m.rows[key] = self._made(layer).to(m.weights.embed.device, m.weights.embed.dtype)
        return m.rows[key]

    def _made(self, layer: int) -> Tensor:
        """Trained rows, or the mean of the layer's own query projections over each group."""
        c = self.choice
        if c.selector != "forecast":
            return proxy_rows(self.materials.weights, layer)
        rows = self.materials.forecasts[c.lookahead, c.heads].rows
        return rows["forecast"][layer - c.lookahead] if self.chooses(layer) else rows["current"][layer]


class Proxy(Ahead):
    """All query heads of the layer itself, applied to the earlier layer's input."""

    def scores(self, view: View) -> Tensor:
        if not self.chooses(view.layer):
            return view.sparse
        s, layer = view.shape, view.layer
        queries = view.turned(layer - self.choice.lookahead, self.materials.weights.layers[layer].fused[: s.q_width])
        return view.block_scores(queries.unflatten(0, (s.kv_heads, s.group)))


class InfiniGen(Ahead):
    """The group's mean query, guessed as ``Proxy`` does, along partial keys of single tokens."""

    def scores(self, view: View) -> Tensor:
        if not self.chooses(view.layer):
            return view.sparse
        assert self.materials.basis is not None
        basis, dtype = self.materials.basis[view.layer], view.q.dtype
        guess = view.turned(view.layer - self.choice.lookahead, self._rows(view.layer))
        partial = along(view.keys[None], basis)[0].to(dtype).float()
        return view.token_scores(along(guess[None], basis)[0].to(dtype).float()[:, None], partial)


@dataclass
class Shared(Sparse):
    """Layers whose number is no multiple of ``lookahead`` + 1 reuse the last one that chose for itself."""

    lookahead: int
    last: Tensor | None = None

    def chooses(self, layer: int) -> bool:
        return layer % (self.lookahead + 1) != 0

    def scores(self, view: View) -> Tensor:
        if self.last is None or not self.chooses(view.layer):
            self.last = view.sparse
        return self.last


@dataclass
class Early(Sparse):
    """Layers up to ``layer`` choose for themselves."""

    layer: int
    kept: Tensor | None = None

    def chooses(self, layer: int) -> bool:
        return layer > self.layer

    def scores(self, view: View) -> Tensor:
        if self.kept is None or not self.chooses(view.layer):
            self.kept = view.sparse
        return self.kept


@dataclass
class Shallow(Early):
    """One score for all heads, taken again every ``refresh`` steps; a block that began since then is unknown.

    In the engine the layers up to ``layer`` attend to all blocks, and so they do in a run.
    """

    scorer: ScorerWeights | None = None
    refresh: int = 16

    def scores(self, view: View) -> Tensor:
        if view.layer == self.layer:
            assert self.scorer is not None
            due = torch.arange(0, view.grid.count, max(1, self.refresh), device=view.q.device)
            taken = scorer_scores(self.scorer, view, due)
            kept = taken[torch.arange(view.grid.count, device=view.q.device) // max(1, self.refresh)]
            self.kept = kept.expand(view.shape.kv_heads, -1, -1)
        return view.sparse if view.layer <= self.layer or self.kept is None else self.kept


_PLAIN: dict[str, type[Sparse]] = {
    "oracle": Oracle,
    "sparse": Sparse,
    "previous": Previous,
    "recency": Recency,
    "forced": Forced,
}


def make_selector(choice: Choice, m: Materials) -> Selector:
    """The selector of a choice, new for each run. Raises SpardaError where what it is made of was not given."""
    name = choice.selector
    lacks = missing(choice, m)
    if lacks:
        raise SpardaError(f"{choice.label} needs {lacks}: give it, or leave the selector out.")
    if name in _PLAIN:
        return _PLAIN[name]()
    if name == "random":
        return Random(m.seed)
    if name == "distance":
        return Distance(m.distances[choice.top_k])
    if name == "shared":
        return Shared(choice.lookahead)
    if name == "early":
        return Early(m.sharing_layer)
    if name == "shallow":
        return Shallow(m.sharing_layer, scorer=m.scorer, refresh=m.refresh)
    return {"proxy": Proxy, "infinigen": InfiniGen}.get(name, Ahead)(m, choice)


def chooser(choice: Choice, m: Materials, selector: Selector | None = None) -> Chooser:
    """What ``run_window`` asks in each layer: the best ``top_k`` blocks of the selector, forced ones among them."""
    selector = selector or make_selector(choice, m)

    def choose(view: View) -> Tensor | None:
        if isinstance(selector, Shallow) and not selector.chooses(view.layer):
            if view.layer == selector.layer:
                selector.scores(view)
            return None
        if isinstance(selector, Forced):
            return view.grid.forced.expand(view.shape.kv_heads, -1, -1)
        return view.grid.chosen(view.grid.with_forced(selector.scores(view)), choice.top_k)

    return choose
