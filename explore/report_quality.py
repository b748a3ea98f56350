"""The section of a report about quality: what it was measured on, what it answers, and what speed costs here."""

from __future__ import annotations

from sparda.calibrate.quality import QualityProfile, quality_names
from sparda.explore import report_quality_plots as plots
from sparda.explore.headline import quality_lines
from sparda.explore.predict import Prediction
from sparda.explore.quality import tier_of
from sparda.explore.quality_answers import CRITERION, answers
from sparda.explore.quality_compare import main_top_k
from sparda.explore.quality_text import MEASURE
from sparda.explore.report_data import Report
from sparda.explore.report_page import Html, count, figure, lines, paragraph, plot, table, tag
from sparda.explore.text import number, percent, tokens_label


def quality(r: Report) -> Html:
    """Tier, the scenario's own trade, answers, curves; without a profile how to come by one."""
    if r.quality is None:
        return _without()
    best = r.answer.choice.best
    return lines(
        [
            paragraph(tag("b", f"{_tier(r, r.quality)}."), f" {_measured_on(r.quality)}", kind="lead"),
            *([paragraph(f"Misses by resident blocks: {r.table.selection}.")] if r.table.selection else []),
            *(paragraph(line) for line in (quality_lines(best.quality) if best.quality else [])),
            *(_trade(r, best) if r.scenario.quality else []),
            tag("h3", "What was measured says"),
            tag("ul", *(tag("li", sentence) for sentence in answers(r.quality))),
            paragraph(CRITERION, kind="note"),
            _curves(r.quality),
        ]
    )


def _without() -> Html:
    names = quality_names()
    known = f" Or take what was measured of another model, with quality=NAME: {', '.join(names)}." if names else ""
    return paragraph(
        f"The scenario names no quality profile, so nothing is known of what a choice of blocks costs. {MEASURE}{known}"
    )


def _tier(r: Report, q: QualityProfile) -> str:
    text = tier_of(q, r.scenario.model_name, r.scenario.workload.context_tokens)
    return text[0].upper() + text[1:]


def _measured_on(q: QualityProfile) -> str:
    return (
        f"Quality profile {q.name}: {count(len(q.documents), 'document')}, {q.blocks} blocks of {q.spec.block} tokens, "
        f"{q.spec.forced} of them always chosen."
    )


def _trade(r: Report, best: Prediction) -> list[Html]:
    """Speed against perplexity on the scenario's own workload, over every top-k and lookahead that was measured."""
    w = best.workload
    where = f"batch {w.batch}, {tokens_label(w.context_tokens)} tokens, {r.misses(w.miss_rate)}"
    if not any(p.quality and p.quality.ppl_increase is not None for p in r.trade):
        return [paragraph(f"Speed against perplexity, {where}: no perplexity is known of any configuration here.")]
    headers = ["perplexity", "recall", "tokens/s", "low", "high", "top-k", "lookahead", "CTAs", "resident", ""]
    return [
        figure(
            plot(plots.trade(r.trade, best), "trade"),
            "Speed against quality",
            f"Each mark the choice at one increase of perplexity that no smaller increase outruns: {where}. Labels: "
            "top-k and lookahead. Hollow: outside what was measured. Ringed: the answer of this report.",
        ),
        table(headers, [_trade_row(p) for p in r.trade]),
    ]


def _trade_row(p: Prediction) -> list[str]:
    recall, ppl = (p.quality.recall, p.quality.ppl_increase) if p.quality else (None, None)
    remarks = [p.broken.reason, "" if p.fits else "does not fit in memory", "" if p.inside else "extrapolation"]
    c = p.config
    return [
        "-" if ppl is None else percent(ppl, sign=True),
        "-" if recall is None else percent(recall),
        f"{p.tokens_per_s:,.0f}",
        number(p.low, ",.0f"),
        number(p.high, ",.0f"),
        *map(str, (c.top_k, c.lookahead, c.prefetch_ctas, c.slots)),
        "; ".join(remark for remark in remarks if remark),
    ]


def _curves(q: QualityProfile) -> Html:
    """A panel for each kind of row that the profile has."""
    panels = []
    if q.recalls:
        text = "Of the free blocks that sparse chooses. Dashes: layers of lookahead."
        panels.append(figure(plot(plots.recalls(q), "recall"), "Recall by top-k", text))
    if q.perplexities:
        text = "Per token, over full attention's, bars one standard error."
        panels.append(figure(plot(plots.nats(q), "nats"), "Nats by top-k", text))
    if q.dynamics:
        text = "Of the free picks of sparse, a step; forced blocks hold slots and never miss."
        panels.append(figure(plot(plots.misses(q), "misses"), "Misses by resident blocks", text))
    depths = plots.depths(q)
    if depths is not None:
        text = f"Nats of an answer's token by where the fact lies, top-k {main_top_k(q)}, the mean over contexts."
        panels.append(figure(plot(depths, "needle"), "What a needle costs", text))
    return tag("div", *panels, class_="curves")
