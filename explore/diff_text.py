"""What moved between two profiles, for a reader, in 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from sparda.calibrate.diff import FLOOR, RESOLUTION_US, TIMES, Diff, OpDiff, Pair
from sparda.calibrate.store import Value
from sparda.explore.errors_text import band_text
from sparda.explore.text import columns, count, percent, wrapped

CELL = 27
"""Most characters of a value in a table of differences."""


def text_of_diff(diff: Diff) -> str:
    """Machines and provenance where they differ, error bands, and the operations of which cases moved."""
    both, moved = sum(len(o.pairs) for o in diff.ops), sum(o.up + o.down for o in diff.ops)
    parts = [_head(diff), *_machine(diff), *_facts(diff), *_bands(diff)]
    parts.append(
        wrapped(
            f"{count(both, 'case')} in both, {moved:,} moved: B differs from A by more than {TIMES:g} times what both "
            f"spread, by more than {percent(FLOOR, 0)} and by more than {RESOLUTION_US:g} us."
        )
    )
    shown = [o for o in diff.ops if o.up or o.down]
    if shown:
        parts.append(columns(["kind", "op", "both", "longer", "shorter", "B/A median"], [_line(o) for o in shown], 2))
        parts.append("\n".join(wrapped(_worst(o.worst)) for o in shown if o.worst))
    still = Counter(o.kind for o in diff.ops if o.pairs and not (o.up or o.down))
    if still:
        kinds = ", ".join(f"{number} of kind {kind}" for kind, number in still.items())
        parts.append(wrapped(f"Operations of which nothing moved: {kinds}."))
    if alone := [wrapped(text) for o in diff.ops for text in _alone(o)]:
        parts.append("\n".join(alone))
    return "\n\n".join(parts)


def _head(diff: Diff) -> str:
    text = f"A: {diff.a.label}, {diff.a.gpu}. B: {diff.b.label}, {diff.b.gpu}."
    if not diff.same_gpu:
        text += " They are different GPUs: what follows compares machines, not two measurements of one."
    hot = [("A", diff.a.throttled_rows), ("B", diff.b.throttled_rows)]
    if named := [f"{count(rows, 'row')} of {side}" for side, rows in hot if rows]:
        text += f" Measured while the GPU throttled: {', '.join(named)}."
    return wrapped(text)


def _machine(diff: Diff) -> list[str]:
    if not diff.machine:
        return ["The machines' values are the same."]
    rows = [[key, _short(a), _short(b)] for key, (a, b) in diff.machine.items()]
    return [columns(["machine", "A", "B"], rows)]


def _facts(diff: Diff) -> list[str]:
    if not diff.facts:
        return ["Of the provenance nothing differs."]
    rows = [[key, _short(", ".join(a) or "-"), _short(", ".join(b) or "-")] for key, (a, b) in diff.facts.items()]
    return [columns(["provenance", "A", "B"], rows, left=3)]


def _bands(diff: Diff) -> list[str]:
    return [f"{wrapped(f'A: {band_text(diff.a.band)}')}\n{wrapped(f'B: {band_text(diff.b.band)}')}"]


def _line(o: OpDiff) -> list[str]:
    ratio = o.median_ratio
    return [o.kind, o.op, str(len(o.pairs)), str(o.up), str(o.down), "-" if ratio is None else f"{ratio:.3f}"]


def _worst(p: Pair) -> str:
    return (
        f"{p.op} ({p.kind}), worst: {p.a_us:,.2f} to {p.b_us:,.2f} us, {percent(p.ratio - 1, sign=True)}, noise "
        f"{percent(p.spread)}: {_case(p.case)}."
    )


def _case(case: Mapping[str, Value]) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.items())


def _alone(o: OpDiff) -> list[str]:
    return [
        f"{o.op} ({o.kind}): {count(number, 'case')} in {side} only."
        for side, number in (("A", o.only_a), ("B", o.only_b))
        if number
    ]


def _short(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int | float) else str(value)
    return text if len(text) <= CELL else text[: CELL - 3] + "..."
