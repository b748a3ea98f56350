"""CTA counts for a grid of workloads, with predicted speed, gain over the public rule, and what was confirmed."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparda.explore.cli.common import Output, add_scenario, profile_of, scenario_of, table_of, write_folder_of

FORMATS = ("text", "md", "json", "toml", "csv", "sh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    add_scenario(parser)
    parser.add_argument("--format", choices=FORMATS, default="text", help="sh is a function for launch scripts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there instead of printing it")


def run(args: argparse.Namespace) -> Output:
    """Make the table and print or write it."""
    from sparda.engine.loader import write_text
    from sparda.explore.exports import export

    scenario = scenario_of(args)
    profile = profile_of(scenario)
    table = table_of(profile, scenario)
    text = export(table, args.format)
    if args.out:
        write_text(write_folder_of(args.out), text)
        text = f"Wrote {len(table.rows)} rows as {args.format} to {args.out}."
    data = {**table.to_dict(), "format": args.format, "out": str(args.out) if args.out else None}
    return Output(data, text)
