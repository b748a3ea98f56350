"""A small quality profile made by hand: round numbers, so that a test can say what comes of them."""

from __future__ import annotations

from pathlib import Path

from sparda.calibrate.quality import (
    Choice,
    Document,
    Dynamics,
    Perplexity,
    QualityProfile,
    Recall,
    Retrieval,
    Spread,
    write_quality,
)
from sparda.engine.dynamics.curve import MissCurve
from sparda.engine.shapes import SparseSpec

NAME = "tiny.measured"
MODEL = "tiny-1b"
TOKENS = 8192
"""128 blocks: a top-k of 16 is an eighth of the context, as one of 256 is of 131072 tokens."""
RECALL_TOP_KS = (4, 8, 16, 32, 64)
PPL_TOP_KS = (8, 16, 32, 64)

RECALLS = {
    ("oracle", 0, 0): 0.80,
    ("sparse", 0, 0): 1.00,
    ("forecast", 1, 1): 0.88,
    ("forecast", 2, 1): 0.86,
    ("forecast", 3, 1): 0.85,
    ("forecast", 4, 1): 0.84,
    ("forecast", 1, 2): 0.89,
    ("untrained", 1, 1): 0.83,
    ("proxy", 1, 0): 0.87,
    ("infinigen", 1, 0): 0.85,
    ("previous", 0, 0): 0.81,
    ("shared", 1, 0): 0.62,
    ("shallow", 0, 0): 0.60,
    ("recency", 0, 0): 0.69,
    ("random", 0, 0): 0.12,
}
"""Recall at a top-k of 16 by selector, lookahead and heads; a doubling of top-k adds 0.02, a halving takes it away."""
NATS = {
    ("oracle", 0, 0): 0.013,
    ("sparse", 0, 0): 0.050,
    ("forecast", 1, 1): 0.058,
    ("forecast", 2, 1): 0.062,
    ("forecast", 4, 1): 0.090,
    ("forecast", 1, 2): 0.057,
    ("infinigen", 1, 0): 0.056,
    ("previous", 0, 0): 0.068,
    ("shared", 1, 0): 0.054,
    ("shallow", 0, 0): 0.049,
    ("recency", 0, 0): 0.048,
}
"""Nats at 16; twice the top-k has half of them. The standard error is 0.004 throughout."""
ERROR = 0.004
DOCUMENTS = ("novel", "manual", "code", "essay")


def recall_of(key: tuple[str, int, int], top_k: int) -> float:
    steps = {4: -2, 8: -1, 16: 0, 32: 1, 64: 2}[top_k]
    return min(1.0, RECALLS[key] + 0.02 * steps) if key[0] != "sparse" else 1.0


def nats_of(key: tuple[str, int, int], top_k: int) -> float:
    return NATS[key] * 16 / top_k


APART = (-0.01, -0.003, 0.003, 0.01)
"""What documents differ by."""


def _choice(key: tuple[str, int, int], top_k: int) -> Choice:
    return Choice(key[0], top_k, key[1], key[2])


def _recall(key: tuple[str, int, int], top_k: int) -> Recall:
    r = recall_of(key, top_k)
    spread = Spread(r, r - 0.01, r, min(1.0, r + 0.01))
    # Each choice is best on another document, so that differences have an error.
    turn = (len(key[0]) + key[1] + 2 * key[2]) % len(APART)
    apart = APART[turn:] + APART[:turn]
    by = {name: tuple(v + x for x in apart) for name, v in (("recall", r), ("mass", r - 0.05), ("absent", r - 0.25))}
    return Recall(_choice(key, top_k), r, r - 0.1, r - 0.05, r - 0.3, r - 0.2, r - 0.25, spread, spread, spread, by)


def _perplexity(key: tuple[str, int, int], top_k: int) -> Perplexity:
    nats = nats_of(key, top_k)
    return Perplexity(_choice(key, top_k), nats, ERROR, dict.fromkeys(DOCUMENTS, nats))


CURVE = MissCurve((1.0, 1.5, 2.0, 4.0), (0.18, 0.05, 0.02, 0.005))


def _dynamics(top_k: int) -> Dynamics:
    reuse = Spread(0.82, 0.7, 0.82, 0.9)
    at = {str(r): Spread(m, m / 2, m, m * 2) for r, m in zip(CURVE.ratio, CURVE.missed, strict=True)}
    steps = {str(r): (m, 1.3 * m, 1.5 * m, 2 * m) for r, m in zip(CURVE.ratio, CURVE.missed, strict=True)}
    return Dynamics(top_k, 3, reuse, {"1": 0.82, "16": 0.74}, CURVE, at, at, steps, 1.6, 0.5, 0.62)


def _retrievals() -> tuple[Retrieval, ...]:
    found = []
    for selector, share in (("oracle", 0.9), ("sparse", 0.8), ("forecast", 0.75), ("recency", 0.2)):
        ahead, heads = (1, 1) if selector == "forecast" else (0, 0)
        for depth, factor in ((-1.0, 1.0), (0.0, 1.0), (0.5, 0.9), (1.0, 1.1)):
            choice = Choice(selector, 16, ahead, heads)
            found.append(Retrieval(choice, "needle", 4096, depth, 40, share * factor, 1 - share, 0.95, 0.05))
    found.append(Retrieval(Choice("sparse", 16), "multihop", 4096, -1.0, 24, 0.25, 2.0, 0.375, 1.5))
    return tuple(found)


def tiny() -> QualityProfile:
    """Everything that a profile may hold, of a model that nobody has."""
    return QualityProfile(
        name=NAME,
        model=MODEL,
        context_tokens=TOKENS,
        spec=SparseSpec(init_blocks=1, local_blocks=1),
        documents=tuple(Document(d, d, TOKENS, "0" * 64, 3.0) for d in DOCUMENTS),
        recalls=tuple(_recall(key, k) for key in RECALLS for k in RECALL_TOP_KS),
        perplexities=tuple(_perplexity(key, k) for key in NATS for k in PPL_TOP_KS),
        retrievals=_retrievals(),
        dynamics=tuple(_dynamics(k) for k in (8, 16, 32)),
        conditions={"generator_max_gap": 0.07},
        training={"steps": 300},
        provenance={"device": "NVIDIA Fake $1", "utc": "2020-01-01T00:00:00Z", "commit": "abc"},
    )


def written(folder: Path) -> str:
    """The folder of ``tiny`` on disk, as a user would name it."""
    path = folder / NAME
    path.mkdir()
    write_quality(path / "quality.json", tiny())
    return str(path)
