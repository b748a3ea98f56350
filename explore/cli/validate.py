"""Measure what the search chose, and judge it: contradictions first. --winners and --verdicts need no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sparda.engine.errors import SpardaError
from sparda.explore.cli.common import (
    Output,
    add_scenario,
    positive,
    profile_named,
    require_gpu,
    scenario_of,
    write_folder_of,
)

if TYPE_CHECKING:
    from sparda.engine.config import Config
    from sparda.explore.cells import CellVerdict
    from sparda.explore.validate import Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    add_scenario(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--winners", type=Path, metavar="FILE", help="only write the cells to measure, predictions in")
    what.add_argument("--verdicts", action="store_true", help="only judge rows that are already in the store")
    parser.add_argument(
        "--cells", type=Path, metavar="FILE", help="cells file (default: validation.json of the profile)"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="store of measured rows (default: the profile's)")
    parser.add_argument("--budget", type=positive, default=1800.0, metavar="SECONDS", help="stop after (default: 1800)")


def run(args: argparse.Namespace) -> Output:
    """Write cells, measure them or judge them."""
    if args.winners:
        return _winners(args)
    from sparda.calibrate.profile import DATASHEET
    from sparda.calibrate.store import Store
    from sparda.explore import validate
    from sparda.explore.cells import JUDGING

    if not args.verdicts:
        require_gpu("validate")
    folder = None
    if not args.cells or not args.out:
        profile = profile_named(scenario_of(args).profile)
        if profile.tier == DATASHEET:
            raise SpardaError(
                f"{profile.name} is carried over by datasheet: nothing was run on it. Give --cells and --out, the file "
                "of cells and the folder of their rows."
            )
        folder = profile.folder
    path = args.cells or (folder or Path()) / validate.FILE
    out = args.out or folder or Path()
    if not path.exists():
        raise SpardaError(f"{path}: there is no such cells file; write one with `sparda validate --winners {path}`.")
    cells = validate.read_cells(path)
    if not args.verdicts:
        validate.measure_cells(path, out, args.budget)
    rows = [row for kind in JUDGING for row in Store(out).rows(kind)]
    found = validate.verdicts(cells, rows)
    totals = validate.summary(found)
    if not totals.runs:
        raise SpardaError(
            f"{out} has no rows of what {path} names; measure them with `sparda validate --cells {path} --out {out}`."
        )
    data: dict[str, object] = {
        "profile": cells.profile,
        "model": cells.model,
        "cells_file": str(path),
        "rows_folder": str(out),
        "summary": asdict(totals),
        "verdicts": [validate.verdict_dict(v) for v in found],
    }
    return Output(data, _text(cells.profile, found, totals))


def _winners(args: argparse.Namespace) -> Output:
    from sparda.engine.loader import to_plain
    from sparda.explore import validate
    from sparda.explore.predict import Predictor
    from sparda.explore.text import Progress

    scenario = scenario_of(args)
    profile = profile_named(scenario.profile)
    progress = Progress("cells", len(scenario.cells))
    cells = validate.winners(Predictor.of(profile, scenario), scenario, write_folder_of(args.winners), progress.step)
    progress.close()
    runs = sum(len(c.runs) for c in cells.cells)
    plain = {k: v for k, v in to_plain(cells).items() if k != "schema"}
    left = len(scenario.cells) - len(cells.cells)
    floors = " or breaks a floor of quality" if scenario.limits.floors else ""
    return Output(
        {**plain, "out": str(args.winners), "left_out": left},
        f"Wrote {len(cells.cells)} cells, {runs} runs to {args.winners}; {left} cells are left out: their "
        f"choice does not fit on the GPU{floors}.\n"
        f"Next, on the machine with the GPU: sparda validate --cells {args.winners} --out FOLDER",
    )


def _text(profile: str, found: Sequence[CellVerdict], totals: Summary) -> str:
    from sparda.explore.cells import NOT_RUN, TOLERANCE
    from sparda.explore.text import columns, misses, percent, tokens_label, wrapped

    def share(value: float | None, sign: bool = True) -> str:
        return "-" if value is None else percent(value, 1, sign=sign)

    def whole(value: float | None) -> str:
        return "-" if value is None else percent(value, 0, sign=True)

    rows = []
    for v in found:
        own = next((r for r in v.runs if r.chosen), None)
        measured = f"{own.measured_us / 1e3:.2f}" if own and own.measured_us else "-"
        predicted = f"{own.predicted_us / 1e3:.2f}" if own and own.predicted_us else "-"
        w = v.workload
        rows.append(
            [
                tokens_label(w.context_tokens),
                str(w.batch),
                misses(w.miss_rate),
                _short(v.chosen),
                _short(v.best) if v.best else "-",
                predicted,
                measured,
                share(v.error),
                share(v.regret, False),
                whole(v.gain_16),
                whole(v.gain_32),
                v.confirmed,
            ]
        )
    headers = ["ctx", "batch", "miss", "chosen", "best", "pred", "meas", "error", "regret", "vs 16", "vs 32", "ok"]
    notes = [
        f"{totals.confirmed} confirmed, {totals.contradicted} contradicted, {totals.not_run} not measured as chosen; "
        f"{totals.runs} runs measured. Profile {profile}.",
        f"Of all runs: error median {share(totals.median_error, False)}, worst {share(totals.max_error, False)}; worst "
        f"regret {share(totals.max_regret, False)}.",
        "chosen: CTAs@lookahead that the search chose; best: the fastest measured. pred, meas: step of the chosen, ms; "
        f"error: pred over meas, less 1. regret: meas over the best, less 1; {percent(TOLERANCE, 0)} at most confirms. "
        "vs 16, vs 32: measured tokens/s over the public rule's CTA counts (16 up to batch 16, else 32, on an H100), "
        "all else equal.",
    ]
    if any(v.confirmed != NOT_RUN and v.gain_public is None for v in found):
        notes.append("vs -: that count was not measured with the chosen lookahead.")
    return "\n".join([columns(headers, rows), *map(wrapped, notes)])


def _short(config: Config) -> str:
    return f"{config.prefetch_ctas}@{config.lookahead}"
