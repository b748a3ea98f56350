"""What a choice of blocks adds to a model's loss, against full attention on the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sparda.calibrate.measure.quality.materials import Materials
from sparda.calibrate.measure.quality.selectors import chooser
from sparda.calibrate.measure.quality.window import Prefix, run_window
from sparda.calibrate.quality import Choice, Perplexity
from sparda.engine.shapes import SparseSpec
from sparda.engine.weights import Weights

RUN = 64
"""Tokens whose losses are kept as one mean: losses of neighbours depend on each other, those of runs hardly."""

DRAWS = 2000


def run_means(
    weights: Weights, spec: SparseSpec, prefix: Prefix, ids: Tensor, choice: Choice | None, materials: Materials
) -> list[float]:
    """Mean loss, nats per token, of each run of ``RUN`` tokens of the window ``ids`` [Q]; no choice: full attention.

    The window's first token is not predicted. A rest shorter than half a run joins the run before it.
    """
    choose = chooser(choice, materials) if choice else lambda view: None
    nats = run_window(weights, spec, prefix, ids, choose).nats.double()
    runs = max(1, round(len(nats) / RUN))
    return [float(part.mean()) for part in nats.tensor_split([i * RUN for i in range(1, runs)])]


def perplexity_row(
    choice: Choice, dense: Mapping[str, Sequence[float]], sparse: Mapping[str, Sequence[float]]
) -> Perplexity:
    """The row of one choice, of the run means of each document, by name, with full attention and with the choice.

    ``nats``: the mean over documents, each as heavy as any other. Standard error: see ``bootstrap_error``.
    """
    added = [np.subtract(sparse[name], dense[name]) for name in sparse]
    documents = {name: float(runs.mean()) for name, runs in zip(sparse, added, strict=True)}
    return Perplexity(choice, float(np.mean(list(documents.values()))), bootstrap_error(added), documents)


def bootstrap_error(added: Sequence[npt.NDArray[np.float64]], seed: int = 0) -> float:
    """Standard error of the mean over documents of the means of paired differences, by a bootstrap in two stages.

    Documents are drawn with replacement, then runs of ``RUN`` tokens within each: both which texts were read and which
    tokens they have is chance. With one document only the second remains, and the error says nothing of other texts.
    """
    generator = np.random.default_rng(seed)
    drawn = np.stack(
        [runs[generator.integers(len(runs), size=(DRAWS, len(added), len(runs)))].mean(-1) for runs in added]
    )
    picked = generator.integers(len(added), size=(DRAWS, len(added)))
    means = drawn[picked, np.arange(DRAWS)[:, None], np.arange(len(added))].mean(-1)
    return float(means.std())
