"""A step in pieces is the step: every operation once, in order, after all that it waits for."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("triton", reason="the engine's kernels need triton")

import torch

from sparda.engine.actions import CALLED, Action, cut
from sparda.engine.config import POLICIES, TRANSFERS, Config, Workload
from sparda.engine.graph import Replayable
from sparda.engine.lanes import SerialLanes
from sparda.engine.pieces import HostLanes, Pieces
from sparda.engine.plan import COPY, HOST, MAIN, PREFETCH, SELECT, STREAMS, Op, Plan, PlanBuilder, Work
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, SparseSpec
from tests.calibrate.fake_cuda import FakeCuda
from tests.engine.test_decoder import decoder_of

SHAPE = MODELS["minicpm4.1-8b"]


def built(ops: list[tuple[str, list[int]]]) -> Plan:
    """A plan of operations on these streams, each waiting for some of those before it."""
    builder = PlanBuilder()
    for index, (stream, after) in enumerate(ops):
        builder.add("op", Work(), stream=stream, after=[a % index for a in after if index])
    return builder.plan(SHAPE, SparseSpec(), Workload(), Config())


random_plans = st.builds(
    built, st.lists(st.tuples(st.sampled_from(STREAMS), st.lists(st.integers(0, 40), max_size=3)), max_size=40)
)
real_plans = st.builds(
    lambda policy, transfer, lookahead: make_plan(
        SHAPE, SparseSpec(), Workload(), Config(policy, transfer=transfer, lookahead=lookahead)
    ),
    st.sampled_from([p for p in POLICIES if p != "infinigen"]),
    st.sampled_from(TRANSFERS),
    st.integers(0, 3),
)
plans = random_plans | real_plans | st.just(make_plan(SHAPE, SparseSpec(), Workload(), Config("infinigen")))
examples = settings(deadline=None, max_examples=200)


def issue(actions: list[Action]) -> dict[int, set[int]]:
    """For each operation all that is surely done when it begins, whatever the speed of streams and host.

    The host's own work is done when it issues the next thing; it knows of others' what it has waited for. A stream
    begins a thing after all it was given before, all that the host knew of, and the marks that it waits for.
    """
    host: set[int] = set()
    given: dict[str, set[int]] = {}
    marks: dict[int, set[int]] = {}
    begins: dict[int, set[int]] = {}
    for action in actions:
        done = host | given.get(action.stream, set())
        for index in action.waits:
            assert index in marks, "waits for an event that is not recorded yet"
            done |= marks[index]
        for op in action.ops:
            begins[op.index] = set(done)
            done.add(op.index)
        given[action.stream] = done
        if action.stream == HOST:
            host = done
        elif action.marked:
            marks[action.ops[-1].index] = done
    return begins


@examples
@given(plans)
def test_every_operation_is_in_one_action_in_the_order_of_the_plan(plan: Plan) -> None:
    assert tuple(op for action in cut(plan) for op in action.ops) == plan.ops


@examples
@given(plans)
def test_an_action_is_of_one_stream_and_what_the_host_does_or_starts_stands_alone(plan: Plan) -> None:
    for action in cut(plan):
        assert {op.stream for op in action.ops} == {action.stream}
        assert len(action.ops) == 1 or action.stream not in CALLED


@examples
@given(plans)
def test_every_operation_begins_after_all_it_waits_for_and_all_before_it_on_its_stream(plan: Plan) -> None:
    begins = issue(cut(plan))
    for op in plan:
        assert set(op.after) <= begins[op.index]
        assert {other.index for other in plan.ops[: op.index] if other.stream == op.stream} <= begins[op.index]


@examples
@given(plans)
def test_only_a_first_operation_waits_and_only_a_last_one_is_waited_for(plan: Plan) -> None:
    awaited = {index for op in plan for index in op.after}
    for action in cut(plan):
        assert not any(op.after for op in action.ops[1:])
        assert not any(op.index in awaited for op in action.ops[:-1])


@examples
@given(plans)
def test_only_what_is_waited_for_is_marked_and_nothing_waits_for_the_host_by_an_event(plan: Plan) -> None:
    actions = cut(plan)
    waited = {index for action in actions for index in action.waits}
    assert {action.ops[-1].index for action in actions if action.marked} == waited
    assert all(plan.ops[index].stream != HOST for index in waited)


def test_infinigens_layer_is_two_graphs_a_scatter_and_two_calls() -> None:
    plan = make_plan(SHAPE, SparseSpec(), Workload(), Config("infinigen"))
    actions = cut(plan)
    (start,) = [i for i, action in enumerate(actions) if action.ops[0].name == "attention[5]"]
    named = [(action.stream, action.ops[0].name, action.ops[-1].name) for action in actions[start : start + 6]]
    assert named == [
        (MAIN, "attention[5]", "partial_score[7]"),
        (SELECT, "select[7]", "report[7]"),
        (HOST, "gather[6]", "gather[6]"),
        (COPY, "upload[6]", "upload[6]"),
        (PREFETCH, "scatter[6]", "scatter[6]"),
        (MAIN, "attention[6]", "partial_score[8]"),
    ]


@pytest.mark.parametrize("ahead", [1, 2])
def test_spardas_host_starts_copies_when_the_main_stream_has_all_that_needs_no_blocks(ahead: int) -> None:
    config = Config(lookahead=ahead, transfer="batch")
    actions = cut(make_plan(SHAPE, SparseSpec(), Workload(), config))
    (start,) = [i for i, action in enumerate(actions) if action.ops[0].name == "attention[5]"]
    named = [(action.stream, action.ops[0].name, action.ops[-1].name) for action in actions[start : start + 5]]
    assert named == [
        (MAIN, "attention[5]", f"score[{6 + ahead}]"),
        (SELECT, f"select[{6 + ahead}]", f"report[{6 + ahead}]"),
        (HOST, f"enlist[{5 + ahead}]", f"enlist[{5 + ahead}]"),
        (COPY, f"batch[{5 + ahead}]", f"batch[{5 + ahead}]"),
        (MAIN, "attention[6]", f"score[{7 + ahead}]"),
    ]


class OneThread(SerialLanes):
    """No GPU: what is captured runs when it is replayed."""

    def __init__(self) -> None:
        self.captures: list[str] = []

    def begin(self) -> None: ...

    def captured(self, stream: str, body: Callable[[], None]) -> Replayable:
        self.captures.append(stream)

        class Later:
            def replay(self) -> None:
                body()

        return Later()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    ("config", "steps"), [(Config("infinigen", top_k=6), 3), (Config(top_k=6, transfer="gather"), 2)]
)
def test_a_step_in_pieces_gives_the_very_bits_of_the_step_issued_at_once(config: Config, steps: int) -> None:
    whole, parts = decoder_of(config, 2), decoder_of(config, 2)
    pieces = Pieces(parts.plan, parts.bindings, OneThread())
    for _ in range(steps):
        whole.issue()
        pieces.replay()
        assert torch.equal(whole.logits, parts.logits)
        assert torch.equal(whole.tokens, parts.tokens)


def test_kernels_are_captured_once_and_the_hosts_work_and_its_copies_are_done_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeCuda()
    gpu.install(monkeypatch)
    plan = make_plan(SHAPE, SparseSpec(), Workload(), Config("infinigen"))
    ran: list[int] = []

    def run(op: Op) -> None:
        ran.append(op.index)
        if op.stream != HOST:
            gpu.current.work(1.0)

    pieces = Pieces(plan, {op.kind: run for op in plan}, HostLanes(plan.streams))
    called = [op.index for op in plan if op.stream in CALLED]
    assert ran == [op.index for op in plan if op.stream not in CALLED]
    ran.clear()
    for _ in range(3):
        pieces.replay()
    assert ran == 3 * called
    assert len(gpu.replayed) == 3 * sum(action.stream not in CALLED for action in pieces.actions)


def test_the_host_waits_for_a_report_before_it_gathers_and_main_for_the_scatter_before_it_attends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeCuda()
    gpu.install(monkeypatch)
    plan = make_plan(SHAPE, SparseSpec(), Workload(), Config("infinigen"))
    lanes = HostLanes(plan.streams)
    waited: list[tuple[str, int]] = []
    wait = lanes.wait

    def noted(stream: str, op: int) -> None:
        waited.append((stream, op))
        wait(stream, op)

    monkeypatch.setattr(lanes, "wait", noted)
    Pieces(plan, {op.kind: lambda op: None for op in plan}, lanes).replay()
    index = {op.name: op.index for op in plan}
    for layer in range(1, SHAPE.layers):
        assert (HOST, index[f"report[{layer}]"]) in waited
        assert (PREFETCH, index[f"upload[{layer}]"]) in waited
        assert (MAIN, index[f"scatter[{layer}]"]) in waited


def test_one_stream_is_waited_for_before_the_host_reads_what_a_gpu_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeCuda()
    gpu.install(monkeypatch)
    lanes = SerialLanes()
    lanes.wait(COPY, 3)
    assert gpu.waits == 0
    lanes.wait(HOST, 3)
    assert gpu.waits == 1
