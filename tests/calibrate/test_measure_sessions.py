"""Sessions of measuring: how they end and go on, and what their parts do with a GPU that is not."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="measuring needs torch and triton")

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparda.calibrate.costs import IN_ORDER, TINY
from sparda.calibrate.measure import bench, copies, corun, provenance, timing, watch
from sparda.calibrate.measure.copies import DEFAULT, Lists
from sparda.calibrate.measure.lanes import lanes_plan
from sparda.calibrate.measure.run import PARTS, main_measure
from sparda.calibrate.measure.steps import measure_step
from sparda.calibrate.store import Row, Store
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.plan import MAIN, PREFETCH, SELECT
from sparda.engine.policies import make_plan
from sparda.engine.shapes import SparseSpec
from tests.calibrate.measure_fakes import SHAPE, Gpu, install, new_bench


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return install(monkeypatch)


def ending(folder: Path) -> list[object]:
    return [p["ended"] for p in Store(folder).provenance.values()]


def test_a_spent_budget_keeps_what_is_there_says_so_and_the_next_session_measures_the_rest(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corun, "BATCHES", (4,))
    ticks = itertools.count(time.monotonic())  # A second goes by whenever somebody looks at the clock.
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    kinds = (len(corun.KINDS) + 1) * len(copies.beside_compute())
    budget = kinds + len(copies.beside_compute()) // 2.0
    first = main_measure(tmp_path, budget, ["corun"], SHAPE.name)
    assert first["ended"] == "budget spent"
    assert "run the same command again" in capsys.readouterr().err
    rows = Store(tmp_path).rows()
    assert first["rows"] == {"corun": len(rows)}
    assert kinds < len(rows) < kinds + len(copies.beside_compute())
    second = main_measure(tmp_path, 600.0, ["corun"], SHAPE.name)
    assert ending(tmp_path) == ["budget spent", second["ended"]] == ["budget spent", "complete"]
    counts = Counter((r.op, r.key) for r in Store(tmp_path).rows())
    assert len(counts) == kinds + len(copies.beside_compute()) + 2
    # What the rows in order are compared to is measured in the session that measures them.
    assert {op for (op, _), n in counts.items() if n > 1} == {"lanes", "launches"}
    assert sum(op == IN_ORDER for op, _ in counts) == len(copies.beside_compute())


@pytest.mark.parametrize("part", PARTS)
def test_no_part_begins_a_case_without_time(gpu: Gpu, tmp_path: Path, part: str) -> None:
    assert main_measure(tmp_path, 0.0, [part], SHAPE.name)["ended"] == "budget spent"
    assert Store(tmp_path).rows() == []


@pytest.mark.parametrize(("error", "ended"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "failed")])
def test_what_ends_a_session_early_is_recorded_and_goes_on_upwards(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], ended: str
) -> None:
    def prefetch(*args: object, **kwargs: object) -> None:
        if len(gpu.copies) == 1000:
            raise error
        gpu.prefetch(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(copies, "prefetch", prefetch)
    with pytest.raises(error):
        main_measure(tmp_path, 600.0, ["link"], SHAPE.name)
    assert ending(tmp_path) == [ended]
    assert Store(tmp_path).rows()


def test_parts_are_measured_in_their_own_order_and_an_unknown_one_is_named(gpu: Gpu, tmp_path: Path) -> None:
    with pytest.raises(SpardaError, match="unknown part 'lnik'; allowed are link, kernels, corun, steps"):
        main_measure(tmp_path, 600.0, ["kernels", "lnik"])
    result = main_measure(tmp_path, 600.0, ["kernels", "link"], SHAPE.name)
    assert result["rows"] == {"link": 164, "kernel": 258}


def test_an_unknown_model_leaves_no_session_behind(gpu: Gpu, tmp_path: Path) -> None:
    with pytest.raises(SpardaError, match="unknown model"):
        main_measure(tmp_path, 600.0, [], "none-7b")
    assert not list(tmp_path.iterdir())


def test_without_a_cuda_gpu_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpardaError, match="no CUDA GPU"):
        main_measure(tmp_path, 600.0, [])
    assert not list(tmp_path.iterdir())


def test_a_step_that_cannot_be_set_up_is_reported_and_skipped(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise SpardaError("too short for a trace")

    monkeypatch.setattr(bench, "rotating_trace", refuse)
    made = new_bench(tmp_path)
    measure_step(made, Workload(4), Config())
    assert "skipped: too short for a trace" in capsys.readouterr().err
    assert made.store.rows() == []


@given(st.lists(st.integers(0, Lists.LENGTH // 8), min_size=1, max_size=40))
def test_lists_do_not_overlap_until_they_wrap_and_none_goes_past_the_end(sizes: list[int]) -> None:
    lists = Lists.__new__(Lists)
    lists._cursor, read = 0, 0
    for blocks in sizes:
        begin = lists.fresh(blocks)
        assert begin >= read or (begin == 0 and read + blocks > Lists.LENGTH - 4)
        assert begin + blocks <= Lists.LENGTH
        assert begin % 4 == 0
        read = begin + blocks


def test_lists_name_rows_that_are_there_ascending_within_each_head(gpu: Gpu, tmp_path: Path) -> None:
    lists = Lists(new_bench(tmp_path))
    pool, period = lists.pool.shape[0], lists.MISSES_PER_HEAD
    for rows, there in ((lists.src, pool), (lists.dst, lists.cache.shape[0])):
        assert all(0 <= row < there for row in rows.tolist())
    heads = lists.src[: lists.LENGTH // period * period].view(-1, period).long()
    steps = (heads[:, 1:] - heads[:, :-1]) % pool
    assert int(steps.min()) > 0
    assert int(steps.sum(1).max()) < lists.BLOCKS_PER_HEAD


@pytest.mark.parametrize("middle", [("norm",) * TINY, ("attention",), ("attention", "norm")])
def test_the_first_kind_of_a_layer_waits_for_the_copy_of_the_layer_before(middle: tuple[str, ...]) -> None:
    step = make_plan(SHAPE, SparseSpec(), Workload(4), Config())
    plan = lanes_plan(step, middle, True)
    by_layer = {layer: [op for op in plan if op.layer == layer] for layer in range(1, SHAPE.layers)}
    *by_layer[1], last = by_layer[1]
    before = None
    for ops in by_layer.values():
        score, select, copy, first, *rest = ops
        assert [op.kind for op in ops] == ["score", "select", "prefetch", *middle]
        assert [op.stream for op in ops] == [MAIN, SELECT, PREFETCH, *[MAIN] * len(middle)]
        assert [op.after for op in (score, select, copy)] == [(), (score.index,), (select.index,)]
        assert first.after == (() if before is None else (before,))
        assert all(op.after == () for op in rest)
        before = copy.index
    assert (last.kind, last.stream, last.after) == ("norm", MAIN, (before,)), "nothing is left behind"
    without = lanes_plan(step, middle, False)
    assert [op.kind for op in without] == ["score", *middle] * (SHAPE.layers - 1)
    assert {(op.stream, op.after) for op in without} == {(MAIN, ())}


def test_compute_is_slowed_by_what_it_loses_while_the_copy_runs(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists, compute = Lists(new_bench(tmp_path)), corun.Compute(torch.cuda.CUDAGraph(), 100, 2500.0)
    # Microseconds of the copy, of both at once, and of the compute in all: the compute starts a little after the copy.
    runs = iter(
        [
            (4000.0, 3980.0, 3000.0, False),
            (1000.0, 980.0, 2745.0, True),
            (1000.0, 980.0, 2500.0, True),
            (1000.0, 980.0, 4000.0, True),
        ]
    )
    monkeypatch.setattr(corun, "_once", lambda *args: next(runs))
    slow, copies_us, moved = corun._beside(lists, torch.cuda.Stream(), compute, 1, DEFAULT)
    assert slow == pytest.approx([4 / 3, 1.0, 1 / corun.STARVED])
    assert copies_us == [1000.0] * 3
    blocks = int(corun.COPY_US * copies.rough_gb_s(1, DEFAULT) * 1e3 / 32768)
    assert moved == blocks // 2 * 32768, "after a copy that outlasts the compute, half of it is copied"


def test_of_a_copy_that_outlasts_the_compute_every_time_the_last_one_counts(gpu: Gpu, tmp_path: Path) -> None:
    gpu.slower = 1e3
    lists, compute = Lists(new_bench(tmp_path)), corun.Compute(torch.cuda.CUDAGraph(), 100, 2500.0)
    slow, copies_us, moved = corun._beside(lists, torch.cuda.Stream(), compute, 1, DEFAULT)
    assert slow == [1 / corun.STARVED]
    assert [c.blocks for c in gpu.copies] == [671 >> i for i in range(corun.SAMPLES + 3)]
    assert moved == gpu.copies[-1].blocks * 32768
    assert copies_us == pytest.approx([3.0 + moved / 14.0])


def test_clocks_are_warm_after_a_second_of_work(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    class Matrix:
        def __matmul__(self, other: Matrix) -> None:
            gpu.current.work(20_000.0)

    monkeypatch.setattr(torch, "randn", lambda *size, **kwargs: Matrix())
    timing.warm_clocks(1.0)
    assert 1e6 <= gpu.latest_us <= 1.2e6


def test_provenance_is_what_the_driver_says_and_says_so_where_it_says_nothing(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = ", ".join(f"the {name}" for name in provenance.QUERY)
    monkeypatch.delenv("SPARDA_COMMIT", raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout=f"{answer}\n"))
    found = provenance.provenance(7)
    assert (found["gpu"], found["driver"], found["seed"]) == ("NVIDIA None", "the driver", 7)
    assert set(provenance.clocks()) == {"sm_clock_mhz", "temperature_c", "throttle_reasons"}

    def absent(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", absent)
    found = provenance.provenance(7)
    assert (found["nvidia_smi"], found["commit"], provenance.clocks()) == ("unavailable", "unknown", {})
    monkeypatch.setenv("SPARDA_COMMIT", "0123abc")
    assert provenance.provenance(7)["commit"] == "0123abc"


def test_a_session_is_watched_throughout_and_its_rows_say_what_was_seen(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nwhile echo '1200, 3201, 400, 90, 0x40, 5, 16'; do sleep 0.02; done\n")
    tool.chmod(0o755)
    monkeypatch.setattr(watch, "TOOL", str(tool))
    whole = bench.Bench.keep

    def keep(made: bench.Bench, *rows: Row) -> None:
        # The fake GPU is done at once: the first row waits for the sample that a real one's work would have spanned.
        assert made.watch
        before = len(made.watch.samples)
        while not made.store.rows() and len(made.watch.samples) == before and not made.watch.complaint:
            time.sleep(0.005)
        whole(made, *rows)

    monkeypatch.setattr(bench.Bench, "keep", keep)
    main_measure(tmp_path / "out", 600.0, ["link"], SHAPE.name)
    store = Store(tmp_path / "out")
    watched = next(iter(store.provenance.values()))["watched"]
    assert isinstance(watched, dict)
    assert watched["samples"] * 0.5 == watched["throttled_s"] == watched["reasons_s"]["hw_thermal"] > 0
    first, *_ = store.rows()
    assert (first.throttled, first.values["sm_clock_mhz"]) == (True, 1200.0)


def test_a_session_without_nvidia_smi_says_that_it_was_not_watched(gpu: Gpu, tmp_path: Path) -> None:
    main_measure(tmp_path, 600.0, ["link"], SHAPE.name)
    watched = next(iter(Store(tmp_path).provenance.values()))["watched"]
    assert isinstance(watched, dict)
    assert (watched["samples"], "cannot be run" in watched["complaint"]) == (0, True)


def test_a_session_says_what_it_will_do_and_then_counts_to_it(
    gpu: Gpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[tuple[int, int]] = []
    main_measure(tmp_path, 600.0, ["link", "kernels"], SHAPE.name, lambda done, total: steps.append((done, total)))
    rows = Store(tmp_path).rows()
    assert steps == [(n, len(rows)) for n in range(1, len(rows) + 1)]
    err = capsys.readouterr().err
    links = sum(r.kind == "link" for r in rows)
    assert (
        f"link: {links} cases, 0 measured already, the rest about {links * PARTS['link'].seconds_per_case:.0f} s" in err
    )
    assert "at an H200's pace; budget 600 s" in err


def test_a_folder_with_another_models_rows_is_refused_before_anything_is_measured(gpu: Gpu, tmp_path: Path) -> None:
    main_measure(tmp_path, 600.0, ["link"], SHAPE.name)
    with pytest.raises(SpardaError, match="holds measurements of four layers"):
        main_measure(tmp_path, 600.0, ["link"], "minicpm4.1-8b")
    assert ending(tmp_path) == ["complete"]
