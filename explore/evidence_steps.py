"""Figures of measured steps: times, floors, the policies side by side, and tokens equal to another program's."""

from __future__ import annotations

from statistics import median

from sparda.calibrate.cases import config_of, workload_of
from sparda.calibrate.store import Row, grouped
from sparda.explore.crossover import Crossover, crossover, offload_speedup
from sparda.explore.figures import Figure, Rows
from sparda.explore.floor import floor_of
from sparda.explore.policies import comparison
from sparda.explore.text import count, tokens_label

STEPS = ((4, 0.06, 5.3), (16, 0.06, 6.5), (16, 0.12, 8.0), (32, 0.06, 8.4), (64, 0.03, 10.8), (64, 0.12, 31.8))
"""Batch, miss rate and target in ms at 131072 tokens. The last is 3 % above what the link takes alone."""
CONTEXTS = (32768, 131072)


def steps(known: Rows) -> dict[str, Figure]:
    """Step times of the stated cells, and how near all steps of sparda come to their floors."""
    found = {f"decode.step_ms.b{b}_m{100 * miss:02.0f}": _step_ms(known, b, miss, ms) for b, miss, ms in STEPS}
    return {**found, "decode.floor_share.median": _floor_share(known)}


def _step_ms(known: Rows, batch: int, miss_rate: float, target: float) -> Figure:
    """Smallest median step of the 128K workload, whatever the CTAs, warps and stages."""

    def belongs(row: Row) -> bool:
        c, w = config_of(row), workload_of(row)
        size = (w.batch, w.context_tokens) == (batch, 131072)
        near = abs(w.miss_rate - miss_rate) < 1e-6
        return near and size and (c.policy, c.top_k, c.lookahead, c.slots) == ("sparda", 96, 1, 96)

    rows = [r for r in [*known.steps, *known.validation] if belongs(r)]
    best = min(rows, key=lambda r: r.us, default=None)
    conditions = f"batch {batch}, 131072 tokens, {miss_rate:.0%} misses, top-k 96, lookahead 1"
    if best:
        conditions += f", {count(config_of(best).prefetch_ctas, 'CTA')}; median of {len(best.samples_us)} samples"
        if best.values.get("pool_aliased"):
            conditions += ", sequences share blocks of the host pool"
    return known.figure(best.us / 1e3 if best else None, "ms", target, False, rows, conditions)


def _floor_share(known: Rows) -> Figure:
    """Median over cells of the floor over the fastest step measured, at lookahead 1."""
    rows = [r for r in known.steps if (config_of(r).policy, config_of(r).lookahead) == ("sparda", 1) and r.us > 0]
    cells = grouped(rows, lambda r: (workload_of(r), config_of(r).top_k, config_of(r).slots))
    machine, shares = known.profile.machine, []
    for found in cells.values():
        best = min(found, key=lambda r: r.us)
        counted = best.values.get("misses_per_layer")
        floor = floor_of(known.shape, known.spec, workload_of(best), config_of(best), machine, counted)
        shares.append(floor.us / best.us)
    text = (
        f"floor over measured, {count(len(cells), 'cell')} of sparda at lookahead 1, each at its best CTAs; floor: the "
        f"larger of the plan's GPU memory bytes at {machine.hbm_gb_s:,.0f} GB/s and the blocks fetched at "
        f"{machine.link_h2d_gb_s:.1f} GB/s, the best rates measured"
    )
    return known.figure(median(shares) if shares else None, "share of the measured step", None, True, rows, text)


def compared(known: Rows) -> dict[str, Figure]:
    """The policies side by side: how many, the most that the Forecast gains, and from where on offloading wins."""
    rows = known.policies
    cells = comparison(known.profile).cells if rows else ()
    pair = offload_speedup(cells)
    gain, text = None, "no cell with both sparda and sparse"
    if pair:
        ours, theirs = pair
        gain = (theirs.step_us or 0.0) / (ours.step_us or 1.0)
        w = ours.workload
        text = (
            f"tokens/s of {ours.label} over sparse fetched on demand, the same cell; "
            f"most: batch {w.batch}, {w.context_tokens} tokens, {w.miss_rate:.0%} misses"
        )
    policies = sorted({config_of(r).policy for r in rows})
    figures = {
        "policies.count": known.figure(
            float(len(policies)) if rows else None, "policies", None, True, rows, ", ".join(policies) or "no rows"
        ),
        "speedup.sparda_over_offload.max": known.figure(gain, "times", None, True, rows, text),
    }
    for context in CONTEXTS:
        found = crossover(cells, context)
        here = [r for r in rows if workload_of(r).context_tokens == context]
        name = f"crossover.offload_wins.from_batch.{tokens_label(context).lower()}"
        value = None if found is None or found.from_batch is None else float(found.from_batch)
        figures[name] = known.figure(value, "sequences", None, False, here, _crossover_text(context, found))
    return figures


def _crossover_text(context: int, found: Crossover | None) -> str:
    if found is None:
        return f"{context} tokens: no rows of sparda"
    text = (
        f"{context} tokens; smallest measured batch from which on sparda (lookahead 1) decodes more tokens/s than "
        "sparse-resident and sparda-resident do at any batch that fits"
    )
    best = found.resident
    if best is None:
        return f"{text}: none of these was measured"
    text += f": {best.tokens_per_s:.0f}, {best.label} at batch {best.workload.batch}"
    if found.no_room_from is not None:
        text += f"; neither fits from batch {found.no_room_from} on"
    return text if found.from_batch else f"{text}; not exceeded at the largest measured batch"


def parity(known: Rows) -> dict[str, Figure]:
    """Tokens of a small real model compared with another program's: prompts, and tokens that differ."""
    rows = [r for r in known.parity if r.op == "smollm2"]
    prompts = {r.case.get("prompt") for r in rows}
    differ = sum(r.values.get("mismatches", 0.0) for r in rows)
    tokens = sum(r.values.get("compared", 0.0) for r in rows)
    policies = ", ".join(sorted({str(r.case.get("policy", "?")) for r in rows}))
    text = f"SmolLM2, {tokens:.0f} tokens compared; policies: {policies}" if rows else "no rows"
    return {
        "parity.smollm2.prompts": known.figure(float(len(prompts)) if rows else None, "prompts", 5, True, rows, text),
        "parity.smollm2.mismatches": known.figure(differ if rows else None, "tokens", 0, False, rows, text),
    }
