"""``sparda measure``: a session on the GPU, within a budget, resumable, every finished row on disk."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from sparda.calibrate.measure.bench import Bench, Clock, OutOfTimeError
from sparda.calibrate.measure.corun import measure_corun
from sparda.calibrate.measure.kernels import measure_kernels
from sparda.calibrate.measure.link import measure_link
from sparda.calibrate.measure.policies import measure_policies, measure_residency
from sparda.calibrate.measure.provenance import clocks, gpu_id, provenance
from sparda.calibrate.measure.steps import measure_steps
from sparda.calibrate.measure.timing import warm_clocks
from sparda.calibrate.measure.watch import Watch
from sparda.calibrate.store import Store, grouped
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import model_named

PARTS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "link": (measure_link, 45.0),
    "kernels": (measure_kernels, 120.0),
    "corun": (measure_corun, 95.0),
    "steps": (measure_steps, 210.0),
    "policies": (measure_policies, 120.0),
    "residency": (measure_residency, 60.0),
}
"""Parts of a session and how many seconds each takes on an H200."""


def open_bench(out: Path, model: str, budget_s: float, seed: int = 0) -> Bench:
    """A session on device 0 that writes into ``out``. Raises SpardaError where there is no CUDA GPU."""
    if not torch.cuda.is_available():
        raise SpardaError("no CUDA GPU is visible to torch; measuring and validating need one.")
    store = Store(out)
    session = uuid.uuid4().hex[:8]
    shape, found = model_named(model), provenance(seed)
    warm_clocks()
    store.add_session(session, {**found, "clocks_at_start": clocks(), "model": model})
    return Bench(store, session, shape, Clock(budget_s), seed=seed)


def finish(bench: Bench, work: Callable[[Bench], None]) -> dict[str, object]:
    """Do the session's work and record how it ended: complete, budget spent, interrupted or failed.

    The GPU is watched meanwhile. What interrupted the work or made it fail goes on upwards.
    Returns what was done: session, rows by kind, how it ended, where the rows are.
    """
    ended = "failed"
    watch = bench.watch = Watch(gpu_id())
    try:
        with watch:
            work(bench)
        ended = "complete"
    except OutOfTimeError:
        ended = "budget spent"
        bench.say("budget spent; run the same command again to go on where this stopped")
    except KeyboardInterrupt:
        ended = "interrupted"
        raise
    finally:
        known = bench.store.provenance[bench.session]
        bench.store.add_session(
            bench.session, {**known, "watched": watch.summary(), "clocks_at_end": clocks(), "ended": ended}
        )
    rows = grouped((r for r in bench.store.rows() if r.session == bench.session), lambda r: r.kind)
    counts = {kind: len(of_kind) for kind, of_kind in rows.items()}
    return {"session": bench.session, "rows": counts, "ended": ended, "folder": str(bench.store.folder)}


def main_measure(out: Path, budget_s: float, parts: list[str], model: str = "minicpm4.1-8b") -> dict[str, object]:
    """Measure ``parts`` (all of PARTS when empty) into the store at ``out``; rows already there are not repeated."""
    unknown = [p for p in parts if p not in PARTS]
    if unknown:
        raise SpardaError(f"unknown part {unknown[0]!r}; allowed are {', '.join(PARTS)}.")
    todo = [p for p in PARTS if not parts or p in parts]
    bench = open_bench(out, model, budget_s)
    bench.say(f"about {sum(PARTS[p][1] for p in todo) + 25:.0f} s of work, budget {budget_s:.0f} s: {', '.join(todo)}")

    def work(bench: Bench) -> None:
        for part in todo:
            bench.say(part)
            PARTS[part][0](bench)

    return finish(bench, work)
