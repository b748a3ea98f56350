"""Whole decode steps, measured: the hold-out that no fit ever sees."""

from __future__ import annotations

from collections.abc import Iterator

from sparda.calibrate.measure.bench import Bench, replayed, step_case
from sparda.calibrate.measure.parts import Case
from sparda.calibrate.measure.timing import METHOD, WARMUP, replay_us
from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import ModelShape

REPEATS = 16
FULL = 131072
CTAS = (1, 2, 3, 4, 8, 16)
FEW_CTAS = (2, 4, 16)
MORE_CTAS = (6, 32, 64)
"""Only at one miss rate: what they tell lies between, or beyond, the others."""
MISSES = (0.0, 0.03, 0.06, 0.12)
MANY_MISSES = 0.25


def _steps() -> Iterator[tuple[Workload, Config]]:
    """Grouped by (batch, context, residency), which is what costs time to set up."""
    for batch in (4, 16, 64, 32, 8, 1):
        for ctas in FEW_CTAS if batch in (1, 8) else CTAS:
            for miss in MISSES:
                yield Workload(batch, FULL, miss), Config(prefetch_ctas=ctas)
        for ctas in MORE_CTAS:
            yield Workload(batch, FULL, 0.06), Config(prefetch_ctas=ctas)
        for ctas in (2, 4):
            yield Workload(batch, FULL, MANY_MISSES), Config(prefetch_ctas=ctas)
        for miss in (0.03, 0.12):
            yield Workload(batch, FULL, miss), Config(prefetch_ctas=16, prefetch_warps=8, prefetch_stages=1)
            for ctas in (2, 3, 4):
                yield Workload(batch, FULL, miss), Config(prefetch_ctas=ctas, prefetch_stages=12)
            yield Workload(batch, FULL, miss), Config(policy="sparda-on-demand")
            yield Workload(batch, FULL, miss), Config(policy="sparse")
        for miss in (0.03, 0.06, 0.12):
            for ctas in (2, 4):
                yield Workload(batch, FULL, miss), Config(lookahead=2, prefetch_ctas=ctas)
        for lookahead in (3, 4):
            for miss in (0.06, 0.12):
                yield Workload(batch, FULL, miss), Config(lookahead=lookahead)
    for batch in (4, 16, 64):
        for ctas in (2, 3, 8):
            for miss in (0.0, 0.06, 0.12):
                yield Workload(batch, 32768, miss), Config(prefetch_ctas=ctas)
        for top_k in (64, 128):
            for miss in (0.03, 0.12):
                yield Workload(batch, 65536, miss), Config(top_k=top_k, prefetch_ctas=2)
                yield Workload(batch, 65536, miss), Config(top_k=top_k, prefetch_ctas=8)
        for ctas in (2, 4):
            yield Workload(batch, 16384, 0.06), Config(prefetch_ctas=ctas)
        if batch < 64:
            yield Workload(batch, 32768, 0.0), Config(policy="sparse-resident")
        for resident in (144, 192):
            yield Workload(batch, 65536, 0.06), Config(resident_blocks=resident)


def step(kind: str, workload: Workload, config: Config) -> Case:
    """The case of one whole step."""
    return Case(kind, config.policy, step_case(workload, config), workload, config)


def cases(shape: ModelShape) -> Iterator[Case]:
    """Every row of this part."""
    return (step("step", workload, config) for workload, config in _steps())


def measure_steps(bench: Bench) -> None:
    """Rows of kind ``step``: microseconds of every replay; misses per layer and step, as counted, in values."""
    for workload, config in _steps():
        if bench.due(step("step", workload, config)):
            measure_step(bench, workload, config)


def measure_step(
    bench: Bench, workload: Workload, config: Config, *, kind: str = "step", repeats: int = REPEATS
) -> None:
    """Measure one step and keep its row; a case that cannot be set up is reported and skipped."""
    try:
        decoder = bench.decoder(workload, config)
    except SpardaError as e:
        bench.say(f"skipped: {e}")
        return
    samples, values = stepped(decoder, repeats)
    stated = decoder.trace.miss_rate if decoder.trace else None
    values["miss_rate_of_trace"] = -1.0 if stated is None else stated
    bench.keep(bench.row(kind, config.policy, step_case(workload, config), samples, METHOD, values))


def stepped(decoder: Decoder, repeats: int, warmup: int = WARMUP) -> tuple[tuple[float, ...], dict[str, float]]:
    """Capture a decoder and let it decode, as ``decoded`` says."""
    decoder.capture()
    return decoded(decoder, repeats, warmup)


def decoded(decoder: Decoder, repeats: int, warmup: int) -> tuple[tuple[float, ...], dict[str, float]]:
    """Microseconds of ``repeats`` steps of a captured decoder, and what was counted during these.

    ``warmup`` steps come first, neither timed nor counted.
    """
    for _ in range(warmup):
        decoder.step()
    decoder.tiers.count_misses()
    samples = replay_us(replayed(decoder), repeats, warmup=0)
    return samples, {
        "misses_per_layer": decoder.tiers.misses_per_layer(),
        "pool_aliased": float(decoder.tiers.aliased),
    }
