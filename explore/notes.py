"""What a reader of a CTA table must know beside its numbers: what they rest on, what hardware said, what is short."""

from __future__ import annotations

from statistics import median

from sparda.explore.cells import NOT_RUN, TOLERANCE
from sparda.explore.table import CtaTable, TableRow
from sparda.explore.text import misses, percent, tokens_label

UNFIT_SHOWN = 3


def table_notes(table: CtaTable) -> list[str]:
    """What a reader must know beside the numbers, one sentence or two each."""
    notes = [
        f"Profile {table.label}, {table.gpu}, model {table.model}, policy {table.policy}. {_band_note(table)}",
        f"CTAs: the fewest within {percent(table.noise)} (run-to-run spread) of the fastest. gain: predicted "
        "tokens/s over the public launcher's CTA count for an H100 (16 up to batch 16, else 32), all else equal.",
        *_confirmed_notes(table),
        *unfit_notes(table),
        *quality_notes(table),
    ]
    if any(not r.inside for r in table.rows):
        notes.append("? outside the measured range: an extrapolation.")
    return notes


def quality_notes(table: CtaTable) -> list[str]:
    """What misses and quality rest on, and which cells break which floor."""
    notes = []
    if table.selection:
        notes.append(f"miss follows from slots, the resident blocks: {table.selection}.")
    if not table.rated:
        return notes
    tiers = dict.fromkeys(r.quality.tier for r in table.rows if r.quality)
    choices = dict.fromkeys(r.quality.choice for r in table.rows if r.quality)
    notes.append(
        f"ppl: perplexity over full attention's, less 1, of the choices {', '.join(choices)}; {'; '.join(tiers)}."
    )
    unknown = dict.fromkeys(r.quality.reason for r in table.rows if r.quality and r.quality.reason)
    notes += [f"-: not known, {reason}." for reason in unknown]
    broken = dict.fromkeys(r.floor_reason for r in table.rows if r.floor_reason)
    notes += [f"! no configuration of the cell keeps the floors; the nearest to them: {reason}." for reason in broken]
    return notes


def _band_note(table: CtaTable) -> str:
    if table.band is None:
        return "low and high: the error of these predictions is not known, no step was held out."
    error = f"-/+ {percent(table.band)}, the 90th percentile of held-out step errors."
    # Where quality or residents take the room of the two columns, the sentence stands for them.
    shown = not table.rated and not table.selection
    return f"low and high: predicted tokens/s {error}" if shown else f"Predicted tokens/s are known to {error}"


def _confirmed_notes(table: CtaTable) -> list[str]:
    """What hardware said, contradictions by name."""
    yes, no, dash = table.confirmed
    found = [
        f"confirmed: {yes} yes (measured within {percent(TOLERANCE, 0)} of the best measured configuration), {no} no "
        f"(contradicted), {dash} - (not measured as chosen)."
    ]
    errors = table.gain_errors
    if errors:
        found[0] += (
            " Measured gains stand beside it; predicted ones are off by "
            f"{100 * median(errors):.1f} points in the median, {100 * errors[-1]:.1f} at most."
        )
    if no:
        cells = [_cell_label(r) for r in table.rows if r.confirmed == "no"]
        found.append(f"Contradicted: {'; '.join(cells)}. `sparda validate --verdicts` says what was faster.")
    return found


def unfit_notes(table: CtaTable) -> list[str]:
    """Which memory is too small for which cells, and by how much."""
    unfit: dict[str, str] = {}
    for r in table.rows:
        if not r.fits:
            unfit.setdefault(f"batch {r.batch} at {tokens_label(r.context_tokens)}", r.limit_reason)
    if not unfit:
        return []
    shown = [f"{cell}: {reason}" for cell, reason in list(unfit.items())[:UNFIT_SHOWN]]
    more = f" and {len(unfit) - UNFIT_SHOWN} more" if len(unfit) > UNFIT_SHOWN else ""
    note = f"* does not fit this machine ({'; '.join(shown)}{more}); the speed holds where there is enough memory."
    if any(not r.fits and r.confirmed != NOT_RUN for r in table.rows):
        note += " Measured there with sequences that share blocks of the host pool."
    return [note]


def _cell_label(r: TableRow) -> str:
    return f"{tokens_label(r.context_tokens)} batch {r.batch} {misses(r.miss_rate)}"
