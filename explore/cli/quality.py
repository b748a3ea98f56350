"""What choosing blocks costs a model: list, show and measure it, and train Forecasts. Each action takes --json."""

from __future__ import annotations

import argparse

from sparda.explore.cli import quality_measure, quality_train
from sparda.explore.cli.common import Output, add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command: one of its actions, each with its own."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_json(actions.add_parser("list", help="the quality profiles that come with the package"))
    show = actions.add_parser("show", help="recall, perplexity, retrieval, misses and answers of one")
    show.add_argument("name", metavar="NAME", nargs="?", help="quality profile by name, folder or file")
    add_json(show)
    described = (
        ("measure", "measure a model on texts (CPU or GPU)", quality_measure),
        ("train", "train Forecasts on a frozen model (CPU or GPU)", quality_train),
    )
    for name, help_text, module in described:
        module.add_arguments(actions.add_parser(name, help=help_text, description=module.__doc__))


def run(args: argparse.Namespace) -> Output:
    """Do what was asked. Raises SpardaError for a quality profile that is not there."""
    actions = {"list": _list, "show": _show, "measure": quality_measure.run, "train": quality_train.run}
    output = actions[args.action](args)
    return Output({"action": args.action, **output.data}, output.text)


def _list(args: argparse.Namespace) -> Output:
    from sparda.calibrate.quality import load_quality, quality_names
    from sparda.explore.quality_text import list_text

    profiles = [load_quality(name) for name in quality_names()]
    found = [
        {
            "quality": q.name,
            "model": q.model,
            "context_tokens": q.context_tokens,
            "documents": len(q.documents),
            "recalls": len(q.recalls),
            "perplexities": len(q.perplexities),
            "retrievals": len(q.retrievals),
            "dynamics": len(q.dynamics),
        }
        for q in profiles
    ]
    return Output({"qualities": found}, list_text(profiles))


def _show(args: argparse.Namespace) -> Output:
    from sparda.calibrate.quality import load_quality
    from sparda.engine.errors import SpardaError
    from sparda.explore.quality_text import MEASURE, default_name, plain_quality, text_of_quality

    name = args.name or default_name()
    if not name:
        raise SpardaError(f"no quality profile comes with this package and none is named. {MEASURE}")
    profile = load_quality(name)
    return Output(plain_quality(profile), text_of_quality(profile))
