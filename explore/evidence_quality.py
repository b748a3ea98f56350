"""Figures of quality, from the shipped quality profile, and of training a Forecast, from a profile's rows."""

from __future__ import annotations

from sparda.calibrate.quality import Choice, Dynamics, QualityProfile, load_quality, quality_names
from sparda.calibrate.store import Row
from sparda.explore.figures import Figure, Rows
from sparda.explore.quality import ppl_increase
from sparda.explore.text import count

SHIPPED = "smollm2-135m.measured"
"""The quality profile that the figures are of."""
TOP_K = 16
RECALLS = {
    **{f"forecast.d{d}": Choice("forecast", TOP_K, d, 1) for d in (1, 2, 3, 4)},
    "infinigen.d1": Choice("infinigen", TOP_K, 1),
    "proxy.d1": Choice("proxy", TOP_K, 1),
    "previous": Choice("previous", TOP_K),
    "shared": Choice("shared", TOP_K, 1),
}
LOSSES = {
    "forecast.d1": RECALLS["forecast.d1"],
    "forecast.d4": RECALLS["forecast.d4"],
    "infinigen.d1": RECALLS["infinigen.d1"],
    "proxy.d1": RECALLS["proxy.d1"],
    "previous": RECALLS["previous"],
    "shared": RECALLS["shared"],
    "sparse": Choice("sparse", TOP_K),
    "recency": Choice("recency", TOP_K),
    "oracle": Choice("oracle", TOP_K),
}
SLOTS = (1.0, 2.0, 4.0)
"""Resident slots as multiples of top-k, as ``Dynamics.at_top_k`` counts them."""
TRAINED = ("minicpm4.1-8b", 65536)
"""Model and tokens of the training step that is claimed."""


def shipped_quality() -> QualityProfile | None:
    """The quality profile that the figures are of; None while it does not come with the package."""
    return load_quality(SHIPPED) if SHIPPED in quality_names() else None


def quality_figures(quality: QualityProfile | None) -> dict[str, Figure]:
    """Figures of one quality profile; of None each is without a value."""
    figures = {f"quality.recall.{name}.k{TOP_K}": _recall(quality, choice) for name, choice in RECALLS.items()}
    for name, choice in LOSSES.items():
        figures[f"quality.ppl_increase.{name}.k{TOP_K}"] = _perplexity(quality, choice)
    for times in SLOTS:
        figures[f"quality.miss_rate.{times:g}x"] = _misses(quality, times)
    return {**figures, "quality.generator.max_gap": _generator(quality)}


def training_figures(known: Rows) -> dict[str, Figure]:
    """What one step of training a Forecast for a large model takes."""
    model, tokens = TRAINED
    rows = [
        r
        for r in known.profile.store.latest("training")
        if r.number("tokens") == tokens and known.sessions.get(r.session, {}).get("model") == model
    ]
    # Several ways of the same step may have been measured: both figures are of the quickest one.
    best = min(rows, key=lambda r: r.values["seconds_per_step"], default=None)
    text = f"one step of training a Forecast: {model}, {tokens} tokens" + (f", {_conditions(best)}" if best else "")

    def figure(name: str, unit: str) -> Figure:
        value = best.values.get(name) if best else None
        return known.figure(value, unit, None, False, [best] if best else [], text)

    return {
        "train.seconds_per_step.8b_64k": figure("seconds_per_step", "s"),
        "train.peak_gib.8b_64k": figure("peak_gib", "GiB"),
    }


def _conditions(row: Row) -> str:
    return ", ".join(f"{k} {v}" for k, v in sorted(row.case.items()) if k != "tokens")


def _figure(
    quality: QualityProfile | None, value: float | None, unit: str, higher: bool, what: str, target: float | None = None
) -> Figure:
    """The figure and its conditions: model, block, context, documents, and what was chosen by."""
    if quality is None or value is None:
        return Figure(None, unit, target, higher, 0, f"{what}: no rows", "no rows")
    q, facts = quality, quality.provenance
    text = (
        f"{what}; {q.model}, blocks of {q.spec.block}, {q.context_tokens} tokens, {count(len(q.documents), 'document')}"
    )
    measured = ", ".join(str(facts[k]) for k in ("device", "utc") if k in facts)
    return Figure(value, unit, target, higher, 1, text, f"{measured or 'unknown machine'}: {q.name}")


def _recall(quality: QualityProfile | None, choice: Choice) -> Figure:
    row = quality.recall_of(choice) if quality else None
    about = f"{choice.label}, top-k {choice.top_k}: share of the free blocks of sparse"
    return _figure(quality, row.recall if row else None, "share of blocks", True, about)


def _perplexity(quality: QualityProfile | None, choice: Choice) -> Figure:
    row = quality.perplexity_of(choice) if quality else None
    about = f"{choice.label}, top-k {choice.top_k}, all layers: perplexity over full attention's, less 1"
    if row:
        about += f"; standard error {ppl_increase(row.nats + row.standard_error) - ppl_increase(row.nats):.1%}"
    return _figure(quality, ppl_increase(row.nats) if row else None, "share of perplexity", False, about)


def _misses(quality: QualityProfile | None, times: float) -> Figure:
    row = quality.dynamics_of(TOP_K) if quality else None
    about = f"free picks of sparse missed a step, top-k {TOP_K}, resident slots for {times:g} times as many blocks"
    return _figure(quality, missed_at(row, times) if row else None, "share of free picks", False, about)


def missed_at(row: Dynamics, times: float) -> float | None:
    """Misses as a share of the free picks with so many times top-k as slots; None where that was not measured."""
    found = next((s for key, s in row.at_top_k.items() if float(key) == times), None)
    return found.mean if found else None


def _generator(quality: QualityProfile | None) -> Figure:
    value = quality.conditions.get("generator_max_gap") if quality else None
    about = "largest gap between the misses of recorded selections and of generated ones, any number of slots"
    known = float(value) if isinstance(value, int | float) else None
    return _figure(quality, known, "share of free picks", False, about)
