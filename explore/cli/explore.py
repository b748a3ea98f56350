"""Search the configurations for one workload: by enumeration, and by Optuna over a larger space."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sparda.explore.cli.common import Output, add_scenario, profile_of, scenario_of

if TYPE_CHECKING:
    from sparda.explore.space import Choice
    from sparda.explore.study import Finding

TOP_K = (64, 96, 128, 192, 256)
"""Block budgets of a front over them, where neither the grid nor a quality profile names any."""
OBJECTIVES = {
    "speed": "tokens_per_s",
    "speed-and-blocks": "tokens_per_s,top_k",
    "speed-and-recall": "tokens_per_s,recall",
    "speed-and-perplexity": "tokens_per_s,ppl_increase",
}
"""Names on the command line and those of a study."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    add_scenario(parser)
    parser.add_argument(
        "--trials", type=int, default=0, metavar="N", help="run N Optuna trials over a larger space too"
    )
    parser.add_argument(
        "--objective",
        choices=tuple(OBJECTIVES),
        default="speed",
        help="tokens/s alone, or its trade against top-k, or, with quality=NAME set, against recall or perplexity",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the trials (default: 0)")
    parser.add_argument("--journal", metavar="FILE", help="keep the trials in this file and resume from it")


def run(args: argparse.Namespace) -> Output:
    """Enumerate, choose, and let the trials be judged by the enumeration."""
    from dataclasses import replace

    from sparda.explore import study
    from sparda.explore.cells import public_ctas
    from sparda.explore.explore_text import Found, text_of
    from sparda.explore.front import SPEED, SPEED_AND_BLOCKS, check_objective, considered, front_of
    from sparda.explore.predict import Predictor
    from sparda.explore.space import Space, enumerate_space, noise_of, pick
    from sparda.explore.text import Progress

    scenario = scenario_of(args)
    profile = profile_of(scenario)
    predictor, noise = Predictor.of(profile, scenario), noise_of(profile)
    workload, config, objective = scenario.workload, scenario.config, OBJECTIVES[args.objective]
    check_objective(objective, predictor)
    space = Space.of_predictor(scenario.grid, predictor, workload, config)
    if objective == SPEED_AND_BLOCKS and len(space.top_k) == 1 and not scenario.grid.top_k:
        space = replace(space, top_k=TOP_K)
    progress = Progress("configurations", space.size + max(args.trials, 0))
    oracle = enumerate_space(predictor, space, workload, config, progress.step)
    choice = pick(considered(oracle, config, scenario.limits), noise)
    front = front_of(oracle, noise, objective) if objective != SPEED else ()
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
    misses_from = predictor.misses_from(workload.context_tokens)
    data: dict[str, object] = {
        "profile": profile.name,
        "tier": profile.tier,
        "model": scenario.model_name,
        "misses_from": misses_from,
        "objective": objective,
        **_choice(choice),
        "front": [p.to_dict() for p in front],
        "public": public.to_dict(),
        "gain": choice.best.tokens_per_s / public.tokens_per_s - 1,
        "study": _study(finding) if finding else None,
    }
    floors = scenario.limits.floors
    found = Found(profile.label, scenario.model_name, choice, public, finding, objective, front, misses_from, floors)
    return Output(data, text_of(found))


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
