"""A GPU that is not, for all that measuring asks of one: operations take what their work says, beside others as long
as alone; copies are checked and kept; decoders issue their real plans.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sparda.calibrate.measure import bench, copies, policies, rivals, run, shares, steptrace, watch
from sparda.calibrate.measure.bench import Bench, Clock
from sparda.calibrate.store import Store
from sparda.engine import graph
from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.plan import Op, Plan
from sparda.engine.policies import resident_layers
from sparda.engine.shapes import MODELS, ModelShape, SparseSpec
from sparda.engine.tiers import Tiers
from sparda.kernels.handicap import Board
from sparda.kernels.launch import multiprocessors
from sparda.kernels.prefetch import _check_settings, _check_tensors
from tests.calibrate.fake_cuda import FakeCuda, Profiler
from tests.calibrate.path_fakes import install_paths
from tests.calibrate.training_fakes import install_training

SHAPE = replace(MODELS["minicpm4.1-8b"], name="four layers", layers=4)
START_US, FLOOR_US, HBM_GB_S = 3.0, 1.5, 4000.0
READER_GB_S, ENGINE_GB_S = 30.0, 50.0
"""What each thread block that reads GPU memory moves, and a copy engine."""


def link_gb_s(ctas: int, stages: int) -> float:
    """What a prefetch moves: in proportion to its CTAs until the link is full."""
    return min(50.0, ctas * (2.0 + 1.5 * stages))


@dataclass(frozen=True, slots=True)
class Copy:
    """A prefetch that was launched: ``blocks`` entries of the lists, from entry ``first`` on."""

    first: int
    blocks: int
    ctas: int
    warps: int
    stages: int
    chunk: int


@dataclass(eq=False)
class Gpu(FakeCuda):
    """All that the measuring code asks of a GPU."""

    slower: float = 1.0
    """Times as long as usual that a copy takes."""
    copies: list[Copy] = field(default_factory=list)
    tiers: list[FakeTiers] = field(default_factory=list)
    tiled: list[int] = field(default_factory=list)
    """Multiprocessors that each captured decoder was cut for."""
    held: list[int] = field(default_factory=list)
    """Thread blocks of each launch that holds multiprocessors or reads."""
    brief: bool = False
    """Whether those that hold or read are gone at once."""
    since_us: dict[int, float] = field(default_factory=dict)

    def hold(self, board: Board, *, duration_ns: int) -> None:
        self.held.append(board.blocks)
        board.started.fill_(board.blocks)
        board.ended.fill_(board.blocks * self.brief)
        self.current.work(duration_ns / 1e3)

    def read(self, buffer: Tensor, board: Board, *, duration_ns: int) -> None:
        self.since_us[id(board)] = self.current.now_us
        self.hold(board, duration_ns=duration_ns)
        board.progress.fill_(int(READER_GB_S * duration_ns))

    def note_progress(self, seen: Tensor, board: Board) -> None:
        us = self.current.now_us - self.since_us.get(id(board), self.current.now_us)
        seen.fill_(int(READER_GB_S * us * 1e3))

    def copy_piece(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape
        self.current.work(target.numel() * target.element_size() / ENGINE_GB_S / 1e3)

    def copy(self, moved: float, ctas: int, stages: int) -> None:
        self.current.work(START_US + self.slower * moved / link_gb_s(ctas, stages) / 1e3)

    def prefetch(
        self,
        pool: Tensor,
        cache: Tensor,
        src: Tensor,
        dst: Tensor,
        count: Tensor,
        *,
        ctas: int,
        warps: int,
        stages: int,
        chunk_values: int,
    ) -> None:
        _check_tensors(pool, cache, src, dst, count)
        _check_settings(pool, ctas, warps, stages, chunk_values)
        blocks = int(count)
        assert 0 <= blocks <= src.numel(), "the count is beyond the list's end"
        self.copies.append(Copy(int(src.storage_offset()), blocks, ctas, warps, stages, chunk_values))
        self.copy(2.0 * blocks * pool.shape[1], ctas, stages)

    def op(self, op: Op) -> None:
        self.current.work(FLOOR_US + op.work.hbm_bytes / HBM_GB_S / 1e3)


class FakeTiers(Tiers):
    """KV tiers without their memory."""

    def __init__(
        self,
        shape: ModelShape,
        spec: SparseSpec,
        workload: Workload,
        config: Config,
        device: torch.device | str,
        *,
        capacity: int,
        pool: Tensor | None = None,
        gpu: Gpu,
    ) -> None:
        assert pool is not None, "a measurement brings its own pool"
        self.workload, self.config, self.pool, self.aliased = workload, config, pool, True
        self.whole = resident_layers(config, shape.layers)
        self.offloaded = shape.layers - self.whole
        self.blocks = spec.blocks(capacity) + 1
        self.step, self.miss_count = torch.zeros(1, dtype=torch.int32), torch.ones(shape.layers, dtype=torch.int32)
        self.miss_total = torch.zeros(shape.layers, dtype=torch.int64)
        self.seeded = self.resets = 0
        gpu.tiers.append(self)

    def seed(self, seed: int = 0, eviction: object = ()) -> None:
        self.seeded += 1
        self.reset_residents()

    def reset_residents(self) -> None:
        self.resets += 1

    def misses_per_layer(self) -> float:
        return 2.5


class FakeDecoder(Decoder):
    """The real plan, issued and captured as it is, with operations that only take time."""

    def __init__(self, plan: Plan, weights: object, tiers: Tiers, trace: SimpleNamespace | None, *, gpu: Gpu) -> None:
        self.plan, self.tiers, self.graph = plan, tiers, None
        self.trace = None if trace is None or trace.miss_rate == 0 else trace  # type: ignore[assignment]
        assert (trace is not None) == bool(plan.of_kind("select")), "a trace is for those that choose"
        config, self.gpu = plan.config, gpu

        def fetch(op: Op) -> None:
            gpu.copy(op.work.h2d_bytes, config.prefetch_ctas, config.prefetch_stages)

        self.bindings = {**dict.fromkeys({op.kind for op in plan}, gpu.op), "prefetch": fetch}

    def capture(self) -> None:
        self.gpu.tiled.append(multiprocessors(torch.zeros(1)))
        super().capture()


def cpu_bench(store: Store, session: str, shape: ModelShape, clock: Clock, *, seed: int = 0) -> Bench:
    made = Bench(store, session, shape, clock, seed=seed)
    made.device = torch.device("cpu")
    return made


def new_bench(folder: Path, budget_s: float = 600.0) -> Bench:
    return cpu_bench(Store(folder), "s1", SHAPE, Clock(budget_s))


def rotating(*args: object, **kwargs: object) -> SimpleNamespace:
    workload = next(a for a in args if isinstance(a, Workload))
    return SimpleNamespace(miss_rate=workload.miss_rate)


def reusing(*args: object, turnover: float, **kwargs: object) -> SimpleNamespace:
    return SimpleNamespace(miss_rate=None, turnover=turnover)


def nothing(*args: object) -> None: ...


def install(patch: pytest.MonkeyPatch) -> Gpu:
    """Put a fake GPU in torch's place, and make lists and pool small."""
    gpu = Gpu()
    gpu.install(patch)
    # Nothing here must be collected before a capture, and a thousand collections would take a minute.
    patch.setattr(graph, "gc", SimpleNamespace(isenabled=lambda: False))
    patch.setattr(os, "fsync", nothing)
    patch.setattr(bench, "POOL_GIB", 0.01)
    patch.setattr(bench, "Tiers", partial(FakeTiers, gpu=gpu))
    patch.setattr(bench, "Decoder", partial(FakeDecoder, gpu=gpu))
    patch.setattr(bench, "random_weights", nothing)
    patch.setattr(bench, "gc", SimpleNamespace(collect=nothing))
    patch.setattr(bench, "rotating_trace", rotating)
    patch.setattr(policies, "reuse_trace", reusing)
    patch.setattr(copies, "prefetch", gpu.prefetch)
    patch.setattr(rivals, "hold_sms", gpu.hold)
    patch.setattr(rivals, "stream_hbm", gpu.read)
    patch.setattr(shares, "stream_hbm", gpu.read)
    patch.setattr(rivals, "note_progress", gpu.note_progress)
    patch.setattr(rivals, "copy_piece", gpu.copy_piece)
    patch.setattr(rivals, "STREAM_VALUES", 8)
    install_paths(patch, gpu)
    install_training(patch)
    patch.setattr(steptrace, "profile", Profiler(gpu))
    patch.setattr(copies.Lists, "LENGTH", 1 << 13)
    patch.setattr(copies.Lists, "BLOCKS_PER_HEAD", 61)
    patch.setattr(run, "Bench", cpu_bench)
    patch.setattr(run, "warm_clocks", nothing)
    # A GPU that is here has nothing to say about one that is not.
    patch.setattr(watch, "TOOL", "no-nvidia-smi")
    patch.setitem(MODELS, SHAPE.name, SHAPE)
    return gpu
