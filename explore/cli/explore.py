"""Search the configurations for one workload: by enumeration, and by Optuna over a larger space."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sparda.explore.cli.common import Output, add_scenario, profile_of, scenario_of

if TYPE_CHECKING:
    from sparda.explore.predict import Prediction
    from sparda.explore.space import Choice
    from sparda.explore.study import Finding

TOP_K = (64, 96, 128, 192, 256)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    add_scenario(parser)
    parser.add_argument(
        "--trials", type=int, default=0, metavar="N", help="run N Optuna trials over a larger space too"
    )
    parser.add_argument(
        "--objective",
        choices=("speed", "speed-and-blocks"),
        default="speed",
        help="of the trials: tokens/s alone, or its trade against top-k",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the trials (default: 0)")
    parser.add_argument("--journal", metavar="FILE", help="keep the trials in this file and resume from it")


def run(args: argparse.Namespace) -> Output:
    """Enumerate, choose, and let the trials be judged by the enumeration."""
    from dataclasses import replace

    from sparda.explore import study
    from sparda.explore.cells import public_ctas
    from sparda.explore.predict import Predictor
    from sparda.explore.space import Space, enumerate_space, noise_of, pick
    from sparda.explore.text import Progress

    scenario = scenario_of(args)
    profile = profile_of(scenario)
    predictor, noise = Predictor.of(profile, scenario), noise_of(profile)
    space = Space.of_search(scenario.grid, scenario.config)
    objective = study.SPEED
    if args.objective == "speed-and-blocks":
        objective = study.SPEED_AND_BLOCKS
        space = space if scenario.grid.top_k else replace(space, top_k=TOP_K)
    workload, config = scenario.workload, scenario.config
    progress = Progress("configurations", space.size + max(args.trials, 0))
    oracle = enumerate_space(predictor, space, workload, config, progress.step)
    choice = pick([p for p in oracle if p.config.top_k == config.top_k] or oracle, noise)
    public = predictor(workload, replace(config, prefetch_ctas=public_ctas(workload.batch)))
    finding = None
    if args.trials or args.journal:
        wide = study.wide_space(space)
        finding = study.run_study(
            predictor,
            wide,
            workload,
            config,
            trials=args.trials,
            noise=noise,
            seed=args.seed,
            objective=objective,
            storage=args.journal,
            oracle=oracle,
            each=progress.step,
        )
    progress.close()
    data: dict[str, object] = {
        "profile": profile.name,
        "tier": profile.tier,
        "model": scenario.model,
        **_choice(choice),
        "public": public.to_dict(),
        "gain": choice.best.tokens_per_s / public.tokens_per_s - 1,
        "study": _study(finding) if finding else None,
    }
    return Output(data, _text(profile.label, scenario.model, choice, public, finding))


def _choice(choice: Choice) -> dict[str, object]:
    return {
        "best": choice.best.to_dict(),
        "fastest": choice.fastest.to_dict(),
        "ties": [p.to_dict() for p in choice.ties],
        "noise": choice.noise,
        "considered": choice.considered,
        "fitting": choice.fitting,
    }


def _study(finding: Finding) -> dict[str, object]:
    return {
        "objective": finding.objective,
        "trials": finding.trials,
        "new_trials": finding.new_trials,
        "infeasible": finding.infeasible,
        "regret": finding.regret,
        "seed": finding.seed,
        "storage": finding.storage,
        "front": [p.to_dict() for p in finding.front],
        **_choice(finding.choice),
    }


def _lines(predictions: tuple[Prediction, ...]) -> str:
    from sparda.explore.text import columns

    rows = [
        [
            str(c.prefetch_ctas),
            str(c.prefetch_warps),
            str(c.prefetch_stages),
            str(c.lookahead),
            str(c.top_k),
            str(c.slots),
            f"{p.step_us / 1e3:.3f}",
            f"{p.tokens_per_s:.0f}",
            "yes" if p.fits else "no",
            "yes" if p.inside else "no",
        ]
        for p in predictions
        for c in (p.config,)
    ]
    return columns(
        ["CTAs", "warps", "stages", "ahead", "top-k", "slots", "ms", "tokens/s", "fits", "in range"], rows, 0
    )


def _text(label: str, model: str, choice: Choice, public: Prediction, finding: Finding | None) -> str:
    from sparda.explore.text import count, percent, wrapped

    p = choice.best
    w = p.workload
    shown = choice.ties[:12]
    lines = [
        wrapped(
            f"{model}, batch {w.batch}, {w.context_tokens} tokens, {percent(w.miss_rate)} misses. Profile {label}."
        ),
        f"{choice.considered} configurations enumerated, {choice.fitting} fit in memory.",
        f"Best: {p.step_us / 1e3:.3f} ms, {p.tokens_per_s:.0f} tokens/s ({_band(p)}).",
        wrapped(
            f"The public rule's {count(public.config.prefetch_ctas, 'CTA')}, all else as the scenario has it: "
            f"{public.step_us / 1e3:.3f} ms, {public.tokens_per_s:.0f} tokens/s; the best is "
            f"{percent(p.tokens_per_s / public.tokens_per_s - 1, sign=True)}."
        ),
        _lines((p,)),
        "",
        f"{len(choice.ties)} within {percent(choice.noise)} of the fastest, fewest CTAs first:",
        _lines(shown),
    ]
    if len(shown) < len(choice.ties):
        lines.append(f"... and {len(choice.ties) - len(shown)} more (--json lists all)")
    if not p.fits:
        lines.append(wrapped(f"Nothing fits: {p.limit_reason}. The speed holds where there is enough."))
    if not p.inside:
        lines.append(wrapped(f"Outside the measured range: {'; '.join(p.outside_reasons)}."))
    if finding:
        lines += ["", *_study_lines(finding)]
    return "\n".join(lines)


def _band(p: Prediction) -> str:
    return "error unknown" if p.low is None or p.high is None else f"band {p.low:.0f} to {p.high:.0f}"


def _study_lines(finding: Finding) -> list[str]:
    from sparda.explore.text import percent

    best = finding.choice.best
    regret = "unknown" if finding.regret is None else percent(finding.regret, 2, sign=True)
    lines = [
        f"Optuna: {finding.trials} trials ({finding.new_trials} new, {finding.infeasible} infeasible), "
        f"{'not kept' if finding.storage == 'memory' else f'kept in {finding.storage}'}.",
        f"Best: {best.tokens_per_s:.0f} tokens/s; regret in step time against the enumeration {regret}.",
        _lines((best,)),
    ]
    if finding.front:
        lines += ["", "Tokens/s for each number of blocks read:", _lines(finding.front)]
    return lines
