"""Recompute every claimed figure from the profile's committed rows."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sparda.explore.cli.common import Output, add_json, positive, profile_named

if TYPE_CHECKING:
    from sparda.explore.figures import Figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.add_argument(
        "--profile",
        default="h200-sxm.measured",
        metavar="NAME",
        help="profile by name or folder (default: h200-sxm.measured)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=1.0,
        metavar="S",
        help="seconds spent on the simulator's own speed (default: 1)",
    )
    parser.add_argument("--markdown", action="store_true", help="the table as it stands in the README")
    add_json(parser)


def run(args: argparse.Namespace) -> Output:
    """All figures, with targets, rows and provenance."""
    from sparda.explore.evidence import evidence

    profile = profile_named(args.profile)
    figures = evidence(profile, args.seconds)
    data: dict[str, object] = {
        "profile": profile.name,
        "tier": profile.tier,
        "figures": {name: f.to_dict() for name, f in figures.items()},
    }
    if args.markdown:
        from sparda.explore.readme import evidence_block

        return Output(data, evidence_block(figures))
    return Output(data, f"{_text(figures)}\nProfile {profile.label}; conditions and provenance: --json.")


def _text(figures: dict[str, Figure]) -> str:
    from sparda.explore.text import columns, wrapped

    words = {True: "met", False: "NOT MET", None: "-"}
    rows = [
        [
            name,
            f.unit,
            _number(f.value),
            ("" if f.target is None else ">= " if f.higher_is_better else "<= ") + _number(f.target),
            words[f.met],
            str(f.rows),
        ]
        for name, f in figures.items()
    ]
    missed = [wrapped(f"Not met, {name}: {f.conditions}.") for name, f in figures.items() if f.met is False]
    return "\n".join([columns(["figure", "unit", "value", "target", "", "rows"], rows, left=2), *missed])


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3f}"
