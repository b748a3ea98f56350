"""The comparison of policies as a reader sees it: tables of at most 80 columns, and answers in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from sparda.explore.crossover import Crossover, crossover, floor_share, lookahead_gains
from sparda.explore.policies import Cell, Comparison, Residency
from sparda.explore.text import GIB, columns, misses, percent, tokens_label, wrapped


def text_of(c: Comparison, batch: int, context: int, tokens: bool) -> str:
    """All of it: a table per context, one cell in detail, resident blocks, answers."""
    sections = [grid_text(c, at, rate, tokens) for at, rate in c.grids]
    marks = f"*: the best of its column. GiB: does not fit, the GPU memory it needs of {_gpu(c)} GiB. -: not measured."
    head = wrapped(f"Policies side by side, {c.model} on {c.machine.gpu}. Profile {c.profile}. {marks}")
    sections += [_detail(c, c.at(batch, context))]
    if c.residency:
        sections.append(_residency(c.residency))
    return "\n\n".join([head, *sections, "\n".join(map(wrapped, answers(c)))])


def _gpu(c: Comparison) -> str:
    return f"{c.machine.hbm_capacity_bytes / GIB:.0f}"


def grid_text(c: Comparison, context: int, rate: float, tokens: bool) -> str:
    """The table of one context and miss rate: a row per policy, a column per batch."""
    grid = c.grid(context, rate)
    best = {b: _best([row[b] for row in grid.values()]) for b in c.batches}
    rows = [[label, *(_entry(row[b], tokens, row[b] is best[b]) for b in c.batches)] for label, row in grid.items()]
    unit = "tokens/s" if tokens else "ms per step"
    title = f"{tokens_label(context)} tokens of context, {misses(rate)} misses: {unit} by batch"
    return f"{title}\n{columns(['policy', *map(str, c.batches)], rows)}"


def _best(cells: Sequence[Cell]) -> Cell | None:
    return min((c for c in cells if c.step_us), key=lambda c: c.step_us or 0.0, default=None)


def _entry(cell: Cell, tokens: bool, best: bool) -> str:
    if not cell.step_us:
        return "-" if cell.fits else f"{cell.gpu_gib:.0f} GiB"
    value = f"{cell.tokens_per_s:.0f}" if tokens else f"{cell.step_us / 1e3:.2f}"
    return value + ("*" if best else " ")


def _detail(c: Comparison, cells: Sequence[Cell]) -> str:
    w = cells[0].workload
    rows = [_detail_row(cell) for cell in cells]
    headers = ["policy", "tok/s", "ms", "floor", "HBM", "link", "GPU GiB", "pinned GiB"]
    m = c.machine
    notes = (
        "ms: per step, which is per token of each sequence. floor: share of the measured step that the slower of two "
        f"would take alone: the plan's GPU memory bytes at {m.hbm_gb_s:,.0f} GB/s, the blocks fetched at "
        f"{m.link_h2d_gb_s:.1f} GB/s (the best rates measured, from the profile); HBM and link: each one's share."
    )
    if any(cell.step_us and not cell.pinned_fits for cell in cells):
        notes += (
            f" +: more than the {m.host_pinned_bytes / GIB:.0f} GiB of the measured machine; sequences shared host "
            "blocks there."
        )
    if not all(cell.fits for cell in cells):
        notes += " needs: does not fit, what it takes stands in its line."
    title = f"Batch {w.batch}, {tokens_label(w.context_tokens)} tokens, {misses(w.miss_rate)} misses"
    return f"{title}\n{columns(headers, rows)}\n{wrapped(notes)}"


def _detail_row(cell: Cell) -> list[str]:
    pinned = f"{cell.pinned_gib:.1f}" + (" " if cell.pinned_fits else "+")
    if cell.step_us:
        shares = [_share(s) for s in (cell.floor_share, cell.hbm_share, cell.link_share)]
        return [
            cell.label,
            f"{cell.tokens_per_s:.0f}",
            f"{cell.step_us / 1e3:.2f}",
            *shares,
            _one(cell.gpu_gib),
            pinned,
        ]
    why = "-" if cell.fits else "needs"
    return [cell.label, why, "-", "-", "-", "-", _one(cell.gpu_gib), pinned]


def _one(value: float) -> str:
    return f"{value:.1f}"


def _share(share: float | None) -> str:
    return "-" if share is None else percent(share, 0)


def _residency(rows: Sequence[Residency]) -> str:
    parts = ["Resident blocks of sparda, where blocks that were chosen come back"]
    headers = ["resident", "x free", "missed", "expected", "misses/layer", "ms", "tok/s", "GPU GiB"]
    for (context, batch, turnover), found in groupby(rows, lambda r: (r.context_tokens, r.batch, r.turnover)):
        lines = [
            [
                str(r.resident_blocks),
                f"{r.times:.2f}",
                percent(r.missed, 2),
                percent(r.expected, 2),
                f"{r.misses_per_layer:.1f}",
                f"{r.step_us / 1e3:.2f}",
                f"{r.tokens_per_s:.0f}",
                _one(r.gpu_gib),
            ]
            for r in found
        ]
        title = f"Batch {batch}, {tokens_label(context)} tokens, {percent(turnover)} of the free picks replaced a step"
        parts.append(f"{title}\n{columns(headers, lines)}")
    parts.append(
        wrapped(
            "x free: slots for free picks over the free picks. missed: share of the free picks that was fetched, "
            f"counted; expected: what the reuse states, the share replaced over x to the power of {rows[0].tail:g}."
        )
    )
    return "\n\n".join(parts)


def answers(c: Comparison) -> list[str]:
    """What the rows answer, a sentence or two each."""
    found = [_crossed(x) for context in dict.fromkeys(g[0] for g in c.grids) if (x := crossover(c.cells, context))]
    for (context, batch), gains in lookahead_gains(c.cells).items():
        aheads = ", ".join(map(str, gains))
        changes = ", ".join(percent(g, 1, sign=True) for g in gains.values())
        found.append(
            f"Lookahead {aheads} instead of 1, batch {batch} at {tokens_label(context)}: {changes} tokens/s of sparda."
        )
    share, count = floor_share(c.cells)
    if share is not None:
        found.append(f"sparda's floor is {percent(share, 0)} of its measured step in the median of {count} cells.")
    return found


def _crossed(x: Crossover) -> str:
    at = f"At {tokens_label(x.context_tokens)}"
    room = ""
    if x.no_room_from is not None:
        room = f" From batch {x.no_room_from} on no resident policy fits: the least needs {x.no_room_gib:.0f} GiB."
    if x.resident is None:
        return f"{at} no resident sparse policy was measured.{room}"
    best = f"{x.resident.tokens_per_s:.0f} tokens/s, {x.resident.label} at batch {x.resident.workload.batch}"
    if x.from_batch is None:
        limit = f"{at} offloading (sparda) stays below the best resident sparse policy ({best})"
        return f"{limit} at the largest batch.{room}"
    return (
        f"{at} offloading (sparda) decodes more tokens/s from batch {x.from_batch} on than the best resident sparse "
        f"policy does at any batch that fits ({best}).{room}"
    )
