"""Steps recorded under a profiler that is not: a file for each cell, kept whether the plan explains it or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="measuring needs torch and triton")

from sparda.calibrate.measure import steptrace
from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.measure.steptrace import CELLS, FOLDER, REPEATS, REPLAYS, file_name, measure_step_traces
from sparda.calibrate.step_trace import KernelEvent, load_step
from sparda.engine.config import Config, Workload
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, SparseSpec
from sparda.sim.player import play
from tests.calibrate.measure_fakes import SHAPE, Gpu, install, new_bench
from tests.calibrate.step_events import recorded
from tests.sim.sim_fakes import FakeCosts

Cell = tuple[Workload, Config]


class FakeProfile:
    """A profiler whose replays are those of simulated steps, each a little longer than the one before."""

    def __init__(self, cell: Cell, more: list[KernelEvent]) -> None:
        timeline = play(make_plan(SHAPE, SparseSpec(), *cell), FakeCosts())
        self.kernels = recorded(timeline)
        self.length_ns = timeline.makespan_ns + 10_000
        self.more = more
        self.asked: list[Any] = []

    def __call__(self, *, activities: list[object]) -> FakeProfile:
        self.asked.append(activities)
        return self

    def __enter__(self) -> FakeProfile:
        return self

    def __exit__(self, *_: object) -> None: ...

    def events(self) -> Iterator[SimpleNamespace]:
        for number in range(REPLAYS):
            zero = number * 2 * self.length_ns
            for name, start, end in [*self.kernels, *self.more]:
                yield event(name, "CUDA", (zero + start) / 1e3, (zero + end + number) / 1e3)
        yield event("cudaGraphLaunch", "CPU", 0.0, 9.0)


def event(name: str, device: str, start_us: float, end_us: float) -> SimpleNamespace:
    time, where = SimpleNamespace(start=start_us, end=end_us), SimpleNamespace(name=device)
    return SimpleNamespace(name=name, time_range=time, device_type=where, is_user_annotation=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return install(monkeypatch)


def trace_one(bench: Bench, cell: Cell, monkeypatch: pytest.MonkeyPatch, *more: KernelEvent) -> FakeProfile:
    fake = FakeProfile(cell, list(more))
    monkeypatch.setattr(steptrace, "profile", fake)
    measure_step_traces(bench, (cell,))
    return fake


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: file_name(*cell))
def test_a_cells_file_holds_one_replay_of_its_plan(
    gpu: Gpu, cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = new_bench(tmp_path)
    trace_one(bench, cell, monkeypatch)
    step = load_step(tmp_path / FOLDER / file_name(*cell))
    assert (step.workload, step.config) == cell
    assert (step.model, step.machine, step.session) == (SHAPE.name, "NVIDIA None", "s1")
    assert len(step.samples_us) == REPEATS
    assert step.events[0].start_ns == 0
    assert len(step.timeline().spans) == len(step.plan.ops)


def test_a_cell_that_has_its_file_is_not_measured_again(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = new_bench(tmp_path)
    assert len(trace_one(bench, CELLS[0], monkeypatch).asked) == 1
    assert trace_one(bench, CELLS[0], monkeypatch).asked == []


def test_kernels_that_the_plan_does_not_explain_are_kept_and_said(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace_one(new_bench(tmp_path), CELLS[0], monkeypatch, KernelEvent("void fill", 2000, 2001))
    path = tmp_path / FOLDER / file_name(*CELLS[0])
    assert "void fill" in {e.name for e in load_step(path).events}
    assert "is kept but has no timeline: kernel 'void fill' belongs to no operation" in capsys.readouterr().err


def test_the_cells_have_files_of_their_own_and_can_be_planned() -> None:
    assert len({file_name(*cell) for cell in CELLS}) == len(CELLS)
    for workload, config in CELLS:
        make_plan(MODELS["minicpm4.1-8b"], SparseSpec(), workload, config)
