"""Transfer paths by way of the host, measured part by part and as steps, on a GPU that is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="measuring needs torch and triton")

import torch

from sparda.calibrate.cases import config_of, workload_of
from sparda.calibrate.measure import path_steps, paths
from sparda.calibrate.measure.bench import OutOfTimeError
from sparda.calibrate.measure.path_steps import measure_path_steps, path_cases
from sparda.calibrate.measure.paths import Parts, measure_paths
from sparda.calibrate.measure.steps import cases as steps_otherwise
from sparda.calibrate.store import Row, Store
from sparda.engine.shapes import SparseSpec
from tests.calibrate.fake_cuda import GRAPH_US
from tests.calibrate.measure_fakes import SHAPE, Gpu, install, new_bench
from tests.calibrate.path_fakes import CARRY_US, COPY_US, REPEATS, SPREAD_US, Runtime

FEW = (1, 8)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(paths, "BLOCKS", FEW)
    return install(monkeypatch)


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def measured(folder: Path) -> list[Row]:
    measure_paths(new_bench(folder))
    return Store(folder).rows()


def test_every_part_has_one_row_a_case_with_its_samples_and_rate(gpu: Gpu, tmp_path: Path, threads: int) -> None:
    rows = measured(tmp_path)
    counts = Counter(r.op for r in rows)
    by_blocks = dict.fromkeys(("upload", "blocks", "batch", "scatter"), len(FEW))
    assert counts == {**by_blocks, "gather": 3 * len(FEW), "report": 2 * len(paths.REPORT_BATCHES)}
    assert len({r.key for r in rows}) == len(rows)
    assert {r.key for r in rows} == {c.key for c in paths.cases(SHAPE)}
    for r in rows:
        assert len(r.samples_us) == REPEATS
        assert r.method
        if r.op != "report":
            moved = r.number("blocks") * SHAPE.block_bytes(SparseSpec())
            assert r.values["gb_s"] == pytest.approx(moved / r.us / 1e3, rel=1e-2, abs=1e-5)


def test_threads_are_few_many_and_the_usual_and_are_put_back(gpu: Gpu, tmp_path: Path, threads: int) -> None:
    found = [(r.case["blocks"], r.case["threads"], r.values["threads"]) for r in measured(tmp_path) if r.op == "gather"]
    assert found == [(b, t, t or threads) for b in FEW for t in (1, 4, 0)]
    assert torch.get_num_threads() == threads


def test_times_are_those_of_the_part_and_tell_how_long_the_host_is_busy(gpu: Gpu, tmp_path: Path) -> None:
    for r in measured(tmp_path):
        if r.op in ("blocks", "batch"):
            assert set(r.values) == {"gb_s", "host_us", "enlist_us"}
            assert 0 < r.values["enlist_us"] <= r.values["host_us"]
            assert r.us == pytest.approx(COPY_US)
        if r.op == "upload":
            assert r.us == pytest.approx(CARRY_US)
        if r.op == "scatter":
            assert r.us == pytest.approx(SPREAD_US + GRAPH_US / paths.LAUNCHES, rel=1e-3)


def test_a_report_is_as_long_as_the_slots_with_one_list_or_both(gpu: Gpu, tmp_path: Path) -> None:
    reports = [r for r in measured(tmp_path) if r.op == "report"]
    entries = [b * SHAPE.kv_heads * 97 for b in paths.REPORT_BATCHES]
    assert [(r.case["entries"], r.case["lists"]) for r in reports] == [(n, lists) for n in entries for lists in (1, 2)]
    assert all(set(r.values) == {"round_trip_us"} for r in reports)


def test_what_is_timed_is_what_a_step_would_copy_and_never_the_same_blocks_twice_in_a_row(
    gpu: Gpu, tmp_path: Path
) -> None:
    parts = Parts(new_bench(tmp_path), None)
    parts.lists.pool.copy_(torch.arange(len(parts.lists.pool))[:, None].expand_as(parts.lists.pool))
    for first in (0, 8):
        paths._gather_once(parts, 8)
        src, dst = parts.src[first : first + 8].long(), parts.dst[first : first + 8].long()
        assert torch.equal(parts.staged[:8], parts.lists.pool[src])
        parts.copies.enlist(parts.src[first:], parts.dst[first:], 8, parts.lists.cache)
        parts.copies.one_by_one()
        assert torch.equal(parts.lists.cache[dst], parts.lists.pool[src])


def test_a_runtime_without_batches_leaves_them_out_and_says_so(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paths, "cuda_runtime", lambda: Runtime("no batches here"))
    assert {r.op for r in measured(tmp_path)} == {"gather", "upload", "blocks", "scatter", "report"}
    assert "skipped: no batches here" in capsys.readouterr().err


def test_measuring_again_repeats_nothing_and_no_case_begins_without_time(gpu: Gpu, tmp_path: Path) -> None:
    with pytest.raises(OutOfTimeError):
        measure_paths(new_bench(tmp_path / "late", 0.0))
    assert Store(tmp_path / "late").rows() == []
    first = measured(tmp_path)
    measure_paths(new_bench(tmp_path, 0.0))
    assert Store(tmp_path).rows() == first


def test_steps_are_measured_by_every_path_and_are_no_cases_of_another_session_part(gpu: Gpu, tmp_path: Path) -> None:
    cases = list(path_cases())
    measure_path_steps(new_bench(tmp_path))
    rows = Store(tmp_path).rows()
    assert [(workload_of(r), config_of(r)) for r in rows] == cases
    assert {(r.kind, r.op, len(r.samples_us)) for r in rows} == {("step", "sparda", path_steps.REPEATS)}
    keys = {r.key for r in rows}
    assert keys == {c.key for c in path_steps.cases(SHAPE)}
    assert len(keys) == len(cases) == 27
    assert keys.isdisjoint(c.key for c in steps_otherwise(SHAPE))
    assert len(gpu.tiers) == len(path_steps.BATCHES), "tiers are made once a batch"
    measure_path_steps(new_bench(tmp_path, 0.0))
    assert len(Store(tmp_path).rows()) == len(rows)
