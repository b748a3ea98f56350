"""Write the HTML report of a scenario."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparda.explore.cli.common import Output, add_scenario, profile_of, scenario_of, write_folder_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    add_scenario(parser)
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")


def run(args: argparse.Namespace) -> Output:
    """Write it and say where."""
    scenario = scenario_of(args)
    profile = profile_of(scenario)
    from sparda.explore.report import write_report

    write_report(write_folder_of(args.out), profile, scenario)
    data: dict[str, object] = {"profile": profile.name, "tier": profile.tier, "out": str(args.out)}
    return Output(data, f"Wrote {args.out} (profile {profile.label}).")
