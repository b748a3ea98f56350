"""Fit a profile to a folder of measurement rows and write its profile.json there."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparda.engine.errors import SpardaError
from sparda.explore.cli.common import Output, add_json
from sparda.explore.text import Progress, wrapped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.add_argument("folder", type=Path, help="folder that `sparda measure` wrote")
    parser.add_argument("--name", metavar="NAME", help="name of the profile (default: the folder's name)")
    add_json(parser)


def run(args: argparse.Namespace) -> Output:
    """Fit and write. Raises SpardaError where rows are missing."""
    if not (args.folder / "rows").is_dir():
        raise SpardaError(f"{args.folder} has no rows folder; give a folder that `sparda measure` wrote.")
    return calibrated(args.folder, args.name)


def calibrated(folder: Path, name: str | None) -> Output:
    """Fit the rows in ``folder``, write the profile and say how far off it is."""
    from sparda.calibrate.fit import calibrate
    from sparda.engine.loader import to_plain
    from sparda.explore.errors_text import band_text, errors_text

    progress = Progress("held-out steps, each on every draw of its interval", 0)
    try:
        profile = calibrate(folder, name or folder.resolve().name, progress.to)
    finally:
        progress.close()
    band = profile.band
    path = profile.folder / "profile.json"
    text = (
        f"{profile.label}: {profile.machine.gpu}, model {profile.model}; written to {path}.\n"
        + wrapped(band_text(band))
        + f"\n\n{errors_text(profile.errors)}"
    )
    data: dict[str, object] = {
        "profile": profile.name,
        "tier": profile.tier,
        "machine": to_plain(profile.machine),
        "band": to_plain(band),
        "errors": to_plain(profile.errors),
        "path": str(path),
    }
    return Output(data, text)
