"""What selectors are made of, and what a choice still lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from sparda.calibrate.quality import Choice
from sparda.engine.config import Config
from sparda.engine.forecast_file import Forecast
from sparda.engine.weights import ScorerWeights, Weights

SHARING_LAYER = Config().score_layer
"""The layer that chooses for all later ones, of ``early`` and ``shallow``."""

REFRESH_STEPS = Config().refresh_steps

LOOKING_AHEAD = ("forecast", "untrained", "proxy", "infinigen", "shared")
"""Selectors that have a lookahead."""


@dataclass(frozen=True)
class Materials:
    """What selectors are made of.

    ``forecasts``: by (lookahead, heads per KV head); rows [H * heads * D, d_model], KV head 0's heads first. ``basis``:
    InfiniGen's directions, as ``Prefix`` has them. ``distances``: by top-k, how often each distance from the newest
    block is chosen, [L, H, M] or longer. ``refresh``: steps after which ``shallow`` scores again.
    """

    weights: Weights
    forecasts: Mapping[tuple[int, int], Forecast] = field(default_factory=dict)
    scorer: ScorerWeights | None = None
    basis: Tensor | None = None
    distances: Mapping[int, Tensor] = field(default_factory=dict)
    seed: int = 0
    sharing_layer: int = SHARING_LAYER
    refresh: int = REFRESH_STEPS
    rows: dict[tuple[str, int, int, int], Tensor] = field(default_factory=dict)
    """Rows of selection queries that were made ready on the device, for the next run."""

    def of_text(self, basis: Tensor, distances: Mapping[int, Tensor]) -> Materials:
        """The same for another text."""
        return replace(self, basis=basis, distances=distances)


def missing(choice: Choice, m: Materials) -> str:
    """What a choice needs and has not been given; empty where nothing is missing."""
    if choice.selector in LOOKING_AHEAD and choice.lookahead < 1:
        return "a lookahead of at least 1"
    wanted = {
        "forecast": ((choice.lookahead, choice.heads) in m.forecasts, "a Forecast trained for this lookahead"),
        "shallow": (m.scorer is not None, "a trained scorer"),
        "infinigen": (m.basis is not None, "directions of partial keys"),
        "distance": (choice.top_k in m.distances, "other documents' choices at the same top-k"),
    }
    there, what = wanted.get(choice.selector, (True, ""))
    return "" if there else what
