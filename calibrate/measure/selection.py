"""Decode steps on the GPU that follow a selection trace: their time, and misses counted beside those foretold."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.measure.run import finish, open_bench
from sparda.calibrate.measure.steps import stepped
from sparda.calibrate.measure.timing import METHOD
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload, check_fits
from sparda.engine.dynamics.choices import Choices
from sparda.engine.dynamics.fit import fit
from sparda.engine.dynamics.generator_params import GeneratorParams
from sparda.engine.dynamics.residents import miss_counts
from sparda.engine.errors import SpardaError
from sparda.engine.policies import make_plan, resident_layers
from sparda.engine.replay import drawn, follows, replay_trace, spread_over
from sparda.engine.shapes import ModelShape, SparseSpec, model_named

BUDGET_S = 1800.0
CAPTURE = 1
"""Steps that capturing takes before the first of the others."""


@dataclass(frozen=True, slots=True)
class Followed:
    """``how``: replayed as recorded, or generated from its fit. ``choices``: what every layer and head then chooses."""

    how: str
    choices: Choices


@dataclass(frozen=True, slots=True)
class Measured:
    """A step that followed a trace. Misses are blocks of an offloaded layer and step; ``row`` has every sample."""

    how: str
    counted: float
    foretold: float
    row: Row


def followed(
    given: Choices | GeneratorParams, shape: ModelShape, workload: Workload, config: Config, steps: int, seed: int
) -> Followed:
    """What a benchmark chooses in ``steps`` steps: the trace itself where it is of this case, else one drawn like it.

    Raises SpardaError where a trace of this very case is too short.
    """
    spec = SparseSpec()
    if isinstance(given, Choices) and not follows(given, spec, workload, config):
        length = int(given.lengths().min())
        if length < steps:
            raise SpardaError(
                f"the trace goes on for {length} steps and {steps} are decoded; lower --warmup or --repeats, or fit it."
            )
        return Followed("replayed", spread_over(given, shape, workload, steps))
    params = given if isinstance(given, GeneratorParams) else fit(given)
    return Followed("generated", drawn(shape, spec, workload, config, params=params, steps=steps, seed=seed))


def foretold_misses(trace: Followed, shape: ModelShape, config: Config, skip: int) -> float:
    """Blocks of a step and offloaded layer after ``skip`` steps, as the engine's eviction fetches them."""
    whole = resident_layers(config, shape.layers)
    counts = miss_counts(trace.choices, config.slots, skip=skip)[:, whole:]
    return float(counts.sum(2).mean()) if counts.size else 0.0


def measure_trace(
    given: Choices | GeneratorParams, name: str, model: str, workload: Workload, config: Config, *, out: Path | None,
    warmup: int, repeats: int, seed: int = 0,
) -> Measured:  # fmt: skip
    """Measure a step that follows the trace ``name``; its row goes to the store ``out``, of kind ``trace``.

    Raises SpardaError where there is no GPU or the case cannot be.
    """
    shape = model_named(model)
    check_fits(shape, SparseSpec(), workload, config)
    if not make_plan(shape, SparseSpec(), workload, config).of_kind("select"):
        raise SpardaError(f"policy {config.policy} chooses no blocks; give one that does with --set config.policy=…")
    trace = followed(given, shape, workload, config, CAPTURE + warmup + repeats, seed)
    foretold = foretold_misses(trace, shape, config, CAPTURE + warmup)
    stated = {k: v for k, v in asdict(workload).items() if k != "miss_rate"}
    case = {**stated, **config.settings, "trace": name, "followed": trace.how, "seed": seed, "warmup": warmup}
    kept: list[Row] = []

    def work(bench: Bench) -> None:
        maker = partial(replay_trace, choices=trace.choices)
        samples, values = stepped(bench.decoder(workload, config, trace=maker), repeats, warmup=warmup)
        values["foretold_per_layer"] = foretold
        kept.append(bench.row("trace", config.policy, case, samples, METHOD, values))
        bench.keep(*kept)

    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        finish(open_bench(folder, model, BUDGET_S, seed), work)
    return Measured(trace.how, kept[0].values["misses_per_layer"], foretold, kept[0])
