"""Plays a plan on a machine's costs: one SimPy process per stream, all on one shared machine."""

from __future__ import annotations

from collections.abc import Generator
from math import ceil

import simpy
from simpy.events import Event

from sparda.engine.actions import cut
from sparda.engine.errors import SpardaError
from sparda.engine.plan import COPY, HOST, Op, Plan
from sparda.sim.costs import CostModel
from sparda.sim.fluid import ROUNDING_NS, FluidMachine
from sparda.sim.rates import Loads, Role
from sparda.sim.steady import shortened
from sparda.sim.timeline import Span, Timeline

UNPLAYED = -1


class _Player:
    """The state of one play: when each operation was issued, started and ended, and the events of that."""

    def __init__(self, plan: Plan, costs: CostModel, issue_ns: int) -> None:
        self.env = simpy.Environment()
        self.machine = FluidMachine(self.env, plan, costs)
        self.loads = Loads(plan, costs)
        self.costs, self.plan = costs, plan
        self.joins: dict[tuple[str, bool], int] = {}
        self.transfer_start_ns = _whole_ns(costs.transfer_start_ns(plan))
        self.finished = [self.env.event() for _ in plan.ops]
        self.issued: list[Event] = []
        self.starts = [UNPLAYED] * len(plan.ops)
        self.ends = [UNPLAYED] * len(plan.ops)
        by_host = HOST in plan.streams
        if by_host or issue_ns:
            self.issued = [self.env.event() for _ in plan.ops]
            self.env.process(self.host(issue_ns, by_host))

    def host(self, issue_ns: int, by_host: bool) -> Generator[Event, None, None]:
        """The host: issues the plan in its order, and does its own operations where they come."""
        env = self.env
        actions = [action.ops for action in cut(self.plan)] if by_host else [(op,) for op in self.plan]
        for ops in actions:
            if ops[0].stream == HOST:
                yield from self.run(ops[0], int(env.now))
                continue
            busy_ns = _whole_ns(self.costs.issue_ns(ops[0], self.plan)) if by_host else issue_ns
            if ops[0].stream == COPY:
                self.issued[ops[0].index].succeed()
            if busy_ns:
                yield env.timeout(busy_ns)
            for op in ops:
                if op.stream != COPY:
                    self.issued[op.index].succeed()

    def stream(self, ops: list[Op]) -> Generator[Event, None, None]:
        """The operations of one stream, one after the other."""
        now = 0
        for op in ops:
            if self.issued:
                yield self.issued[op.index]
                now = int(self.env.now)
            now = yield from self.run(op, now)

    def run(self, op: Op, now: int) -> Generator[Event, None, int]:
        """One operation, from ``now`` on, once all it waits for is done; returns when it ends."""
        env, index, finished = self.env, op.index, self.finished
        if op.after:
            for earlier in op.after:
                yield finished[earlier]
            if join_ns := self.join_ns(op):
                yield env.timeout(join_ns)
            now = int(env.now)
        self.starts[index] = now
        load = self.loads.of(op)
        if load.role is Role.PREFETCH and self.transfer_start_ns:
            # The first reads are under way but nothing moves yet, so nothing else is disturbed.
            yield env.timeout(self.transfer_start_ns)
        if load.copies and not load.amount:
            finished[index].succeed()
        else:
            yield self.machine.start(load, finished[index])
        self.ends[index] = now = int(env.now)
        return now

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
    if issue_ns or HOST in plan.streams:
        return play_whole(plan, costs, issue_ns)
    return shortened(plan, lambda short: play_whole(short, costs)) or play_whole(plan, costs)


def play_whole(plan: Plan, costs: CostModel, issue_ns: int = 0) -> Timeline:
    """``play`` without any shortcut: every layer simulated."""
    player = _Player(plan, costs, issue_ns)
    streams: dict[str, list[Op]] = {}
    for op in plan.ops:
        if op.stream != HOST:
            streams.setdefault(op.stream, []).append(op)
    for ops in streams.values():
        player.env.process(player.stream(ops))
    player.env.run()
    for op, end in zip(plan.ops, player.ends, strict=True):
        if end == UNPLAYED:
            raise SpardaError(
                f"operation {op.name} of stream {op.stream} never ends on {costs.machine.name}; give a plan whose "
                "waits form no circle and a machine whose bandwidths are all above zero."
            )
    return Timeline(
        plan=plan,
        machine=costs.machine.name,
        spans=tuple(map(Span, plan.ops, player.starts, player.ends)),
        makespan_ns=max(player.ends, default=0) + _whole_ns(costs.step_ns(plan)),
        link_bytes=sum(op.work.h2d_bytes for op in plan.ops),
        samples=tuple(player.machine.samples),
    )


def _whole_ns(ns: float) -> int:
    return max(0, ceil(ns - ROUNDING_NS))
