"""Steps under a profiler: when each kernel of one replay ran. The only place that imports torch's profiler."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from sparda.calibrate.measure.bench import Bench, replayed
from sparda.calibrate.measure.steps import FULL, stepped
from sparda.calibrate.step_trace import KernelEvent, MeasuredStep, median_replay, save_step
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.graph import Replayable

METHOD = "CUDA graph, torch.profiler (CUPTI kernel records), the replay of median length of those profiled"
FOLDER = "steps"
REPLAYS = 5
"""Replays under the profiler, one of which is kept: the first one pays for the profiler's own start."""
REPEATS = 8
"""Replays without it, which tell what it costs."""

CELLS: tuple[tuple[Workload, Config], ...] = (
    (Workload(4, FULL, 0.06), Config(prefetch_ctas=2)),
    (Workload(16, FULL, 0.06), Config(prefetch_ctas=2)),
    (Workload(16, FULL, 0.06), Config(policy="sparse")),
    (Workload(64, FULL, 0.06), Config(prefetch_ctas=2)),
)


def file_name(workload: Workload, config: Config) -> str:
    """The name of a measured step's file, which tells the cells apart."""
    return (
        f"{config.policy}-batch{workload.batch}-{workload.context_tokens}-miss{workload.miss_rate:g}-"
        f"top{config.top_k}-ahead{config.lookahead}-ctas{config.prefetch_ctas}.json"
    )


def measure_step_traces(bench: Bench, cells: tuple[tuple[Workload, Config], ...] = CELLS) -> None:
    """Files ``steps/<name>.json`` beside the store's rows, one for each cell that has none yet.

    A case that cannot be set up is reported and skipped. Kernels that the plan does not explain are kept all the same,
    and what is wrong with them said: the table of kernels can be mended without a GPU.
    """
    folder = bench.store.folder / FOLDER
    for workload, config in cells:
        path = folder / file_name(workload, config)
        if path.exists():
            continue
        bench.clock.check()
        try:
            step = measured(bench, workload, config)
        except SpardaError as e:
            bench.say(f"skipped: {e}")
            continue
        folder.mkdir(parents=True, exist_ok=True)
        save_step(path, step)
        try:
            step.timeline()
        except SpardaError as e:
            bench.say(f"{path.name} is kept but has no timeline: {e}")


def measured(bench: Bench, workload: Workload, config: Config) -> MeasuredStep:
    """One step of a decoder made for it: timed without the profiler, then recorded under it."""
    decoder = bench.decoder(workload, config)
    samples, _ = stepped(decoder, REPEATS)
    events = median_replay(profiled(replayed(decoder), REPLAYS))
    gpu = torch.cuda.get_device_properties(bench.device).name
    return MeasuredStep(bench.shape.name, gpu, workload, config, METHOD, bench.session, samples, events)


def profiled(graph: Replayable, replays: int) -> list[KernelEvent]:
    """What the GPU did during ``replays`` replays, each waited for so that none runs into the next."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            graph.replay()
            torch.cuda.synchronize()
    return [
        # Microseconds from the profile's start, as floats that come from whole nanoseconds.
        KernelEvent(e.name, round(e.time_range.start * 1e3), round(e.time_range.end * 1e3))
        for e in profiler.events()
        if e.device_type.name == "CUDA" and not getattr(e, "is_user_annotation", False)
    ]
