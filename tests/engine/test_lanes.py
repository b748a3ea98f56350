"""A plan is issued as it is written: order, streams and waits are its own, whatever carries it out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the engine needs torch")

from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.lanes import SerialLanes, issue
from sparda.engine.plan import Op, Plan
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, SparseSpec

SHAPE = MODELS["minicpm4.1-8b"]
plans = st.builds(
    lambda policy, ahead: make_plan(SHAPE, SparseSpec(), Workload(), Config(policy, lookahead=ahead)),
    st.sampled_from([policy for policy in POLICIES if policy != "infinigen"]),
    st.integers(0, 4),
) | st.just(make_plan(SHAPE, SparseSpec(), Workload(), Config("infinigen")))


class Recorder:
    """Lanes that note what is asked of them; the bindings note what runs, and on which stream."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []
        self.stream: str | None = None

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        assert self.stream is None, "one stream at a time"
        self.stream = stream
        yield
        self.stream = None

    def wait(self, stream: str, op: int) -> None:
        self.events.append(("wait", stream, op))

    def done(self, stream: str, op: int) -> None:
        self.events.append(("done", stream, op))

    def run(self, kind: str, op: Op) -> None:
        assert self.stream is not None
        assert kind == op.kind, "bound to another kind"
        self.events.append(("run", self.stream, op.index))

    def issue(self, plan: Plan) -> list[tuple[str, str, int]]:
        issue(plan, {kind: partial(self.run, kind) for kind in {op.kind for op in plan}}, self)
        return self.events


@settings(deadline=None, max_examples=25)
@given(plans)
def test_operations_run_in_the_order_of_the_plan_each_on_its_stream(plan: Plan) -> None:
    ran = [event for event in Recorder().issue(plan) if event[0] == "run"]
    assert ran == [("run", op.stream, op.index) for op in plan]


@settings(deadline=None, max_examples=25)
@given(plans)
def test_an_operation_is_issued_right_after_its_own_waits_and_no_others(plan: Plan) -> None:
    waits: list[tuple[str, str, int]] = []
    for event in Recorder().issue(plan):
        if event[0] == "wait":
            waits.append(event)
        elif event[0] == "run":
            op = plan.ops[event[2]]
            assert waits == [("wait", op.stream, index) for index in op.after]
            waits.clear()
    assert not waits


@settings(deadline=None, max_examples=25)
@given(plans)
def test_only_awaited_operations_are_marked_done_once_right_after_they_run_and_before_any_wait(plan: Plan) -> None:
    events = Recorder().issue(plan)
    marked = [op for event, _, op in events if event == "done"]
    assert marked == sorted({index for op in plan for index in op.after})
    for place, (event, stream, op) in enumerate(events):
        if event == "done":
            assert events[place - 1] == ("run", stream, op)
            assert plan.ops[op].stream == stream
        if event == "wait":
            assert any(done == ("done", plan.ops[op].stream, op) for done in events[:place])


def test_one_thread_runs_the_same_operations_in_the_same_order() -> None:
    plan = make_plan(SHAPE, SparseSpec(), Workload(), Config(lookahead=2))
    ran: list[int] = []
    issue(plan, {op.kind: lambda op: ran.append(op.index) for op in plan}, SerialLanes())
    assert ran == [op.index for op in plan]


def test_a_kind_without_a_binding_stops_the_step_there() -> None:
    plan = make_plan(SHAPE, SparseSpec(), Workload(), Config())
    ran: list[str] = []
    with pytest.raises(KeyError, match="norm"):
        issue(plan, {"embed": lambda op: ran.append(op.kind)}, SerialLanes())
    assert ran == ["embed"]
