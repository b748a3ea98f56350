"""What the modules that prepare texts and tasks share when they are run by themselves."""

from __future__ import annotations

import argparse
from typing import NoReturn

from sparda.engine.errors import SpardaError


class Parser(argparse.ArgumentParser):
    """Arguments of ``python -m`` of a module of this package, ``--json`` among them; a wrong one is a SpardaError."""

    def __init__(self, module: str, about: str | None) -> None:
        super().__init__(prog=f"python -m sparda.calibrate.measure.quality.{module}", description=about)
        self.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else")

    def error(self, message: str) -> NoReturn:
        raise SpardaError(f"{message}; see `{self.prog} --help`.")
