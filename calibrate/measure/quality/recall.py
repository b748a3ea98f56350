"""How much of what matters each choice catches, on a text that is read densely: blocks of ``sparse``, and attention.

One dense run of the window gives all choices at once: the same queries, the same keys, the same attention for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch
from torch import Tensor

from sparda.calibrate.measure.quality.blocks import Grid, ranked
from sparda.calibrate.measure.quality.materials import Materials
from sparda.calibrate.measure.quality.selectors import Forced, Selector, make_selector
from sparda.calibrate.measure.quality.view import View
from sparda.calibrate.measure.quality.window import Prefix, run_window
from sparda.calibrate.quality import FAR, Choice, Recall, Spread
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import SparseSpec
from sparda.engine.weights import Weights

SHARES = ("recall", "recall_oracle", "mass", "mass_free", "far", "absent")
"""Fields of ``calibrate.quality.Recall`` that are shares of a whole."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Of one choice on one text, by share and layer: what was caught, and of how much; sums over heads and queries.

    ``layers``: those in which the selector chooses. Where ``sparse`` or nothing chooses in its place, as in the first
    ``lookahead`` layers, or where a layer that shares its choice makes it, nothing is counted.
    """

    choice: Choice
    layers: tuple[int, ...]
    caught: Mapping[str, tuple[float, ...]]
    of: Mapping[str, tuple[float, ...]]


class _Target:
    """A layer's ranks under ``sparse`` and the oracle, without the first query, which has no step before it."""

    def __init__(self, view: View) -> None:
        self.grid, self.mass = view.grid, view.mass[:, 1:]
        self.forced, self.far = self.grid.forced[1:], self.grid.distance[1:] > FAR
        self.free = self.grid.existing[1:] & ~self.forced
        ranks = ranks_of(view.sparse, self.grid)
        self.sparse, self.before = ranks[:, 1:], ranks[:, :-1]
        self.oracle = ranks_of(view.mass, self.grid)[:, 1:]

    def shares(self, ranks: Tensor, top_k: int) -> Tensor:
        """Fp32 [2, SHARES]: what the blocks of rank below ``top_k`` catch, and of how much."""
        chosen = ranks < top_k
        wanted = (self.sparse < top_k) & self.free
        best = (self.oracle < top_k) & self.free
        absent = wanted & (self.before >= top_k)
        free = self.mass * self.free
        whole = [wanted.sum(), best.sum(), self.mass.sum(), free.sum(), (wanted & self.far).sum(), absent.sum()]
        caught = [(wanted & chosen).sum(), (best & chosen).sum(), (self.mass * chosen).sum(), (free * chosen).sum()]
        caught += [(wanted & self.far & chosen).sum(), (absent & chosen).sum()]
        return torch.stack([torch.stack([x.float() for x in row]) for row in (caught, whole)])


def tallies(
    weights: Weights, spec: SparseSpec, prefix: Prefix, ids: Tensor, choices: Sequence[Choice], materials: Materials
) -> list[Tally]:
    """What each choice catches for the tokens ``ids`` int64 [Q + 1] after ``prefix``; the first gives the step before.

    Raises SpardaError for a top-k that leaves no free block, and as ``make_selector`` does.
    """
    for choice in choices:
        if choice.top_k <= spec.forced:
            raise SpardaError(
                f"top_k {choice.top_k}: {spec.forced} blocks are always chosen, which leaves none to choose; give more."
            )
    families = _families(choices)
    selectors = [make_selector(family[0], materials) for family in families]
    found: dict[Choice, list[tuple[int, list[list[float]]]]] = {choice: [] for choice in choices}

    def watch(view: View) -> None:
        target = _Target(view)
        counted, sums = [], []
        for family, selector in zip(families, selectors, strict=True):
            ranks = _ranks(selector, view)
            if selector.chooses(view.layer):
                counted += family
                sums += [target.shares(ranks, choice.top_k) for choice in family]
        # One transfer a layer: a device is not waited for after each sum.
        for choice, shares in zip(counted, torch.stack(sums).tolist() if sums else [], strict=True):
            found[choice].append((view.layer, shares))

    run_window(weights, spec, prefix, ids, watch, loss=False)
    return [_tally(choice, rows) for choice, rows in found.items()]


def ranks_of(scores: Tensor, grid: Grid) -> Tensor:
    """Int64 [H, Q, M]: how many blocks come before each, forced ones first."""
    order = ranked(grid.with_forced(scores), grid.blocks)
    places = torch.arange(grid.blocks, device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def _ranks(selector: Selector, view: View) -> Tensor:
    ranks = ranks_of(selector.scores(view), view.grid)
    if isinstance(selector, Forced):
        ranks = ranks.masked_fill(~view.grid.forced, view.grid.blocks)
    return ranks[:, 1:]


def _families(choices: Sequence[Choice]) -> list[list[Choice]]:
    """Choices that one order of blocks serves, whatever their top-k."""
    families: dict[Choice, list[Choice]] = {}
    for choice in dict.fromkeys(choices):
        key = choice if choice.selector == "distance" else replace(choice, top_k=0)
        families.setdefault(key, []).append(choice)
    return list(families.values())


def _tally(choice: Choice, rows: Sequence[tuple[int, list[list[float]]]]) -> Tally:
    if not rows:
        raise SpardaError(f"{choice.label}: the model has no layer that it would choose in; leave it out.")
    caught, of = ({n: tuple(s[k][i] for _, s in rows) for i, n in enumerate(SHARES)} for k in (0, 1))
    return Tally(choice, tuple(layer for layer, _ in rows), caught, of)


def recall_row(documents: Sequence[Tally], sparse: Sequence[Tally] = ()) -> Recall:
    """The row of one choice, of its tallies on all documents.

    ``sparse``: those of ``sparse`` at the same top-k, which stands in for the selector in the layers that it does not
    choose in, so that attention and recall of the oracle are over the same layers for all.
    """
    whole = [_filled(own, other) for own, other in zip(documents, sparse, strict=True)] if sparse else documents
    by_document = {name: tuple(_share([d], name) for d in documents) for name in ("recall", "absent")}
    by_document["mass"] = tuple(_share([d], "mass") for d in whole)
    return Recall(
        documents[0].choice,
        recall=_share(documents, "recall"),
        recall_oracle=_share(whole, "recall_oracle"),
        mass=_share(whole, "mass"),
        mass_free=_share(whole, "mass_free"),
        far=_share(documents, "far"),
        absent=_share(documents, "absent"),
        layers=_over_layers(documents, "recall"),
        documents=spread(by_document["recall"]),
        mass_layers=_over_layers(whole, "mass"),
        by_document=by_document,
    )


EVERYWHERE = ("recall_oracle", "mass", "mass_free")
"""Shares that are told over all layers."""


def _filled(own: Tally, sparse: Tally) -> Tally:
    """``EVERYWHERE`` of all layers: those of ``sparse`` where the selector does not choose."""

    def of_all(
        kind: Mapping[str, tuple[float, ...]], others: Mapping[str, tuple[float, ...]], name: str
    ) -> list[float]:
        at = dict(zip(own.layers, kind[name], strict=True))
        return [at.get(layer, v) for layer, v in zip(sparse.layers, others[name], strict=True)]

    caught = {name: tuple(of_all(own.caught, sparse.caught, name)) for name in EVERYWHERE}
    of = {name: tuple(of_all(own.of, sparse.of, name)) for name in EVERYWHERE}
    return Tally(own.choice, sparse.layers, caught, of)


def _share(documents: Sequence[Tally], name: str, only: slice = slice(None)) -> float:
    caught, of = (sum(sum(getattr(d, kind)[name][only]) for d in documents) for kind in ("caught", "of"))
    # Of nothing all is caught: a short text has no far blocks.
    return float(caught / of) if of else 1.0


def _over_layers(documents: Sequence[Tally], name: str) -> Spread:
    return spread([_share(documents, name, slice(i, i + 1)) for i in range(len(documents[0].layers))])


def spread(values: Sequence[float]) -> Spread:
    """Mean, least, middle and most."""
    return Spread(fmean(values), min(values), median(values), max(values))
