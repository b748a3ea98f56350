"""Random plans of layers that repeat, on machines whose times are so short that much happens in one instant."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from hypothesis import strategies as st

from sparda.engine.plan import COPY, MAIN, PREFETCH, SELECT, Op, Plan, PlanBuilder, Work
from tests.sim.sim_fakes import FakeCosts, built

Wait = tuple[int, int]
"""(layers back, which operation of that layer)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a layer that repeats."""

    kind: str
    stream: str
    work: Work
    waits: tuple[Wait, ...]


@dataclass(frozen=True)
class JoinsBesideChoices(FakeCosts):
    """Joins cost only what measured ones do: where a choice may run beside."""

    def join_ns(self, op: Op, plan: Plan) -> float:
        return self.join if op.index in plan.beside_choice else 0.0


@st.composite
def _steps(draw: st.DrawFn) -> Step:
    stream = draw(st.sampled_from((MAIN, SELECT, PREFETCH, COPY)))
    waits = tuple(draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=2)))
    if stream == COPY or draw(st.booleans()):
        moved = draw(st.sampled_from((0, 64, 32768, 65536, 100000)))
        work = Work(h2d_bytes=moved, hbm_bytes=moved, ctas=draw(st.integers(1, 4)))
        return Step("upload" if stream == COPY else "prefetch", stream, work, waits)
    work = Work(hbm_bytes=draw(st.sampled_from((0, 100, 400, 4000))), d2h_bytes=draw(st.sampled_from((0, 50))))
    return Step(draw(st.sampled_from(("attention", "down", "score"))), stream, work, waits)


_layers = st.lists(_steps(), max_size=6)


@st.composite
def _plans(draw: st.DrawFn) -> Plan:
    """Runs of equal layers, one or several; here and there a stream that waits for something much later."""
    ops, layers = PlanBuilder(), list[list[int]]()
    for layer, count in draw(st.lists(st.tuples(_layers, st.integers(1, 14)), min_size=1, max_size=3)):
        for _ in range(count):
            layers.append(_layer(ops, layer, layers))
        if draw(st.booleans()):
            ops.add("report", Work(d2h_bytes=100), stream=draw(st.sampled_from((SELECT, PREFETCH))), after=layers[-1])
    last = ops.add("writeback", Work(d2h_bytes=1000), stream=PREFETCH, after=layers[-1][:1])
    ops.add("sample", Work(hbm_bytes=100), after=[last])
    return built(ops)


def _layer(ops: PlanBuilder, steps: list[Step], before: list[list[int]]) -> list[int]:
    made = [ops.add("norm", Work(hbm_bytes=40), layer=len(before))]
    for step in steps:
        after = [layer[which % len(layer)] for back, which in step.waits for layer in [*before, made][-1 - back :][:1]]
        made.append(ops.add(step.kind, step.work, layer=len(before), stream=step.stream, after=after))
    return made


plans = _plans()
durations = st.dictionaries(
    st.sampled_from(("norm", "attention", "down", "score")), st.sampled_from((0.0, 1.0, 10.0, 33.3, 100.0, 1000.0))
)
machines = st.builds(
    JoinsBesideChoices,
    hbm_gb_s=st.sampled_from((1.0, 4.3, 1000.0)),
    link_gb_s=st.sampled_from((0.5, 47.3, 1000.0)),
    copy_gb_s=st.sampled_from((10.0, 45.0, 1000.0)),
    per_cta_gb_s=st.sampled_from((inf, 3.0, 7.7)),
    floor_ns=st.sampled_from((0.0, 1.0, 3.3, 10.0, 100.0)),
    slower=st.sampled_from((1.0, 1.1, 2.0)),
    share=st.sampled_from((1.0, 0.9, 0.5)),
    transfer_start=st.sampled_from((0.0, 1.0, 10.0, 30.0)),
    join=st.sampled_from((0.0, 1.0, 10.0)),
    room=st.sampled_from((None, 0, 1, 3)),
    alone=durations,
)
