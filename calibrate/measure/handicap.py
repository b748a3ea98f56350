"""Whole decode steps on a GPU with part of it taken away: fewer multiprocessors, a shared link, shared GPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch

from sparda.calibrate.measure.bench import Bench, step_case
from sparda.calibrate.measure.parts import Case
from sparda.calibrate.measure.rivals import Handicap, Rival, Rivals, beside
from sparda.calibrate.measure.shares import measure_shares
from sparda.calibrate.measure.steps import decoded
from sparda.calibrate.measure.timing import METHOD
from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import ModelShape
from sparda.kernels.launch import with_multiprocessors

SECONDS = 35.0
"""What all of it took on an H200, pinning aside."""

FULL = 131072
NONE = Handicap()
HANDICAPS = (
    *(Handicap(held_sms=sms) for sms in (16, 32, 64)),
    Handicap(link_rival="copy"),
    *(Handicap(hbm_ctas=ctas) for ctas in (4, 8, 16)),
)
STEPS = 12
"""Steps timed under each handicap; twice as many without: before all others, and after."""
WARMUP = 2
FIRST = 3
"""Steps after the start of a batch, which fetch every block that its choice is not lucky to find."""
LONGER = 4.0
"""Times as long as the steps take without a rival that a copy beside them lasts, if it has the link to itself."""
ATTEMPTS = 2
"""Runs of a handicap whose rival did not last; the second on another stream, a copy twice as long."""

BESIDE = f"{METHOD}, on a GPU tiled for the multiprocessors left, between runs without a rival"


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds of the steps of a run, what was counted in it, and whether the rival lasted."""

    samples: tuple[float, ...]
    values: dict[str, float]
    complete: bool = True


def _cases() -> Iterator[tuple[Workload, Config]]:
    for batch in (4, 16, 64):
        workload = Workload(batch, FULL, 0.03 if batch == 64 else 0.06)
        for ctas in (2, 4):
            yield workload, Config(prefetch_ctas=ctas)
        if batch < 64:
            yield workload, Config(policy="sparse")
            yield workload, Config(policy="sparse-resident")


def cases(shape: ModelShape) -> Iterator[Case]:
    """Every row of ``measure_handicap``, but for what ``measure_shares`` leaves."""
    for workload, config in _cases():
        for handicap in (NONE, *HANDICAPS):
            case = {**step_case(workload, config), **handicap.case}
            yield Case("handicap", config.policy, case, workload, config)


def measure_handicap(bench: Bench) -> None:
    """Rows of kind ``handicap``, as those of kind ``step``, and what ``measure_shares`` leaves.

    A case is a step's with ``held_sms``, ``link_rival`` and ``hbm_ctas``. The decoder is tiled for the multiprocessors
    that are left, ``tiled_sms`` in values; ``rival_gb_s`` is what the rival moved while the steps were timed, and
    ``baseline_us`` the step without one in the same session, from ``before_us`` and ``after_us`` in that row.
    A rival that ended before the steps did makes the row incomplete.
    """
    todo = {
        (workload, config): missing
        for workload, config in _cases()
        if (missing := [h for h in (NONE, *HANDICAPS) if not _measured(bench, workload, config, h)])
    }
    bench.say(
        f"what rivals take, then {len(todo)} steps under {sum(map(len, todo.values()))} handicaps in all, about "
        f"{SECONDS * len(todo) / len(list(_cases())):.0f} s"
    )
    rivals = Rivals(bench)
    measure_shares(bench, rivals)
    for (workload, config), missing in todo.items():
        if bench.hindered(Case("handicap", config.policy, {}, workload, config)):
            continue
        bench.clock.check()
        try:
            _measure(bench, rivals, workload, config, [h for h in missing if h != NONE])
        except SpardaError as e:
            bench.say(f"skipped: {config.policy}, batch {workload.batch}: {e}")


def _measured(bench: Bench, workload: Workload, config: Config, handicap: Handicap) -> bool:
    return bench.measured("handicap", config.policy, {**step_case(workload, config), **handicap.case})


def _measure(bench: Bench, rivals: Rivals, workload: Workload, config: Config, handicaps: list[Handicap]) -> None:
    """The handicaps of one step between two runs without; their rows are kept together."""
    bench.keep_only(workload)
    there = torch.cuda.get_device_properties(bench.device).multi_processor_count
    left = {h: there - h.taken for h in (NONE, *handicaps)}
    decoders = {sms: _captured(bench, workload, config, sms) for sms in sorted(set(left.values()), reverse=True)}
    for _ in range(FIRST):
        decoders[there].step()
    before = _run(decoders[there], Rival())
    lasting_us = LONGER * median(before.samples) * (WARMUP + STEPS)
    found = {h: _beside(decoders[left[h]], rivals, h, lasting_us) for h in handicaps}
    after = _run(decoders[there], Rival())
    found = {NONE: Timed((*before.samples, *after.samples), before.values), **found}
    values = {"baseline_us": median(found[NONE].samples)}
    ends = {"before_us": median(before.samples), "after_us": median(after.samples)}
    rows = []
    for handicap, timed in found.items():
        case = {**step_case(workload, config), **handicap.case}
        seen = {**timed.values, **values, "tiled_sms": float(left[handicap]), **(ends if handicap == NONE else {})}
        rows.append(bench.row("handicap", config.policy, case, timed.samples, BESIDE, seen, complete=timed.complete))
        if not timed.complete:
            bench.say(f"incomplete: {handicap} ended before the steps beside it did")
    bench.keep(*rows)
    bench.say(f"{config.policy}, batch {workload.batch}: {values['baseline_us'] / 1e3:.2f} ms without a rival")


def _captured(bench: Bench, workload: Workload, config: Config, sms: int) -> Decoder:
    """A decoder as for a GPU with ``sms`` multiprocessors; all of a workload share KV tiers."""
    with with_multiprocessors(sms):
        decoder = bench.decoder(workload, config, beside=True)
        decoder.capture()
    return decoder


def _beside(decoder: Decoder, rivals: Rivals, handicap: Handicap, lasting_us: float) -> Timed:
    for attempt in range(1, ATTEMPTS + 1):
        # A graph's first replay sets it up, which can wait for all that runs.
        decoder.step()
        timed = _run(decoder, rivals.of(handicap, attempt * lasting_us))
        if timed.complete:
            break
    return timed


def _run(decoder: Decoder, rival: Rival) -> Timed:
    with beside(rival):
        for _ in range(WARMUP):
            decoder.step()
        rival.begin()
        samples, values = decoded(decoder, STEPS, warmup=0)
        rival.end()
    return Timed(samples, {**values, "rival_gb_s": rival.gb_s}, rival.lasted)
