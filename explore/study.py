"""Search with Optuna where enumeration is too long: a study that can be resumed and is held to an oracle."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend

from sparda.engine.config import Config, Workload, check_fits
from sparda.engine.errors import SpardaError
from sparda.engine.loader import to_plain
from sparda.explore.front import (
    DIRECTIONS,
    OF_QUALITY,
    SPEED,
    check_objective,
    considered,
    front_of,
    front_regret,
    regret_of,
    values_of,
)
from sparda.explore.predict import Prediction, Predictor
from sparda.explore.space import Choice, Space, config_at, pick

POPULATION = 24


@dataclass(frozen=True, slots=True)
class Finding:
    """What a study came to.

    ``regret`` is the found step time over the oracle's, less 1: below 0 where the study searched further than
    the oracle's grid; None without an oracle. With two objectives it is the worst over the levels of the second one.
    """

    objective: str
    trials: int
    new_trials: int
    infeasible: int
    choice: Choice
    front: tuple[Prediction, ...]
    regret: float | None
    seed: int
    storage: str


def wide_space(space: Space) -> Space:
    """A larger space around ``space``, too large to enumerate in a moment: every CTA count, stage count, lookahead."""
    return replace(
        space,
        prefetch_ctas=tuple(range(1, max(space.prefetch_ctas) + 1)),
        prefetch_warps=(1, 2, 4, 8),
        prefetch_stages=tuple(range(1, 13)),
        lookahead=tuple(range(max(space.lookahead) + 1)),
    )


def run_study(
    predictor: Predictor,
    space: Space,
    workload: Workload,
    base: Config,
    *,
    trials: int,
    noise: float,
    seed: int = 0,
    objective: str = SPEED,
    storage: str | None = None,
    oracle: Sequence[Prediction] = (),
    each: Callable[[], None] = lambda: None,
) -> Finding:
    """Run ``trials`` more trials and choose among all the study's, those of earlier runs included.

    ``storage``: None keeps the study in memory, a path keeps it in an Optuna journal, a URL goes to Optuna as it
    is. Raises SpardaError where the storage holds a study of something else.
    """
    check_objective(objective, predictor)
    if trials < 0:
        raise SpardaError(f"--trials is {trials}; give 0 or more.")
    with _quiet():
        study = _open(storage, objective, seed, _fingerprint(predictor, space, workload, base, objective))
        before = len(study.trials)
        study.optimize(
            lambda trial: _evaluate(trial, predictor, space, workload, base, objective),
            n_trials=trials,
            callbacks=[lambda _study, _trial: each()],
        )
        seen = study.get_trials(deepcopy=False)
    found = _found(predictor, workload, base, objective, seen)
    choice = pick(considered(found, base, predictor.limits), noise)
    front = front_of(found, noise, objective) if objective != SPEED else ()
    regret = regret_of(choice, considered(oracle, base, predictor.limits))
    return Finding(
        objective=objective,
        trials=len(seen),
        new_trials=len(seen) - before,
        # A trial that an interruption cut short is neither.
        infeasible=sum(t.state == optuna.trial.TrialState.PRUNED or _over(t) for t in seen),
        choice=choice,
        front=front,
        regret=front_regret(found, oracle, objective) if front else regret,
        seed=seed,
        storage=storage or "memory",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna's log lines and experimental notices say nothing a user of this search could act on."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)


def _fingerprint(predictor: Predictor, space: Space, workload: Workload, base: Config, objective: str) -> str:
    """Identity of what is searched; machine and costs count through the profile's sessions and name."""
    profile = predictor.profile
    parts: list[object] = [profile.name, profile.tier, list(profile.sessions), predictor.shape.name, objective]
    # What is not set is left out, so that a study begun before it could be set goes on.
    limits = {k: v for k, v in to_plain(predictor.limits).items() if v or k.endswith("_gib")}
    axes = {name: list(values) for name, values in space.axes.items()}
    parts += [axes, to_plain(workload), to_plain(base), limits]
    if predictor.quality:
        parts += ["quality", to_plain(predictor.quality.profile)]
    if predictor.selection:
        parts += ["selection", to_plain(predictor.selection)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _storage(text: str | None) -> Any:
    if text is None:
        return None
    if "://" in text:
        return text
    path = Path(text)
    if not path.parent.is_dir():
        raise SpardaError(f"{path}: its folder does not exist; give a journal file in an existing folder.")
    if path.is_dir():
        raise SpardaError(f"{path} is a folder; give a file for the study's journal.")
    return optuna.storages.JournalStorage(JournalFileBackend(str(path)))


def _open(storage: str | None, objective: str, seed: int, fingerprint: str) -> optuna.Study:
    try:
        study = optuna.create_study(
            storage=_storage(storage),
            study_name="sparda",
            directions=list(DIRECTIONS[objective]),
            load_if_exists=True,
        )
        known = study.user_attrs.get("searches")
        done = len(study.trials)
    except SpardaError:
        raise
    except Exception as e:  # Optuna passes on whatever its storage raises: JSON, OS and database errors.
        raise SpardaError(f"{storage}: cannot be opened as a study ({type(e).__name__}: {e}); give another.") from None
    if known is None:
        study.set_user_attr("searches", fingerprint)
    elif known != fingerprint:
        raise SpardaError(
            f"{storage} holds a study of another scenario, profile, space or objective; give a new file, or the "
            "arguments it was begun with."
        )
    # A resumed sampler starts from another seed, or it would ask for the first trials once more.
    sampler = optuna.samplers.TPESampler(seed=seed + done, multivariate=True)
    genetic = optuna.samplers.NSGAIISampler(seed=seed + done, population_size=POPULATION)
    study.sampler = sampler if objective == SPEED else genetic
    return study


def _evaluate(
    trial: optuna.Trial, predictor: Predictor, space: Space, workload: Workload, base: Config, objective: str
) -> tuple[float, ...]:
    values = {name: _suggest(trial, name, axis) for name, axis in space.axes.items()}
    try:
        config = config_at(base, values, predictor.spec, workload)
        check_fits(predictor.shape, predictor.spec, workload, config)
    except SpardaError:
        # Two values that cannot be together: nothing to predict, and nothing to learn a speed from.
        raise optuna.TrialPruned from None
    p = predictor(workload, config)
    trial.set_constraint("gpu_over_gib", p.gpu_over_gib)
    trial.set_constraint("pinned_over_gib", p.pinned_over_gib)
    for name in predictor.limits.floors:
        of_recall = name == "min_recall"
        trial.set_constraint(name, p.broken.recall_short if of_recall else p.broken.ppl_over)
    found = values_of(p, objective)
    if found is None:
        # Nothing is known of its quality: no value, and nothing to learn from it.
        raise optuna.TrialPruned
    return found


def _suggest(trial: optuna.Trial, name: str, values: Sequence[int] | Sequence[float]) -> int | float:
    """An evenly spaced axis as integers, so that the sampler learns from neighbours; any other as categories."""
    steps = {b - a for a, b in pairwise(values)} or {1}
    if all(isinstance(v, int) for v in values) and len(steps) == 1 and min(steps) > 0:
        return trial.suggest_int(name, int(values[0]), int(values[-1]), step=int(min(steps)))
    return trial.suggest_categorical(name, list(values))


def _over(trial: optuna.trial.FrozenTrial) -> bool:
    return any(value > 0 for value in trial.constraints.values())


def _found(
    predictor: Predictor,
    workload: Workload,
    base: Config,
    objective: str,
    trials: Sequence[optuna.trial.FrozenTrial],
) -> list[Prediction]:
    """Predictions of all finished trials; an earlier run's are played again, which takes milliseconds each."""
    done = [t for t in trials if t.state == optuna.trial.TrialState.COMPLETE]
    configs = dict.fromkeys(config_at(base, t.params, predictor.spec, workload) for t in done)
    if not configs:
        known = " of known quality" if objective in OF_QUALITY else ""
        raise SpardaError(
            f"the study has no finished trial with a possible configuration{known}; give more trials"
            + (", or an objective that is known of the policy." if known else ".")
        )
    return [predictor(workload, c) for c in configs]
