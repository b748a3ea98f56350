"""Make a profile of this GPU in one go; list, show and compare profiles. Each of them takes --json."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sparda.explore.cli.common import Output, add_json, profile_named, require_engine, require_gpu

if TYPE_CHECKING:
    from sparda.calibrate.profile import Profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command: one of four actions, each with its own."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_new(actions.add_parser("new", help="measure this GPU and fit a profile (needs a GPU)"))
    add_json(actions.add_parser("list", help="the profiles that come with the package"))
    show = actions.add_parser("show", help="machine, sessions, errors and measured envelope of one")
    show.add_argument("name", metavar="NAME", help="profile by name or folder")
    add_json(show)
    diff = actions.add_parser("diff", help="what moved between two, beyond their noise")
    diff.add_argument("a", metavar="A", help="profile by name or folder")
    diff.add_argument("b", metavar="B", help="the one that is compared to it")
    add_json(diff)


def _add_new(parser: argparse.ArgumentParser) -> None:
    from sparda.explore.cli.measure import add_budget

    parser.add_argument("out", type=Path, metavar="OUT", help="the profile's folder; measuring resumes there")
    parser.add_argument("--name", metavar="NAME", help="name of the profile (default: the folder's name)")
    parser.add_argument("--model", metavar="MODEL", help="whose shapes are measured (default: minicpm4.1-8b)")
    add_budget(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> Output:
    """Do what was asked. Raises SpardaError for a profile that is not there, and without a GPU where one is needed."""
    actions = {"new": _new, "list": _list, "show": _show, "diff": _diff}
    output = actions[args.action](args)
    return Output({"action": args.action, **output.data}, output.text)


def _new(args: argparse.Namespace) -> Output:
    """Measure what a profile is fitted to and judged by, then fit it. A spent budget ends it before the fit."""
    require_engine("profile new")
    from sparda.calibrate.fit import FITTED_TO
    from sparda.calibrate.measure.run import MODEL, PARTS, estimate_measure
    from sparda.calibrate.store import Store
    from sparda.explore.cli.calibrate import calibrated
    from sparda.explore.cli.measure import estimated, measured
    from sparda.explore.text import count, wrapped

    model = args.model or MODEL
    parts = [p.name for p in PARTS.values() if p.calibrates]
    before = estimate_measure(args.out, args.budget, parts, model)
    if args.dry_run:
        return estimated(before, args.out)
    require_gpu("profile new")
    done = measured(args.out, args.budget, parts, model)
    left = estimate_measure(args.out, args.budget, parts, model).left
    data: dict[str, object] = {**done, "left": left}
    if done["ended"] != "complete":
        text = f"Budget spent, {count(left, 'case')} left: the same command goes on where this stopped, then fits."
        return Output({**data, "profile": None}, wrapped(text))
    output = calibrated(args.out, args.name)
    store = Store(args.out)
    hot = sum(r.throttled for kind in FITTED_TO for r in store.latest(kind))
    others = ",".join(p.name for p in PARTS.values() if not p.calibrates)
    notes = [f"Next: sparda table --profile {args.out}", f"More rows: sparda measure --out {args.out} --parts {others}"]
    if hot:
        notes.insert(0, wrapped(f"Measured while the GPU throttled: {count(hot, 'row')}. Cool it and run this again."))
    return Output({**data, **output.data, "throttled_rows": hot}, "\n".join([output.text, "", *notes]))


def _list(args: argparse.Namespace) -> Output:
    from sparda.calibrate.profile import profile_names
    from sparda.explore.text import columns, wrapped

    profiles = [profile_named(name) for name in profile_names()]
    rows = [[p.name, p.machine.gpu.removeprefix("NVIDIA "), _error(p)] for p in profiles]
    found = [
        {
            "profile": p.name,
            "tier": p.tier,
            "gpu": p.machine.gpu,
            "model": p.model,
            "held_out_steps": p.band.count,
            "median_error": p.band.median if p.band.count else None,
            "folder": str(p.folder),
        }
        for p in profiles
    ]
    table = columns(["profile", "GPU", "error"], rows, left=2)
    note = wrapped(
        "A name ends with the profile's tier. error: the median of held-out steps; unknown where costs were carried "
        "over by datasheet. Models, counts and folders: --json."
    )
    return Output({"profiles": found}, f"{table}\n{note}")


def _error(profile: Profile) -> str:
    from sparda.explore.text import percent

    return percent(profile.band.median) if profile.band.count else "unknown"


def _show(args: argparse.Namespace) -> Output:
    from sparda.explore.profile_text import plain_profile, text_of_profile

    profile = profile_named(args.name)
    return Output(plain_profile(profile), text_of_profile(profile))


def _diff(args: argparse.Namespace) -> Output:
    from sparda.calibrate.diff import diff
    from sparda.explore.diff_text import text_of_diff

    found = diff(profile_named(args.a), profile_named(args.b))
    return Output(found.to_dict(), text_of_diff(found))
