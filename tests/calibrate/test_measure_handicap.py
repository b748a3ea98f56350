"""Steps with part of the GPU taken away, on a GPU that is not: what runs beside what, and when a row counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="measuring needs torch and triton")

import torch

from sparda.calibrate.cases import config_of, workload_of
from sparda.calibrate.measure import handicap, rivals
from sparda.calibrate.measure.bench import GROWTH_TOKENS, OutOfTimeError, step_case
from sparda.calibrate.measure.handicap import ATTEMPTS, FIRST, HANDICAPS, NONE, STEPS, WARMUP, measure_handicap
from sparda.calibrate.measure.rivals import Handicap
from sparda.calibrate.measure.shares import HBM_CTAS, SHARED_CTAS
from sparda.calibrate.store import Row, Store
from sparda.engine.config import Config, Workload
from sparda.engine.memory import memory_of
from sparda.engine.shapes import SparseSpec
from sparda.kernels.handicap import Board
from tests.calibrate.measure_fakes import ENGINE_GB_S, READER_GB_S, SHAPE, Gpu, install, link_gb_s, new_bench

SMS = 132
STEPS_MEASURED = [
    *(("sparda", batch, miss, ctas) for batch, miss in ((4, 0.06), (16, 0.06), (64, 0.03)) for ctas in (2, 4)),
    *((policy, batch, 0.06, 2) for batch in (4, 16) for policy in ("sparse", "sparse-resident")),
]


class Session:
    """Everything measured once."""

    def __init__(self, folder: Path, gpu: Gpu) -> None:
        self.gpu, self.bench = gpu, new_bench(folder)
        measure_handicap(self.bench)
        self.rows = self.bench.store.rows()

    def of(self, kind: str, op: str = "") -> list[Row]:
        return [r for r in self.rows if r.kind == kind and r.op in (op or r.op)]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        yield Session(tmp_path_factory.mktemp("handicaps"), install(patch))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return install(monkeypatch)


@pytest.fixture
def one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handicap, "_cases", lambda: iter([(Workload(4), Config())]))
    monkeypatch.setattr(handicap, "measure_shares", lambda bench, rivals: None)


def handicap_of(row: Row) -> Handicap:
    return Handicap(int(row.number("held_sms")), str(row.case["link_rival"]), int(row.number("hbm_ctas")))


def test_every_step_has_one_row_under_every_handicap_and_one_without(session: Session) -> None:
    rows = session.of("handicap")
    expected = {(*step, h) for step in STEPS_MEASURED for h in (NONE, *HANDICAPS)}
    found = Counter(
        (r.op, workload_of(r).batch, workload_of(r).miss_rate, config_of(r).prefetch_ctas, handicap_of(r)) for r in rows
    )
    assert set(found) == expected
    assert set(found.values()) == {1}
    for r in rows:
        assert dict(r.case) == {**step_case(workload_of(r), config_of(r)), **asdict(handicap_of(r))}
        assert (workload_of(r).context_tokens, config_of(r).lookahead, config_of(r).top_k) == (131072, 1, 96)
        assert len(r.samples_us) == (2 if handicap_of(r) == NONE else 1) * STEPS


def test_decoders_are_cut_for_the_multiprocessors_that_are_left_and_few_are_captured(session: Session) -> None:
    for r in session.of("handicap"):
        assert r.values["tiled_sms"] == SMS - r.number("held_sms") - r.number("hbm_ctas")
    each = sorted({SMS - h.taken for h in (NONE, *HANDICAPS)}, reverse=True)
    assert session.gpu.tiled == each * len(STEPS_MEASURED)


def test_each_rival_is_as_large_as_its_row_says_and_moves_what_the_row_says(session: Session) -> None:
    blocks = [h.taken for h in HANDICAPS if h.taken]
    reads = len(session.gpu.held) - len(blocks) * len(STEPS_MEASURED)
    assert session.gpu.held[reads:] == blocks * len(STEPS_MEASURED)
    for r in session.of("handicap"):
        rate = ENGINE_GB_S if r.case["link_rival"] == "copy" else READER_GB_S * r.number("hbm_ctas")
        assert r.values["rival_gb_s"] == pytest.approx(rate, rel=1e-3)
        assert r.values["misses_per_layer"] == 2.5


def test_a_row_brings_the_step_without_a_rival_from_its_own_session(session: Session) -> None:
    for r in session.of("handicap"):
        assert r.values["baseline_us"] == pytest.approx(r.us), "nothing contends in this GPU"
        assert ("before_us" in r.values) == ("after_us" in r.values) == (handicap_of(r) == NONE)


def test_a_batch_never_outgrows_its_room_even_if_every_rival_is_tried_again() -> None:
    captures = len({h.taken for h in (NONE, *HANDICAPS)})
    most = captures + FIRST + 2 * (WARMUP + STEPS) + ATTEMPTS * len(HANDICAPS) * (1 + WARMUP + STEPS)
    assert most < GROWTH_TOKENS


def test_readers_alone_are_measured_by_thread_blocks(session: Session) -> None:
    rows = session.of("link", "hbm_read")
    assert [dict(r.case) for r in rows] == [{"ctas": c} for c in HBM_CTAS]
    for r in rows:
        assert r.values["gb_s"] == pytest.approx(READER_GB_S * r.number("ctas"), rel=1e-3)
        assert r.us == pytest.approx(2**30 / r.values["gb_s"] / 1e3, rel=1e-3)


def test_a_prefetch_and_a_copy_on_one_link_are_both_measured(session: Session) -> None:
    rows = session.of("link", "link_shared")
    assert [r.case["ctas"] for r in rows] == list(SHARED_CTAS)
    for r in rows:
        alone = link_gb_s(int(r.number("ctas")), 8)
        assert r.values["gb_s"] == pytest.approx(r.values["alone_gb_s"]) == pytest.approx(alone, rel=0.01)
        assert r.values["copy_gb_s"] == pytest.approx(ENGINE_GB_S, rel=1e-3)


def test_measuring_again_repeats_nothing_and_needs_no_time(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = len(session.gpu.replayed)
    measure_handicap(new_bench(session.bench.store.folder, budget_s=0.0))
    assert len(session.gpu.replayed) == replays
    assert len(session.bench.store.rows()) == len(session.rows)


def test_only_what_is_missing_is_measured_with_runs_of_its_own_around_it(
    gpu: Gpu, tmp_path: Path, one_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handicap, "HANDICAPS", HANDICAPS[:2])
    measure_handicap(new_bench(tmp_path))
    monkeypatch.setattr(handicap, "HANDICAPS", HANDICAPS[:3])
    gpu.tiled.clear()
    measure_handicap(new_bench(tmp_path))
    assert gpu.tiled == [SMS, SMS - HANDICAPS[2].taken]
    assert [handicap_of(r) for r in Store(tmp_path).rows()] == [NONE, *HANDICAPS[:2], NONE, HANDICAPS[2]]


def test_without_time_no_step_is_begun(gpu: Gpu, tmp_path: Path) -> None:
    bench = new_bench(tmp_path, budget_s=0.0)
    with pytest.raises(OutOfTimeError):
        measure_handicap(bench)
    assert bench.store.rows() == []


def lines(folder: Path) -> list[str]:
    return (folder / "rows" / "handicap.jsonl").read_text().splitlines()


def test_a_rival_that_is_gone_too_early_is_tried_again_then_said_and_its_row_does_not_count(
    gpu: Gpu, tmp_path: Path, one_step: None, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.brief = True
    measure_handicap(new_bench(tmp_path))
    whole = [h for h in (NONE, *HANDICAPS) if not h.taken]
    assert [handicap_of(r) for r in Store(tmp_path).rows()] == whole
    assert gpu.held == [h.taken for h in HANDICAPS if h.taken for _ in range(ATTEMPTS)]
    assert sum('"complete": false' in line for line in lines(tmp_path)) == len(HANDICAPS) + 1 - len(whole)
    assert "incomplete: Handicap(held_sms=16," in capsys.readouterr().err
    gpu.brief = False
    measure_handicap(new_bench(tmp_path))
    assert {handicap_of(r) for r in Store(tmp_path).latest("handicap")} == {NONE, *HANDICAPS}


def test_a_copy_that_ends_before_the_steps_do_is_made_twice_as_long(
    gpu: Gpu, tmp_path: Path, one_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []

    class Counted(rivals.CopyRival):
        def __init__(self, pool: torch.Tensor, landing: torch.Tensor, pieces: int) -> None:
            super().__init__(pool, landing, pieces)
            made.append(pieces)

    monkeypatch.setattr(rivals, "CopyRival", Counted)
    monkeypatch.setattr(handicap, "LONGER", 0.7)
    measure_handicap(new_bench(tmp_path))
    assert made == [pytest.approx(made[-1] / 2, rel=0.2), made[-1]]
    assert {handicap_of(r) for r in Store(tmp_path).rows()} == {NONE, *HANDICAPS}


def test_thread_blocks_without_a_multiprocessor_each_are_an_error_that_says_what_to_do(
    gpu: Gpu, tmp_path: Path, one_step: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crowded(board: Board, *, duration_ns: int) -> None:
        board.started.fill_(board.blocks - 1)

    monkeypatch.setattr(rivals, "hold_sms", crowded)
    monkeypatch.setattr(rivals, "START_S", 0.0)
    measure_handicap(new_bench(tmp_path))
    assert "16 thread blocks did not each find an empty multiprocessor" in capsys.readouterr().err
    assert Store(tmp_path).rows() == []


@pytest.mark.parametrize("taken", HANDICAPS, ids=str)
def test_a_rival_ends_even_where_what_it_runs_beside_fails(gpu: Gpu, tmp_path: Path, taken: Handicap) -> None:
    rival = rivals.Rivals(new_bench(tmp_path)).of(taken, 1000.0)
    waits = gpu.waits
    with pytest.raises(KeyboardInterrupt), rivals.beside(rival):
        raise KeyboardInterrupt
    assert gpu.waits == waits + 1
    if isinstance(rival, rivals.KernelRival):
        assert int(rival.board.flag) == 1


def test_a_step_that_the_gpu_has_no_memory_for_is_said_and_skipped(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = memory_of(SHAPE, SparseSpec(), Workload(64, 131072, 0.03), Config()).gpu_bytes
    monkeypatch.setattr(torch.cuda.get_device_properties(0), "total_memory", needed - 1)
    bench = new_bench(tmp_path)
    measure_handicap(bench)
    assert capsys.readouterr().err.count("skipped: sparda, batch 64, 131072 tokens: needs") == 2
    assert {(r.op, workload_of(r).batch) for r in bench.store.rows("handicap")} == {
        (policy, batch) for policy, batch, *_ in STEPS_MEASURED if batch < 64
    }
