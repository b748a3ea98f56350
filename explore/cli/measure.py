"""Measure this machine's link, kernels, co-runs and whole steps; rows go to a folder, finished ones at once."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparda.engine.errors import SpardaError
from sparda.explore.cli.common import Output, add_json, positive, require_engine, require_gpu

if TYPE_CHECKING:
    from sparda.calibrate.measure.estimate import Estimate

PARTS = (
    "link",
    "kernels",
    "corun",
    "steps",
    "paths",
    "pathsteps",
    "policies",
    "residency",
    "handicap",
    "training",
    "traces",
)
BUDGET_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="store of rows; measuring resumes there"
    )
    parser.add_argument("--parts", default=",".join(PARTS), metavar="LIST", help=f"of {','.join(PARTS)} (default: all)")
    add_budget(parser)
    add_json(parser)


def add_budget(parser: argparse.ArgumentParser) -> None:
    """--budget and --dry-run."""
    parser.add_argument(
        "--budget", type=positive, default=BUDGET_S, metavar="SECONDS", help=f"stop after (default: {BUDGET_S:.0f})"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be measured and how long; needs no GPU")


def run(args: argparse.Namespace) -> Output:
    """Measure, or say what would be. Raises SpardaError without a GPU."""
    parts = [p.strip() for p in args.parts.split(",") if p.strip()]
    unknown = [p for p in parts if p not in PARTS]
    if unknown or not parts:
        raise SpardaError(
            f"--parts {args.parts}: {', '.join(unknown) or 'nothing'} given; allowed are {', '.join(PARTS)}."
        )
    if args.dry_run:
        require_engine("measure --dry-run")
        from sparda.calibrate.measure.run import estimate_measure

        return estimated(estimate_measure(args.out, args.budget, parts), args.out)
    require_gpu("measure")
    from sparda.calibrate.store import Store

    done = measured(args.out, args.budget, parts)
    counts = dict(Counter(r.kind for r in Store(args.out).rows()))
    text = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"
    return Output(
        {**done, "out": str(args.out), "parts": parts, "rows_in_folder": counts},
        f"Ended: {done['ended']}. Rows in {args.out}: {text}.\nNext: sparda calibrate {args.out} --name NAME",
    )


def estimated(expected: Estimate, out: Path) -> Output:
    """What a dry run prints."""
    from sparda.explore.text import columns, wrapped

    rows = [
        [p.name, str(p.cases), str(p.measured), str(p.cases - p.measured - p.left), str(p.left), f"{p.seconds:.0f}"]
        for p in expected.parts
    ]
    head = ["part", "cases", "measured", "not here", "left", "s"]
    lines = [columns(head, rows), "", *(wrapped(f"{line[0].upper()}{line[1:]}.") for line in expected.remarks)]
    lines += [wrapped(f"Not here: {reason}.") for p in expected.parts for reason in p.too_big]
    return Output({"dry_run": True, "out": str(out), **expected.to_dict()}, "\n".join(lines))


def measured(out: Path, budget_s: float, parts: Sequence[str], model: str | None = None) -> dict[str, object]:
    """What ``main_measure`` returns; its progress is shown on a terminal."""
    from sparda.calibrate.measure.run import MODEL, main_measure
    from sparda.explore.text import Progress

    progress = Progress("cases", 0)
    try:
        return main_measure(out, budget_s, parts, model or MODEL, progress.to)
    finally:
        progress.close()
