"""Validation on the GPU: the runs of a cell side by side, interleaved and repeated, so that drift meets all alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from sparda.calibrate.measure.bench import GROWTH_TOKENS, Bench, replayed, step_case
from sparda.calibrate.measure.run import finish, open_bench
from sparda.calibrate.measure.timing import METHOD, replay_us
from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, read_json

ROUNDS = 4
SAMPLES = 4
WARMUP = 1
"""Replays before the samples of each round: the first after another configuration finds other data in the caches."""

SECONDS_PER_RUN = 0.5
"""Set-up and measuring of one configuration of a cell, on an H200."""


def run(cells_path: Path, out: Path, budget_s: float) -> dict[str, object]:
    """Measure every run of every cell in the file; rows of kind ``validation`` go to the store at ``out``.

    Cells measured already are not repeated; a cell that the budget cuts short leaves no row. Raises SpardaError for a
    damaged file or where there is no CUDA GPU.
    """
    data = read_json(cells_path)
    try:
        cells = [
            (_workload(cell["workload"]), [_config(r["config"]) for r in cell["runs"]])
            for cell in cast(list[dict[str, list[dict[str, object]]]], data["cells"])
        ]
        model = str(data["model"])
    except (KeyError, TypeError) as e:
        raise SpardaError(f"{cells_path} is not a file of cells ({e!r}); write it with --winners.") from None
    bench = open_bench(out, model, budget_s)
    total = sum(len(configs) for _, configs in cells)
    bench.say(f"{len(cells)} cells, {total} runs, about {SECONDS_PER_RUN * total + 25:.0f} s, budget {budget_s:.0f} s")

    def work(bench: Bench) -> None:
        for workload, configs in cells:
            _measure_cell(bench, workload, configs)

    return finish(bench, work)


def _workload(plain: object) -> Workload:
    return read(Workload, cast(Mapping[str, object], plain), where="workload")


def _config(plain: object) -> Config:
    return read(Config, cast(Mapping[str, object], plain), where="config")


def _measure_cell(bench: Bench, workload: Workload, configs: list[Config]) -> None:
    if all(bench.measured("validation", c.policy, step_case(workload, c)) for c in configs):
        return
    bench.clock.check()
    bench.keep_only(workload)
    decoders = [bench.decoder(workload, config, beside=True) for config in configs]
    for decoder in decoders:
        decoder.capture()
    replays = len(configs) * (1 + ROUNDS * (WARMUP + SAMPLES)) + 3
    if replays > GROWTH_TOKENS:
        raise SpardaError(f"{len(configs)} runs in one cell need {replays} tokens, room is for {GROWTH_TOKENS}.")
    samples: list[list[float]] = [[] for _ in configs]
    for decoder in {id(d.tiers): d for d in decoders}.values():
        # The first step after a start fetches every block that its choice is not lucky to find.
        for _ in range(3):
            decoder.step()
        decoder.tiers.count_misses()
    for round_ in range(ROUNDS):
        for i in _order(len(configs), round_):
            samples[i] += _samples(decoders[i])
    rows = []
    for config, decoder, seen in zip(configs, decoders, samples, strict=True):
        values = {
            "misses_per_layer": decoder.tiers.misses_per_layer(),
            "pool_aliased": float(decoder.tiers.aliased),
            "rounds": float(ROUNDS),
        }
        method = f"{METHOD}, {ROUNDS} interleaved rounds"
        rows.append(bench.row("validation", config.policy, step_case(workload, config), tuple(seen), method, values))
    bench.keep(*rows)
    best = min(rows, key=lambda r: r.us)
    bench.say(
        f"batch {workload.batch}, {workload.context_tokens} tokens, {workload.miss_rate:.0%} misses: "
        f"{rows[0].us / 1e3:.2f} ms chosen, {best.us / 1e3:.2f} ms best of {len(rows)}"
    )


def _order(count: int, round_: int) -> list[int]:
    """Another order every round, from another start and to and fro: no run always follows the same one."""
    start = round_ * count // ROUNDS
    order = [(start + i) % count for i in range(count)]
    return order[::-1] if round_ % 2 else order


def _samples(decoder: Decoder) -> tuple[float, ...]:
    return replay_us(replayed(decoder), SAMPLES, warmup=WARMUP)
