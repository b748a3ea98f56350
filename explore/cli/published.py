"""Decode figures that the paper published beside what the model gives, under stated assumptions. No GPU."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sparda.engine.errors import SpardaError
from sparda.explore.cli.common import Output, add_json

if TYPE_CHECKING:
    from sparda.explore.published import Assumptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one assumption, for example launch_us=10,15, eager=false or miss_rates=0.06 (repeatable)",
    )
    parser.add_argument(
        "--profile", metavar="NAME", help="play every machine on this profile instead of on its datasheet's"
    )
    parser.add_argument("--markdown", action="store_true", help="as a section of a document")
    add_json(parser)


def run(args: argparse.Namespace) -> Output:
    """Compare. Raises SpardaError for an unknown assumption or profile."""
    from sparda.calibrate.published import published
    from sparda.explore.published_case import case_of
    from sparda.explore.published_text import markdown_of, text_of

    case = case_of(published(), assumptions_of(args.assume), args.profile)
    return Output(case.to_dict(), markdown_of(case) if args.markdown else text_of(case))


def assumptions_of(texts: list[str]) -> Assumptions:
    """The assumptions changed by ``key=value`` texts. Raises SpardaError for an unknown key or a wrong value."""
    import tomllib

    from sparda.engine.loader import read, to_plain
    from sparda.explore.published import Assumptions

    plain = to_plain(Assumptions())
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key or not value:
            raise SpardaError(f"--assume {text}: give KEY=VALUE, for example --assume launch_us=10,15.")
        listed = isinstance(plain.get(key), list) and not value.startswith("[")
        try:
            plain[key] = tomllib.loads(f"value = [{value}]" if listed else f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            plain[key] = value
    return read(Assumptions, plain, where="--assume " + " --assume ".join(texts) if texts else "assumptions")
