"""What the commands share: arguments, output, the profile, and what a measuring machine must have."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sparda.engine.errors import SpardaError

if TYPE_CHECKING:
    from sparda.calibrate.profile import Profile
    from sparda.engine.weights import Weights
    from sparda.explore.scenario import Scenario
    from sparda.explore.table import CtaTable


@dataclass(frozen=True, slots=True)
class Output:
    """A command's result: ``data`` for --json, ``text`` for a reader."""

    data: dict[str, object]
    text: str


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as every other mistake is reported."""

    def error(self, message: str) -> NoReturn:
        raise SpardaError(f"{message}; see `{self.prog} --help`.")


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json, which every command has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else")


def add_scenario(parser: argparse.ArgumentParser) -> None:
    """--profile, --scenario, --set and --json."""
    parser.add_argument("--profile", metavar="NAME", help="profile by name or folder (default: h200-sxm.measured)")
    parser.add_argument("--scenario", type=Path, metavar="FILE", help="TOML file with [workload], [config], [grid]")
    add_overrides(parser, "config.prefetch_ctas=4 or grid.batch=1,16 (repeatable)")
    add_json(parser)


def add_overrides(parser: argparse.ArgumentParser, examples: str) -> None:
    """--set, its help ending in ``examples``."""
    help_ = f"override one value, for example {examples}"
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=help_)


def scenario_of(args: argparse.Namespace) -> Scenario:
    """The scenario that the arguments of ``add_scenario`` describe."""
    from sparda.explore.scenario import load_scenario

    return load_scenario(args.scenario, args.overrides, args.profile)


def profile_named(name: str) -> Profile:
    """The profile. Raises SpardaError where there is none of that name."""
    from sparda.calibrate import profile

    return profile.load_profile(name)


def profile_of(scenario: Scenario) -> Profile:
    """The scenario's profile, its link, machine and model changed as the scenario has it. Raises SpardaError."""
    from sparda.explore.setting import profile_for

    return profile_for(scenario)


def table_of(profile: Profile, scenario: Scenario) -> CtaTable:
    """The CTA table of the scenario's grid, with progress on a terminal."""
    from sparda.explore.table import cta_table
    from sparda.explore.text import Progress

    progress = Progress("cells", len(scenario.cells))
    table = cta_table(profile, scenario, each=progress.step)
    progress.close()
    return table


VALUE_BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes of a value by what --dtype may say."""


def check_checkpoint(path: Path) -> None:
    """Refuse a checkpoint that is not there. Raises SpardaError."""
    if not path.exists():
        raise SpardaError(f"--checkpoint {path}: there is no such folder or file; check the path.")


def load_model(path: Path, device: str, dtype: str, **forecast: Any) -> Weights:
    """The model of a checkpoint folder or a GGUF file; ``forecast``: what to load with it. Raises SpardaError."""
    from sparda.engine.checkpoint import load_checkpoint
    from sparda.engine.gguf_file import load_gguf

    check_checkpoint(path)
    load = load_checkpoint if path.is_dir() else load_gguf
    return load(path, device=device, value_bytes=VALUE_BYTES[dtype], **forecast)


def require_engine(command: str, where: str = "on a machine with a CUDA GPU") -> None:
    """Refuse to run kernels where torch or Triton is not installed; ``where`` the command runs with them."""
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        raise SpardaError(
            f"{command} runs kernels and needs {' and '.join(missing)}; install with `pip install 'sparda[engine]'` "
            f"{where}."
        )


def require_gpu(command: str) -> None:
    """Refuse to measure where it cannot be done, before anything is written."""
    require_engine(command)
    import torch

    if not torch.cuda.is_available():
        without = (
            "`sparda validate --verdicts` judges measured rows" if command == "validate" else "`sparda table` works"
        )
        raise SpardaError(
            f"{command} measures on a CUDA GPU and none is visible; run it on a machine with one (see `sparda doctor`)."
            f" Without one {without}."
        )


def write_folder_of(path: Path) -> Path:
    """``path``, its folder made if need be. Raises SpardaError where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise SpardaError(f"{path.parent}: cannot be made ({e.strerror}); give a path that you may write to.") from None
    return path


def positive(text: str) -> float:
    """An argument that is a number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


LARGEST = 2**31 - 1
"""The largest whole number: other seeds are made from one by a product that has 63 bits."""


def whole(text: str) -> int:
    """An argument that is a whole number, a seed or a count."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to {LARGEST}")
    return value
