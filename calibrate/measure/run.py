"""``sparda measure``: a session on the GPU, within a budget, resumable, every finished row on disk."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sparda.calibrate.measure import (
    corun,
    handicap,
    kernels,
    link,
    path_steps,
    paths,
    policies,
    steps,
    steptrace,
    training,
)
from sparda.calibrate.measure.bench import Bench, Clock, OutOfTimeError
from sparda.calibrate.measure.estimate import Estimate, estimate
from sparda.calibrate.measure.parts import Part
from sparda.calibrate.measure.provenance import clocks, gpu_id, provenance
from sparda.calibrate.measure.timing import warm_clocks
from sparda.calibrate.measure.watch import Watch
from sparda.calibrate.store import Store, grouped
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import model_named

MODEL = "minicpm4.1-8b"
"""What is measured unless another model is named."""

PARTS = {
    part.name: part
    for part in (
        Part("link", link.measure_link, 0.3, link.cases),
        Part("kernels", kernels.measure_kernels, 0.66, kernels.cases),
        Part("corun", corun.measure_corun, 0.056, corun.cases),
        Part("steps", steps.measure_steps, 0.62, steps.cases),
        Part("paths", paths.measure_paths, 0.06, paths.cases),
        Part("pathsteps", path_steps.measure_path_steps, 1.0, path_steps.cases),
        Part("policies", policies.measure_policies, 0.9, policies.cases, calibrates=False),
        Part("residency", policies.measure_residency, 2.5, policies.residency_cases, calibrates=False),
        Part("handicap", handicap.measure_handicap, 0.44, handicap.cases, calibrates=False),
        Part("training", training.measure_training, 33.0, training.cases, calibrates=False),
        # Files, not rows: none is counted.
        Part("traces", steptrace.measure_step_traces, 0.0, lambda shape: (), calibrates=False),
    )
}
"""Parts of a session, in the order in which they are measured."""


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


def named_parts(parts: Sequence[str]) -> list[Part]:
    """Those parts in their own order; all when ``parts`` is empty. Raises SpardaError for an unknown one."""
    unknown = [p for p in parts if p not in PARTS]
    if unknown:
        raise SpardaError(f"unknown part {unknown[0]!r}; allowed are {', '.join(PARTS)}.")
    return [part for name, part in PARTS.items() if not parts or name in parts]


def estimate_measure(out: Path, budget_s: float, parts: Sequence[str], model: str = MODEL) -> Estimate:
    """What ``main_measure`` would do with the same arguments. Needs no GPU and writes nothing.

    What fits is judged by the GPU that is here, else by the one that measured into ``out``.
    """
    store = Store(out)
    _refuse_another_model(store, model)
    return estimate(named_parts(parts), store, model_named(model), _gpu_bytes(store), budget_s)


def _gpu_bytes(store: Store) -> int | None:
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    known = [int(str(p["gpu_memory_bytes"])) for p in store.provenance.values() if "gpu_memory_bytes" in p]
    return known[0] if known else None


def _refuse_another_model(store: Store, model: str) -> None:
    """A row's case does not name the model: with two in one store, one's rows would pass for the other's."""
    kinds = {case.kind for part in PARTS.values() for case in part.cases(model_named(model))}
    sessions = {r.session for r in store.rows() if r.kind in kinds}
    others = {str(p.get("model")) for name, p in store.provenance.items() if name in sessions} - {model}
    if others:
        raise SpardaError(
            f"{store.folder} holds measurements of {', '.join(sorted(others))}; {model} is asked for. "
            "Give a folder of its own to each model."
        )


def main_measure(
    out: Path,
    budget_s: float,
    parts: Sequence[str],
    model: str = MODEL,
    each: Callable[[int, int], None] | None = None,
) -> dict[str, object]:
    """Measure ``parts`` (all of PARTS when empty) into the store at ``out``; rows already there are not repeated.

    ``each`` is told (cases done, cases to do) whenever one is done. Raises SpardaError where there is no CUDA GPU,
    for an unknown part or model, and where the store holds another model's rows or another GPU's.
    """
    todo = named_parts(parts)
    expected = estimate_measure(out, budget_s, parts, model)
    bench = open_bench(out, model, budget_s)
    for line in expected.lines:
        bench.say(line)
    done = 0

    def kept(count: int) -> None:
        nonlocal done
        # What rows are compared to may be measured again with them: more rows than cases.
        done = min(done + count, expected.left)
        if each:
            each(done, expected.left)

    bench.each = kept

    def work(bench: Bench) -> None:
        for part in todo:
            bench.say(part.name)
            part.measure(bench)

    return finish(bench, work)
