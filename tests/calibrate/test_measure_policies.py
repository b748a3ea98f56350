"""Policies side by side and resident blocks, measured on a GPU that is not."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="measuring needs torch and triton")

import torch

from sparda.calibrate.cases import config_of, workload_of
from sparda.calibrate.measure import bench, policies
from sparda.calibrate.measure.policies import (
    CELLS,
    CTAS,
    FILL,
    PERIOD,
    REPEATS,
    RESIDENCY_BATCHES,
    RESIDENCY_REPEATS,
    RESIDENT,
    TURNOVERS,
)
from sparda.calibrate.measure.run import PARTS, main_measure
from sparda.calibrate.store import Row, Store
from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.memory import memory_of
from sparda.engine.policies import resident_layers, side_data
from sparda.engine.shapes import MODELS, SparseSpec
from sparda.engine.trace import LAYER_PHASE
from sparda.explore.cli.measure import PARTS as NAMED
from tests.calibrate.measure_fakes import SHAPE, Gpu, install, rotating

KNOWN = [p for p in POLICIES if p != "shallow"]
"""Policies that a model of four layers can decode with."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return install(monkeypatch)


def measured(folder: Path, part: str) -> list[Row]:
    assert main_measure(folder, 600.0, [part], SHAPE.name)["ended"] == "complete"
    return Store(folder).rows()


def memory(patch: pytest.MonkeyPatch, size: int) -> None:
    found = SimpleNamespace(name="NVIDIA None", multi_processor_count=132, total_memory=size)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: found)


def test_every_policy_meets_every_batch_and_context_once(gpu: Gpu, tmp_path: Path) -> None:
    rows = measured(tmp_path, "policies")
    assert {(r.kind, len(r.samples_us)) for r in rows} == {("policy", REPEATS)}
    cells = Counter((r.op, workload_of(r), config_of(r).lookahead) for r in rows)
    assert set(cells.values()) == {1}
    everywhere = {(p, Workload(b, c, 0.06), 1) for p in KNOWN for c, batches in CELLS.items() for b in batches}
    # A lookahead of 4 and shallow are measured too, of models with more layers.
    farther = {("sparda", Workload(b, 131072, 0.06), ahead) for b in (4, 16, 64) for ahead in (2, 3)}
    assert set(cells) == everywhere | farther
    for r in rows:
        offloads = resident_layers(config_of(r), SHAPE.layers) < SHAPE.layers
        assert config_of(r).prefetch_ctas == (CTAS if offloads else Config().prefetch_ctas)
        chooses = r.op != "dense"
        values = {"misses_per_layer": 2.5, "pool_aliased": 1.0, "miss_rate_of_trace": 0.06 if chooses else -1.0}
        assert dict(r.values) == values


def test_tiers_are_made_once_for_all_of_a_cell_that_can_share_them(gpu: Gpu, tmp_path: Path) -> None:
    measured(tmp_path, "policies")
    made = [(t.workload.batch, t.workload.context_tokens, t.whole, side_data(t.config)) for t in gpu.tiers]
    assert len(made) == len(set(made))
    cells = [cell for cell, _ in groupby(made, key=lambda m: m[:2])]
    assert len(cells) == len(set(cells)) == sum(map(len, CELLS.values()))


def test_what_does_not_fit_is_said_and_never_allocated(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    largest = Workload(64, 131072, 0.06)
    size = memory_of(SHAPE, SparseSpec(), largest, Config("dense")).gpu_bytes
    memory(monkeypatch, size - 1)
    rows = measured(tmp_path, "policies")
    resident = [p for p in KNOWN if resident_layers(Config(p), SHAPE.layers) == SHAPE.layers]
    assert {r.op for r in rows if workload_of(r) == largest} == set(KNOWN) - set(resident)
    err = capsys.readouterr().err
    need = f"needs {size / 2**30:.0f} GiB of GPU memory, {(size - 1) / 2**30:.0f} GiB are there"
    assert [f"skipped: {p}, batch 64, 131072 tokens: {need}" in err for p in resident] == [True] * len(resident)
    assert not [t for t in gpu.tiers if t.workload.batch == 64 and t.whole == SHAPE.layers and t.blocks > 2048]
    # Skipping takes no time: a session with nothing else to do is complete.
    assert main_measure(tmp_path, 0.0, ["policies"], SHAPE.name)["ended"] == "complete"


def test_a_context_too_short_for_a_trace_is_reported_and_the_rest_measured(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def picky(*args: object, **kwargs: object) -> SimpleNamespace:
        if args[2].context_tokens == 8192:  # type: ignore[attr-defined]
            raise SpardaError("too short for a trace")
        return rotating(*args, **kwargs)

    monkeypatch.setattr(bench, "rotating_trace", picky)
    rows = measured(tmp_path, "policies")
    assert {r.op for r in rows if workload_of(r).context_tokens == 8192} == {"dense"}
    assert {r.op for r in rows if workload_of(r).context_tokens == 32768} == set(KNOWN)
    assert "skipped: too short for a trace" in capsys.readouterr().err


def test_residency_rows_state_a_turnover_and_count_misses(gpu: Gpu, tmp_path: Path) -> None:
    rows = measured(tmp_path, "residency")
    found = [(r.case["batch"], r.case["resident_blocks"], r.case["turnover"]) for r in rows]
    assert found == [(b, n, t) for b in RESIDENCY_BATCHES for n in RESIDENT for t in TURNOVERS]
    for r in rows:
        assert (r.kind, r.op, len(r.samples_us)) == ("residency", "sparda", RESIDENCY_REPEATS)
        assert set(r.case) == {"batch", "context_tokens", "turnover", "tail", *asdict(Config())} - {"transfer"}
        assert dict(r.values) == {"misses_per_layer": 2.5, "pool_aliased": 1.0}
    replays = len(gpu.replayed)
    assert replays == len(rows) * (FILL + RESIDENCY_REPEATS)
    assert main_measure(tmp_path, 0.0, ["residency"], SHAPE.name)["ended"] == "complete"
    assert len(gpu.replayed) == replays, "what is measured is not repeated"


def test_misses_are_counted_on_the_reuse_that_the_case_states(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, object]] = []

    def recorded(*args: object, turnover: float, tail: float, **kwargs: object) -> SimpleNamespace:
        asked.append((turnover, tail))
        return SimpleNamespace(miss_rate=None, turnover=turnover)

    monkeypatch.setattr(policies, "reuse_trace", recorded)
    assert asked == [(r.case["turnover"], r.case["tail"]) for r in measured(tmp_path, "residency")]


def test_resident_blocks_without_room_are_skipped(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = Config(resident_blocks=768)
    memory(monkeypatch, memory_of(SHAPE, SparseSpec(), Workload(64, 131072), wide).gpu_bytes - 1)
    rows = measured(tmp_path, "residency")
    assert {(r.case["batch"], r.case["resident_blocks"]) for r in rows} == {
        (b, n) for b in RESIDENCY_BATCHES for n in RESIDENT
    } - {(64, 768)}
    assert "skipped: sparda, batch 64, 131072 tokens, 768 resident blocks: needs" in capsys.readouterr().err


def test_a_residency_measurement_ends_before_any_layer_comes_to_the_end_of_its_trace() -> None:
    layers = MODELS["minicpm4.1-8b"].layers
    first = 1  # The step that compiles the kernels.
    assert (layers - 1) * LAYER_PHASE + first + FILL + RESIDENCY_REPEATS < PERIOD


def test_the_command_knows_every_part() -> None:
    assert tuple(PARTS) == NAMED
