"""Measuring, on a GPU that is not: every part leaves one row a case, and a profile can be fitted to the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="measuring needs torch and triton")

from sparda.calibrate.cases import config_of, workload_of
from sparda.calibrate.costs import IN_ORDER, LAYER
from sparda.calibrate.fit import calibrate, fit
from sparda.calibrate.fit_kernels import HOLDS
from sparda.calibrate.holdout import held_out_rows
from sparda.calibrate.measure import corun, kernels
from sparda.calibrate.measure.bench import step_case
from sparda.calibrate.measure.copies import CTAS, DEFAULT, FEWER_CTAS, OTHERS
from sparda.calibrate.measure.parts import Part
from sparda.calibrate.measure.run import PARTS, estimate_measure, main_measure
from sparda.calibrate.profile import SHIPPED
from sparda.calibrate.store import Row, Store, grouped
from sparda.engine.config import FETCHING, OF_SHALLOW, POLICIES, TRANSFERS, Config, Workload
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, ModelShape, SparseSpec
from tests.calibrate.fake_cuda import GRAPH_US
from tests.calibrate.measure_fakes import FLOOR_US, HBM_GB_S, SHAPE, START_US, Gpu, install, link_gb_s

COPY = {"ctas", "warps", "stages", "chunk_bytes"}
STEP = {*asdict(Workload()), *asdict(Config())} - {*OF_SHALLOW, "transfer"}
SHARES = ("hbm_read", "link_shared")
"""Rows that the part ``handicap`` leaves beside the cases that it lists: what rivals take."""
BESIDE = len(CTAS) + len(OTHERS) * len(FEWER_CTAS)


def can_be_measured(part: Part, shape: ModelShape, gpu_bytes: int) -> set[tuple[str, str]]:
    """(kind, key) of every row that a part leaves of a model on a GPU with so much memory."""
    return {(c.kind, c.key) for c in part.cases(shape) if not c.hindrance(shape, SparseSpec(), gpu_bytes)}


class Session:
    """All parts measured once."""

    def __init__(self, folder: Path, gpu: Gpu) -> None:
        self.folder, self.gpu, self.store = folder, gpu, Store(folder)
        self.result = main_measure(folder, 600.0, [], SHAPE.name)
        self.rows = self.store.rows()

    def of(self, kind: str, *ops: str) -> list[Row]:
        return [r for r in self.rows if r.kind == kind and (not ops or r.op in ops)]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        yield Session(tmp_path_factory.mktemp("measured"), install(patch))


def test_a_session_says_what_it_did_and_where_it_measured(session: Session) -> None:
    counts = {kind: len(rows) for kind, rows in grouped(session.rows, lambda r: r.kind).items()}
    name = next(iter(session.store.provenance))
    assert session.result == {"session": name, "rows": counts, "ended": "complete", "folder": str(session.folder)}
    known = session.store.provenance[name]
    assert (known["gpu"], known["model"], known["ended"]) == ("NVIDIA None", SHAPE.name, "complete")
    assert {"sms", "gpu_memory_bytes", "host_memory_bytes", "torch", "commit", "seed"} <= set(known)


def test_every_case_has_exactly_one_row_with_its_samples(session: Session) -> None:
    assert [key for key, n in Counter(r.key for r in session.rows).items() if n > 1] == []
    assert all(r.samples_us and r.method and min(r.samples_us) > 0 for r in session.rows)
    assert {r.session for r in session.rows} == {session.result["session"]}


@pytest.mark.parametrize("kind", ["link", "kernel", "corun", "step", "policy", "handicap"])
def test_the_cases_are_those_of_the_shipped_rows(kind: str) -> None:
    store = Store(SHIPPED / "h200-sxm.measured")
    gpu_bytes = {int(str(known["gpu_memory_bytes"])) for known in store.provenance.values()}
    model = MODELS["minicpm4.1-8b"]
    listed = {
        case for part in PARTS.values() for case in can_be_measured(part, model, min(gpu_bytes)) if case[0] == kind
    }
    assert {(r.kind, r.key) for r in store.rows(kind) if r.op not in SHARES} == listed
    assert ({r.op for r in store.rows(kind)} >= set(SHARES)) == (kind == "link")


def test_link_rows_say_which_copy_and_how_fast(session: Session) -> None:
    for r in session.of("link", "prefetch"):
        assert set(r.case) == {"case", "blocks", *COPY}
        blocks, rate = r.number("blocks"), link_gb_s(int(r.number("ctas")), int(r.number("stages")))
        moved = blocks * SHAPE.block_bytes(SparseSpec())
        # Between 4 and 128 launches share a graph's own time.
        assert START_US < r.us - moved / rate / 1e3 <= START_US + GRAPH_US / 4 + 1e-3
        assert dict(r.values) == ({"gb_s": pytest.approx(moved / r.us / 1e3, rel=1e-3)} if blocks else {})
    engine = session.of("link", "copy_engine")
    assert Counter(str(r.case["direction"]) for r in engine) == {"h2d": 5, "d2h": 5}
    assert all(set(r.case) == {"direction", "mib"} and set(r.values) == {"gb_s"} for r in engine)


def test_kernel_rows_are_of_every_kind_over_the_axes_it_depends_on(session: Session) -> None:
    axes = {op: {frozenset(r.case) for r in rows} for op, rows in grouped(session.of("kernel"), lambda r: r.op).items()}
    others = [kind for kinds in kernels.ALSO_BY_BATCH.values() for kind in kinds]
    by_batch = {kind: {frozenset({"batch"})} for kind in (*kernels.BY_BATCH, *others, "graph", "serial")}
    growing = [kind for t in (kernels.BY_CONTEXT, kernels.ALSO_BY_CONTEXT) for kinds in t.values() for kind in kinds]
    growing.append("dense_attention")
    by_context = {kind: {frozenset({"batch", "context_tokens"})} for kind in growing}
    by_top_k = {kind: {frozenset({"batch", "top_k"})} for kinds in kernels.BY_TOP_K.values() for kind in kinds}
    assert axes == {**by_batch, **by_context, **by_top_k}
    for r in session.of("kernel", *growing):
        config = Config(policy=HOLDS.get(r.op, "sparda"), score_layer=SHAPE.layers - 2)
        workload = Workload(int(r.number("batch")), int(r.number("context_tokens")), 0.06)
        work = make_plan(SHAPE, SparseSpec(), workload, config).of_kind(r.op)[-1].work
        assert dict(r.values) == {"flops": work.flops, "hbm_bytes": work.hbm_bytes}


def test_every_kind_that_any_policy_needs_is_measured(session: Session) -> None:
    measured = {r.op for r in session.of("kernel")} | {r.op for r in session.of("link")}
    for policy in POLICIES:
        for transfer in TRANSFERS if policy in FETCHING else ("uva",):
            plan = make_plan(MODELS["minicpm4.1-8b"], SparseSpec(), Workload(), Config(policy, transfer=transfer))
            # The host's list of copies is timed with the copies.
            assert {op.kind for op in plan} - {"enlist"} <= measured


def test_a_kernel_row_is_what_the_operation_adds_and_nothing_of_its_predecessor_or_the_graph(session: Session) -> None:
    for r in session.of("kernel", *kernels.BY_BATCH, "attention"):
        workload = Workload(int(r.number("batch")), 32768, 0.06)
        config = Config(top_k=int(r.case.get("top_k", 96)))
        ops = make_plan(SHAPE, SparseSpec(), workload, config).of_kind(r.op)
        alone = [FLOOR_US + op.work.hbm_bytes / HBM_GB_S / 1e3 for op in ops]
        assert r.us == pytest.approx(sum(alone) / len(alone), rel=1e-3, abs=2e-3)


def test_corun_rows_are_of_every_kind_beside_every_copy(session: Session) -> None:
    counts = Counter(r.op for r in session.of("corun"))
    batches = len(corun.BATCHES)
    beside = dict.fromkeys((*corun.KINDS, LAYER, IN_ORDER), batches * BESIDE)
    assert counts == {**beside, "lanes": batches, "launches": batches}
    for r in session.of("corun", *corun.KINDS, LAYER):
        assert set(r.case) == {"batch", *COPY}
        assert set(r.values) == {"alone_us", "copy_us", "copy_bytes", "slowdown"}
        assert r.values["slowdown"] == 1.0, "nothing contends in this GPU"
        rate = link_gb_s(int(r.number("ctas")), int(r.number("stages")))
        assert r.values["copy_us"] == pytest.approx(START_US + r.values["copy_bytes"] / rate / 1e3, rel=1e-4)


def test_rows_in_a_steps_order_take_a_layers_time_and_say_what_was_copied(session: Session) -> None:
    alone = {}
    for r in session.of("corun", "lanes", "launches"):
        assert (set(r.case), set(r.values)) == ({"batch"}, {"alone_us"})
        assert r.us >= r.values["alone_us"] - 1e-3
        alone[r.op, r.number("batch")] = r.us
    for r in session.of("corun", IN_ORDER):
        assert set(r.case) == {"batch", *COPY}
        assert set(r.values) == {"alone_us", "copy_bytes"}
        assert r.values["alone_us"] == pytest.approx(alone["lanes", r.number("batch")], abs=1e-3)
        assert r.values["copy_bytes"] >= 2 * SHAPE.block_bytes(SparseSpec())


def test_step_rows_say_everything_that_was_stated_and_turned(session: Session) -> None:
    for r in session.of("step"):
        assert set(r.case) == STEP | ({"transfer"} if config_of(r).transfer != "uva" else set())
        assert r.op == r.case["policy"]
        traced = r.number("miss_rate")
        assert dict(r.values) == {"misses_per_layer": 2.5, "pool_aliased": 1.0, "miss_rate_of_trace": traced or -1.0}


def test_every_copy_is_one_that_was_meant_to_be_measured(session: Session) -> None:
    links = {tuple(int(r.number(k)) for k in sorted(COPY)) for r in session.of("link", "prefetch")}
    corun_ = {(2 * s[2], c, s[1], s[0]) for s in (DEFAULT, *OTHERS) for c in CTAS}
    assert {(2 * c.chunk, c.ctas, c.stages, c.warps) for c in session.gpu.copies} <= links | corun_
    assert {c.first % 4 for c in session.gpu.copies} == {0}


def test_a_fit_accepts_the_rows_and_finds_the_machine_again(session: Session) -> None:
    costs = fit("none", session.store, SHAPE, SparseSpec())
    fitted = costs.fitted
    assert fitted.start_ns == pytest.approx(1e3 * START_US, rel=0.05)
    assert fitted.step_ns == pytest.approx(1e3 * GRAPH_US, rel=0.02)
    for curve in fitted.transfer:
        expected = [link_gb_s(c, 1 if curve.stages == 2 else curve.stages) for c in curve.ctas]
        assert curve.values == pytest.approx(expected, rel=0.02)
    assert set(fitted.beside) == set(corun.KINDS)
    assert {b for b, _ in fitted.lanes} == {b for b, _ in fitted.launches} == set(corun.BATCHES)
    assert (costs.machine.gpu, costs.machine.sms) == ("NVIDIA None", 132)


def test_a_profile_of_the_rows_predicts_the_steps_of_a_machine_where_nothing_contends(
    session: Session, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    store.add_session(str(session.result["session"]), session.store.provenance[str(session.result["session"])])
    for kind in ("link", "kernel", "corun"):
        store.append(kind, session.of(kind))
    # Each step is played many times over: every eighth will do.
    store.append("step", session.of("step")[::8])
    by_gpu, by_host = held_out_rows(store)
    profile = calibrate(tmp_path, "none")
    assert profile.band.count == len(by_gpu) > 0
    assert profile.judged.by_host.count == len(by_host) > 0
    # Too slow by the graphs' own time, which a step pays once and the operations of every kind brought along.
    assert 0 < profile.band.bias == profile.band.median
    assert profile.band.worst < 0.1


@pytest.mark.parametrize("name", PARTS)
def test_the_cases_that_a_part_lists_are_the_rows_that_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(monkeypatch)
    main_measure(tmp_path, 600.0, [name], SHAPE.name)
    left = {(r.kind, r.key) for r in Store(tmp_path).rows() if r.op not in SHARES}
    assert left == can_be_measured(PARTS[name], SHAPE, 141 << 30)


def test_of_a_session_that_is_complete_nothing_is_left_but_what_never_fitted(session: Session) -> None:
    expected = estimate_measure(session.folder, 1.0, [], SHAPE.name)
    assert (expected.left, expected.seconds, expected.cut) == (0, 0.0, ())
    deep = {p.name for p in expected.parts if p.too_big}
    assert "policies" in deep, "shallow needs more layers"
    assert deep <= {"policies", "steps"}, "and so do lookaheads of 4"
    assert sum(p.measured for p in expected.parts) == sum(r.op not in SHARES for r in session.rows)
    assert expected.lines[-1] == "nothing is left to measure"


@pytest.mark.parametrize("budget_s", [600.0, 0.0])
def test_measuring_again_repeats_nothing_and_needs_no_time(session: Session, budget_s: float) -> None:
    replayed, text = len(session.gpu.replayed), {p: p.read_text() for p in session.folder.glob("rows/*")}
    again = main_measure(session.folder, budget_s, list(PARTS), SHAPE.name)
    assert (again["rows"], again["ended"]) == ({}, "complete")
    assert len(session.gpu.replayed) == replayed
    assert {p: p.read_text() for p in session.folder.glob("rows/*")} == text


def test_the_case_of_a_step_reads_back_and_names_a_value_only_where_its_policy_reads_it() -> None:
    workload = Workload(4, 65536, 0.03)
    for config in (Config("sparse"), Config("shallow", score_layer=3, refresh_steps=0, reserve=0.02)):
        case = step_case(workload, config)
        assert (OF_SHALLOW[0] in case) == (config.policy == "shallow")
        row = Row("step", config.policy, "s", "", case, (1.0,))
        assert (workload_of(row), config_of(row)) == (workload, config)
