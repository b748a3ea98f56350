"""The H200 table for MiniCPM4.1-8B at 32K and 128K, and a report; under a minute, without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparda.explore.cli.common import Output, add_scenario, profile_of, scenario_of, table_of, write_folder_of
from sparda.explore.text import wrapped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    add_scenario(parser)
    parser.add_argument("--report", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")


def run(args: argparse.Namespace) -> Output:
    """Table first, then the report."""
    from sparda.explore.report import write_report
    from sparda.explore.table_text import table_text

    scenario = scenario_of(args)
    profile = profile_of(scenario)
    table = table_of(profile, scenario)
    path = write_folder_of(args.report)
    write_report(path, profile, scenario)
    head = wrapped(
        f"How many CTAs the prefetch kernel should get: {scenario.model_name} on {profile.machine.gpu}, simulated on "
        f"profile {profile.name}, tier {profile.tier}. No GPU was used."
    )
    return Output({**table.to_dict(), "report": str(path)}, f"{head}\n\n{table_text(table)}\n\nReport: {path}")
