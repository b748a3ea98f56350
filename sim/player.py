"""Plays a plan on a machine's costs: one SimPy process per stream, all on one shared machine."""

from __future__ import annotations

from collections.abc import Generator
from itertools import count
from math import ceil

import simpy
from simpy.events import Event

from sparda.engine.actions import cut
from sparda.engine.errors import SpardaError
from sparda.engine.plan import COPY, HOST, MAIN, Op, Plan
from sparda.sim.costs import CostModel
from sparda.sim.fluid import ROUNDING_NS, FluidMachine
from sparda.sim.rates import Loads, Role
from sparda.sim.steady import EndOfInstant, Shortcut
from sparda.sim.stream import BEGINS, JOINS, RUNS, Stream
from sparda.sim.timeline import Span, Timeline


class _Player:
    """The state of one play: how far each stream is, and the events of what was issued and what has ended.

    Where the machine plays by itself and ``whole`` is False, it may be moved on while it plays (``sim.steady``): a
    process must look up what it needs of its operation anew each time it has waited.
    """

    def __init__(self, plan: Plan, costs: CostModel, issue_ns: int, whole: bool) -> None:
        self.env = simpy.Environment()
        self.turn = count().__next__
        self.machine = FluidMachine(self.env, plan, costs, self.turn)
        self.loads = Loads(plan, costs)
        self.costs, self.plan = costs, plan
        self.joins: dict[tuple[str, bool], int] = {}
        self.transfer_start_ns = _whole_ns(costs.transfer_start_ns(plan))
        # In the order of their first operations, in which they take their turn in the first instant.
        self.streams = {name: Stream(name) for name in dict.fromkeys([op.stream for op in plan.ops])}
        for op in plan.ops:
            self.streams[op.stream].ops.append(op)
        self.finished: list[Event | None] = [None] * len(plan.ops)
        self.issued: list[Event] = []
        self.shortcut: Shortcut | None = None
        by_host = HOST in plan.streams
        if by_host or issue_ns:
            self.issued = [self.env.event() for _ in plan.ops]
            self.env.process(self.host(issue_ns, by_host))
        elif not whole:
            self.shortcut = Shortcut(plan, tuple(self.streams.values()), self.machine, self.finished)
        # The kind that begins a layer; a choice made for a later layer bears that layer's number, so no number tells.
        self.first_kind = next((op.kind for op in plan.ops if op.stream == MAIN and op.layer is not None), None)
        for name, stream in self.streams.items():
            if name != HOST:
                self.env.process(self.play(stream))

    def host(self, issue_ns: int, by_host: bool) -> Generator[Event, None, None]:
        """The host: issues the plan in its order, and does its own operations where they come."""
        env = self.env
        actions = [action.ops for action in cut(self.plan)] if by_host else [(op,) for op in self.plan]
        for ops in actions:
            if ops[0].stream == HOST:
                yield from self.run(self.streams[HOST])
                continue
            busy_ns = _whole_ns(self.costs.issue_ns(ops[0], self.plan)) if by_host else issue_ns
            if ops[0].stream == COPY:
                self.issued[ops[0].index].succeed()
            if busy_ns:
                yield env.timeout(busy_ns)
            for op in ops:
                if op.stream != COPY:
                    self.issued[op.index].succeed()

    def play(self, stream: Stream) -> Generator[Event, None, None]:
        """The operations of one stream, one after the other."""
        ops = stream.ops
        if self.issued:
            while stream.at < len(ops):
                yield self.issued[ops[stream.at].index]
                yield from self.run(stream)
            return
        watched = self.shortcut if stream.name == MAIN else None
        while stream.at < len(ops):
            if watched is not None and ops[stream.at].kind == self.first_kind:
                EndOfInstant(self.env, watched.look)
            yield from self.run(stream)

    def run(self, stream: Stream) -> Generator[Event, None, None]:
        """The operation that a stream has come to, once all it waits for is done."""
        env, ops, machine, finished = self.env, stream.ops, self.machine, self.finished
        op = ops[stream.at]
        if op.after:
            for number in range(len(op.after)):
                index = ops[stream.at].after[number]
                if event := finished[index] or self.end_ahead(index):
                    stream.phase, stream.turn = number, self.turn()
                    yield event
            if join_ns := self.join_ns(op):
                yield self.latency(stream, JOINS, join_ns)
        stream.starts.append(int(env.now) + machine.left_out_ns)
        load = self.loads.of(op)
        if load.role is Role.PREFETCH and self.transfer_start_ns:
            # The first reads are under way but nothing moves yet, so nothing else is disturbed.
            yield self.latency(stream, BEGINS, self.transfer_start_ns)
        index = ops[stream.at].index
        done = finished[index]
        if done is None:
            done = finished[index] = env.event()
        if load.copies and not load.amount:
            done.succeed()
        else:
            stream.phase, stream.turn = RUNS, self.turn()
            yield machine.start(stream.name, load, done)
        stream.ends.append(int(env.now) + machine.left_out_ns)
        stream.at += 1

    def latency(self, stream: Stream, phase: int, ns: int) -> Event:
        """The end of a time that passes whatever else happens."""
        stream.phase, stream.turn, stream.due = phase, self.turn(), self.env.now + ns
        return self.env.timeout(ns)

    def end_ahead(self, index: int) -> Event | None:
        """A new event for an operation's end; None where it was left out, so has ended."""
        stream = self.streams[self.plan.ops[index].stream]
        if stream.at == len(stream.ops) or index < stream.ops[stream.at].index:
            return None
        event = self.finished[index] = self.env.event()
        return event

    def join_ns(self, op: Op) -> int:
        """What ``op`` pays for waiting; the same for every layer that chooses beside it."""
        key = (op.kind, op.index in self.plan.beside_choice)
        if key not in self.joins:
            self.joins[key] = _whole_ns(self.costs.join_ns(op, self.plan))
        return self.joins[key]


def play(plan: Plan, costs: CostModel, issue_ns: int = 0) -> Timeline:
    """Simulate one decode step. The same plan and costs give the same timeline, byte for byte.

    An operation starts when its stream's last one has ended and all it waits for has ended; where it waits for
    other streams, ``join_ns`` later. A step with work of the host in it is issued action by action, which takes the
    host the time that the costs say; one that is in no graph at all operation by operation, ``issue_ns`` each. The
    host runs ahead of the GPU where it can. Layers that repeat each other are simulated once (``sim.steady``). Raises
    SpardaError where some operation can never run.
    """
    return _play(plan, costs, issue_ns, whole=False)


def play_whole(plan: Plan, costs: CostModel, issue_ns: int = 0) -> Timeline:
    """``play`` without any shortcut: every layer simulated."""
    return _play(plan, costs, issue_ns, whole=True)


def _play(plan: Plan, costs: CostModel, issue_ns: int, whole: bool) -> Timeline:
    player = _Player(plan, costs, issue_ns, whole)
    player.env.run()
    streams = player.streams.values()
    stuck = min((s.ops[s.at] for s in streams if not s.over), key=lambda op: op.index, default=None)
    if stuck is not None:
        raise SpardaError(
            f"operation {stuck.name} of stream {stuck.stream} never ends on {costs.machine.name}; give a plan whose "
            "waits form no circle and a machine whose bandwidths are all above zero."
        )
    spans = [span for s in streams for span in map(Span, s.ops, s.starts, s.ends)]
    spans.sort(key=lambda span: span.op.index)
    return Timeline(
        plan=plan,
        machine=costs.machine.name,
        spans=tuple(spans),
        makespan_ns=max((s.ends[-1] for s in streams), default=0) + _whole_ns(costs.step_ns(plan)),
        link_bytes=sum([op.work.h2d_bytes for op in plan.ops]),
        samples=tuple(player.machine.samples),
    )


def _whole_ns(ns: float) -> int:
    return max(0, ceil(ns - ROUNDING_NS))
