"""All policies side by side, and what more resident blocks spare where blocks come back: steps, measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.measure.parts import Case
from sparda.calibrate.measure.steps import measure_step, step, stepped
from sparda.calibrate.measure.timing import METHOD
from sparda.calibrate.store import Value
from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.policies import resident_layers, side_data
from sparda.engine.reuse import reuse_trace
from sparda.engine.shapes import ModelShape, SparseSpec

CELLS = {8192: (1, 16, 64), 32768: (1, 4, 16, 32, 64), 131072: (1, 4, 8, 16, 32, 64)}
"""Batches by context in tokens."""
MISS_RATE = 0.06
CTAS = 3
"""Prefetch CTAs of whatever offloads: the fewest that fill a link, in every batch near the best count."""
FARTHER = {(batch, 131072): (2, 3, 4) for batch in (4, 16, 64)}
"""Lookaheads above 1 that sparda is measured with, by (batch, context)."""
REPEATS = 8

RESIDENCY_BATCHES, RESIDENCY_CONTEXT = (16, 64), 131072
RESIDENT = (96, 120, 144, 192, 384, 768)
TURNOVERS = (0.06, 0.186)
"""Shares of the free picks that a step replaces: few, and many."""
TAIL = 3.0
PERIOD = 384
"""Steps of a reuse trace: no layer gets to its end, not even the one that begins farthest into it."""
FILL = 80
"""Steps before misses are counted: slots hold by then what a long run would leave there."""
RESIDENCY_REPEATS = 16


def _configs(workload: Workload, layers: int) -> list[Config]:
    """Those of one cell, in an order in which those that share KV tiers follow each other."""
    found = []
    for policy in POLICIES:
        config = Config(policy=policy)
        found.append(Config(policy=policy, prefetch_ctas=CTAS) if resident_layers(config, layers) < layers else config)
    for ahead in FARTHER.get((workload.batch, workload.context_tokens), ()):
        found.append(Config(policy="sparda", lookahead=ahead, prefetch_ctas=CTAS))
    return sorted(found, key=lambda c: (resident_layers(c, layers), side_data(c)))


def _steps(shape: ModelShape) -> Iterator[tuple[Workload, Config]]:
    for context, batches in CELLS.items():
        for batch in batches:
            workload = Workload(batch, context, MISS_RATE)
            for config in _configs(workload, shape.layers):
                yield workload, config


def cases(shape: ModelShape) -> Iterator[Case]:
    """Every row of the part ``policies``."""
    return (step("policy", workload, config) for workload, config in _steps(shape))


def measure_policies(bench: Bench) -> None:
    """Rows of kind ``policy``, as those of kind ``step``: every policy, batch and context at the same miss rate.

    What the GPU has no memory for leaves no row; what it would need can be computed.
    """
    for workload, config in _steps(bench.shape):
        if bench.due(step("policy", workload, config)):
            measure_step(bench, workload, config, kind="policy", repeats=REPEATS)


def _residencies() -> Iterator[tuple[Workload, Config, float]]:
    for batch in RESIDENCY_BATCHES:
        for resident in RESIDENT:
            for turnover in TURNOVERS:
                config = Config(prefetch_ctas=CTAS, resident_blocks=resident)
                # What enters is all that can miss: the plan counts on that.
                free = config.top_k - SparseSpec().forced
                yield Workload(batch, RESIDENCY_CONTEXT, turnover * free / config.top_k), config, turnover


def residency_case(workload: Workload, config: Config, turnover: float) -> dict[str, Value]:
    """The conditions of a residency row: a reuse in the miss rate's place, which is counted here and not stated."""
    stated = {k: v for k, v in asdict(workload).items() if k != "miss_rate"}
    # Rows measured before there was a choice of paths do not name one.
    turned = {k: v for k, v in asdict(config).items() if k != "transfer" or v != Config().transfer}
    return {**stated, "turnover": turnover, "tail": TAIL, **turned}


def _residency(workload: Workload, config: Config, turnover: float) -> Case:
    return Case("residency", config.policy, residency_case(workload, config, turnover), workload, config)


def residency_cases(shape: ModelShape) -> Iterator[Case]:
    """Every row of the part ``residency``."""
    return (_residency(*found) for found in _residencies())


def measure_residency(bench: Bench) -> None:
    """Rows of kind ``residency``: steps of sparda on a reuse trace, by resident blocks; misses as counted."""
    for workload, config, turnover in _residencies():
        case = _residency(workload, config, turnover)
        if not bench.due(case):
            continue
        maker = partial(reuse_trace, turnover=turnover, tail=TAIL, period=PERIOD)
        try:
            decoder = bench.decoder(workload, config, trace=maker)
        except SpardaError as e:
            bench.say(f"skipped: {e}")
            continue
        samples, values = stepped(decoder, RESIDENCY_REPEATS, warmup=FILL)
        bench.keep(bench.row("residency", config.policy, case.conditions, samples, METHOD, values))
        # The next one's slots may need the memory of these.
        del decoder
