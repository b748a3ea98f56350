"""All policies side by side, as measured: step times, floors, memory, and from where on offloading wins. No GPU."""

from __future__ import annotations

import argparse

from sparda.explore.cli.common import Output, add_json, profile_named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.add_argument(
        "--profile",
        default="h200-sxm.measured",
        metavar="NAME",
        help="profile by name or folder (default: h200-sxm.measured)",
    )
    parser.add_argument("--tokens", action="store_true", help="tokens/s instead of milliseconds per step")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="of the cell in detail (default: 16)")
    parser.add_argument(
        "--context", type=int, default=131072, metavar="TOKENS", help="of the cell in detail (default: 131072)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> Output:
    """Compare. Raises SpardaError where the profile has no rows of policies."""
    from sparda.engine.loader import to_plain
    from sparda.explore.crossover import crossover, floor_share
    from sparda.explore.policies import comparison
    from sparda.explore.policies_text import answers, text_of

    profile = profile_named(args.profile)
    found = comparison(profile)
    contexts = sorted({c.workload.context_tokens for c in found.cells})
    crossed = {str(at): crossover(found.cells, at) for at in contexts}
    data: dict[str, object] = {
        "profile": profile.name,
        "tier": profile.tier,
        "model": found.model,
        "cells": [c.to_dict() for c in found.cells],
        "detail": [c.to_dict() for c in found.at(args.batch, args.context)],
        "residency": [r.to_dict() for r in found.residency],
        "crossover": {
            at: {**to_plain(x), "resident": x.resident.to_dict() if x.resident else None} if x else None
            for at, x in crossed.items()
        },
        "floor_share": floor_share(found.cells)[0],
        "answers": answers(found),
    }
    return Output(data, text_of(found, args.batch, args.context, args.tokens))
