"""What a search found, as a reader sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparda.explore.front import SPEED_AND_BLOCKS, SPEED_AND_PPL, SPEED_AND_RECALL
from sparda.explore.headline import quality_lines
from sparda.explore.predict import Prediction
from sparda.explore.space import Choice
from sparda.explore.study import Finding
from sparda.explore.text import columns, count, percent, wrapped

MARKS = "!: breaks a floor of quality. *: does not fit. ?: outside the measured range."
TITLES = {
    SPEED_AND_BLOCKS: "Tokens/s for each number of blocks read:",
    SPEED_AND_RECALL: "Tokens/s for each recall:",
    SPEED_AND_PPL: "Tokens/s for each increase of perplexity:",
}


def lines_of(predictions: Sequence[Prediction]) -> str:
    """Configurations and what is predicted of them; with a quality profile recall and perplexity take the room of the
    step's time, and of words.
    """
    rated = any(p.quality for p in predictions)
    headers = ["CTAs", "warps", "stages", "ahead", "top-k", "slots"]
    rows = []
    for p in predictions:
        c = p.config
        knobs = [c.prefetch_ctas, c.prefetch_warps, c.prefetch_stages, c.lookahead, c.top_k, c.slots]
        rows.append([*map(str, knobs), *(_rated(p) if rated else _plain(p))])
    more = ["tokens/s", "recall", "ppl", "ok"] if rated else ["ms", "tokens/s", "fits", "in range"]
    return columns([*headers, *more], rows, 0)


def _plain(p: Prediction) -> list[str]:
    sure = ("yes" if p.fits else "no", "yes" if p.inside else "no")
    return [f"{p.step_us / 1e3:.3f}", f"{p.tokens_per_s:.0f}", *sure]


def _rated(p: Prediction) -> list[str]:
    recall, ppl = (p.quality.recall, p.quality.ppl_increase) if p.quality else (None, None)
    marks = ("!" if p.broken.reason else "") + ("" if p.fits else "*") + ("" if p.inside else "?")
    shown = ["-" if recall is None else percent(recall), "-" if ppl is None else percent(ppl, sign=True)]
    return [f"{p.tokens_per_s:.0f}", *shown, marks or "yes"]


@dataclass(frozen=True, slots=True)
class Found:
    """All that a search found. ``floors``: of quality, that were set; ``front``: of the enumeration."""

    label: str
    model: str
    choice: Choice
    public: Prediction
    finding: Finding | None
    objective: str
    front: tuple[Prediction, ...]
    misses_from: str
    floors: tuple[str, ...]


def text_of(f: Found) -> str:
    """The best configuration, the public rule's, the ties, the front, and what a study found."""
    choice, public = f.choice, f.public
    p = choice.best
    w = p.workload
    shown, kept = choice.ties[:12], " and keep the floors" if f.floors else ""
    lines = [
        wrapped(
            f"{f.model}, batch {w.batch}, {w.context_tokens} tokens, {percent(w.miss_rate)} misses. Profile {f.label}."
        ),
        *([wrapped(f"Misses by resident blocks: {f.misses_from}.")] if f.misses_from else []),
        f"{choice.considered} configurations enumerated, {choice.fitting} fit in memory{kept}.",
        f"Best: {p.step_us / 1e3:.3f} ms, {p.tokens_per_s:.0f} tokens/s ({_band(p)}).",
        *(
            [f"GPU memory {p.gpu_gib:.1f} GiB, {p.config.slots} blocks resident."]
            if f.misses_from and p.config.path
            else []
        ),
        wrapped(
            f"The public rule's {count(public.config.prefetch_ctas, 'CTA')}, all else as the scenario has it: "
            f"{public.step_us / 1e3:.3f} ms, {public.tokens_per_s:.0f} tokens/s; the best is "
            f"{percent(p.tokens_per_s / public.tokens_per_s - 1, sign=True)}."
        ),
        *(wrapped(line) for line in (quality_lines(p.quality) if p.quality else [])),
        lines_of((p,)),
        *([MARKS] if p.quality else []),
        "",
        f"{len(choice.ties)} within {percent(choice.noise)} of the fastest, fewest CTAs first:",
        lines_of(shown),
    ]
    if len(shown) < len(choice.ties):
        lines.append(f"... and {len(choice.ties) - len(shown)} more (--json lists all)")
    if p.broken.reason:
        lines.append(wrapped(f"Nothing keeps the floors of quality; the nearest to them: {p.broken.reason}."))
    if not p.fits:
        lines.append(wrapped(f"Nothing fits: {p.limit_reason}. The speed holds where there is enough."))
    if not p.inside:
        lines.append(wrapped(f"Outside the measured range: {'; '.join(p.outside_reasons)}."))
    if f.front:
        lines += ["", *_front_lines(f.objective, f.front)]
    if f.finding:
        lines += ["", *_study_lines(f.finding)]
    return "\n".join(lines)


def _front_lines(objective: str, front: Sequence[Prediction]) -> list[str]:
    return [TITLES[objective], lines_of(front)]


def _band(p: Prediction) -> str:
    return "error unknown" if p.low is None or p.high is None else f"band {p.low:.0f} to {p.high:.0f}"


def _study_lines(finding: Finding) -> list[str]:
    best = finding.choice.best
    regret = "unknown" if finding.regret is None else percent(finding.regret, 2, sign=True)
    lines = [
        f"Optuna: {finding.trials} trials ({finding.new_trials} new, {finding.infeasible} infeasible), "
        f"{'not kept' if finding.storage == 'memory' else f'kept in {finding.storage}'}.",
        f"Best: {best.tokens_per_s:.0f} tokens/s; regret in step time against the enumeration {regret}.",
        lines_of((best,)),
    ]
    if finding.front:
        lines += ["", *_front_lines(finding.objective, finding.front)]
    return lines
