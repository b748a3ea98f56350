"""Measure this machine's link, kernels, co-runs and whole steps; rows go to a folder, finished ones at once."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from sparda.engine.errors import SpardaError
from sparda.explore.cli.common import Output, add_json, positive, require_gpu

PARTS = ("link", "kernels", "corun", "steps", "policies", "residency")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="store of rows; measuring resumes there"
    )
    parser.add_argument("--budget", type=positive, default=3600.0, metavar="SECONDS", help="stop after (default: 3600)")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="LIST", help=f"of {','.join(PARTS)} (default: all)")
    add_json(parser)


def run(args: argparse.Namespace) -> Output:
    """Measure. Raises SpardaError without a GPU."""
    parts = [p.strip() for p in args.parts.split(",") if p.strip()]
    unknown = [p for p in parts if p not in PARTS]
    if unknown or not parts:
        raise SpardaError(
            f"--parts {args.parts}: {', '.join(unknown) or 'nothing'} given; allowed are {', '.join(PARTS)}."
        )
    require_gpu("measure")
    from sparda.calibrate.measure.run import main_measure
    from sparda.calibrate.store import Store

    done = main_measure(args.out, args.budget, parts)
    counts = dict(Counter(r.kind for r in Store(args.out).rows()))
    text = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"
    return Output(
        {**done, "out": str(args.out), "parts": parts, "rows_in_folder": counts},
        f"Ended: {done['ended']}. Rows in {args.out}: {text}.\nNext: sparda calibrate {args.out} --name NAME",
    )
