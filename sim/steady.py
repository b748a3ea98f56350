"""Identical layers are simulated once: an exact shortcut through a step that repeats itself.

Once a simulation comes back to a state in which it has been, it does again what it did from there, as long as the
operations it meets are the same. So the state is looked at once a layer, at the end of an instant, when nothing more
can happen in it. Where it is an earlier one, each stream has moved on by whole numbers of operations meanwhile; where
the operations ahead repeat those behind, each stream is moved on by as many such periods as there are, what happened
is written down as often, and the simulation goes on from there.

This is exact, to the last bit, because the state holds all that the future depends on besides the plan:

* of every stream that is not through, whether its operation waits, joins, begins or runs, and until when;
* of everything that runs, in the order in which it began, how much is left, as the very float;
* the copy's thread blocks that wait for a multiprocessor, and for whom;
* the order in which all these waits began: it decides who goes first where several end in one instant.

Times in it are counted from now. They are whole nanoseconds, so differences of them are exact, and rates and what is
left follow from the state by the same sums in the same order. What has ended need not be known one by one: it is what
lies behind each stream's place. A stream that stands still through a period waits for one operation, whose place does
not move: it bounds how many periods are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType

from simpy.core import Environment
from simpy.events import Event, EventPriority

from sparda.engine.plan import Op, Plan
from sparda.sim.fluid import FluidMachine
from sparda.sim.stream import Stream

LAST = EventPriority(2)

State = NewType("State", tuple[object, ...])


class EndOfInstant(Event):
    """Comes after all else that happens now, and changes nothing by itself."""

    def __init__(self, env: Environment, then: Callable[[Event], None]) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        self.callbacks.append(then)
        env.schedule(self, LAST)


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a play was: the time, each stream's place, how many samples there were."""

    now: int
    places: tuple[int, ...]
    samples: int


class Shortcut:
    """Watches one play and leaves out what repeats. ``finished``: the event of each operation's end, where made."""

    def __init__(
        self, plan: Plan, streams: Sequence[Stream], machine: FluidMachine, finished: list[Event | None]
    ) -> None:
        self._plan = plan
        self._streams = streams
        self._machine = machine
        self._finished = finished
        self._seen: dict[State, Mark] = {}
        self._place: list[int] = []
        self._number = {stream.name: i for i, stream in enumerate(streams)}

    def look(self, event: Event) -> None:
        """At the end of an instant: where the state is one that was, leave out as much as can be."""
        now = int(event.env.now)
        state = self._state(now)
        here = Mark(now, tuple([s.at for s in self._streams]), len(self._machine.samples))
        seen = self._seen.get(state)
        if seen is not None and self._leave_out(seen, here):
            # Between marks on either side of what was left out lie more operations than time was simulated for.
            self._seen.clear()
        else:
            self._seen[state] = here

    def _state(self, now: int) -> State:
        turn, wakes_in, machine = self._machine.state(now)
        waits = [(s.turn, s.name, s.phase, max(0, s.due - now)) for s in self._streams if s.at < len(s.ops)]
        waits.append((turn, "", 0, wakes_in))
        waits.sort()
        return State((machine, *[wait[1:] for wait in waits]))

    def _leave_out(self, seen: Mark, here: Mark) -> bool:
        """Move all on by as many periods as repeat the one from ``seen`` to ``here``; False where there is none."""
        steps = [at - was for at, was in zip(here.places, seen.places, strict=True)]
        period = here.now - seen.now
        if period <= 0 or not any(steps):
            return False
        if not self._place:
            self._place = _places(self._plan, self._streams)
        moving, fixed = self._awaited(steps)
        times = min(
            [self._alike(s, n, steps, seen.places) for s, n in zip(self._streams, steps, strict=True) if n]
            # What stands still waits for an operation that must still be ahead, and that nobody else waits for.
            + [(at - 1 - max(moving[t])) // steps[t] for t, at in fixed if steps[t]]
        )
        if times < 1:
            return False
        self._move_events(moving, steps, times)
        for stream, step in zip(self._streams, steps, strict=True):
            if step:
                _repeat(stream, step, period, times)
        self._machine.repeat(seen.samples, period, times)
        return True

    def _alike(self, stream: Stream, step: int, steps: Sequence[int], before: Sequence[int]) -> int:
        """Whole periods for which the operations of ``stream`` from its place on are those of a period earlier."""
        ahead = stream.ops[stream.at :]
        alike = len(ahead)
        for n, (a, b) in enumerate(zip(stream.ops[stream.at - step :], ahead, strict=False)):
            if a.kind != b.kind or (a.work is not b.work and a.work != b.work):
                alike = n
                break
            if (a.after or b.after) and not self._wait_alike(a, b, steps, before):
                alike = n
                break
        # The operation that it comes to after the last period must be alike too.
        return (alike - 1) // step

    def _wait_alike(self, a: Op, b: Op, steps: Sequence[int], before: Sequence[int]) -> bool:
        """Whether ``b`` waits in a period as ``a`` did in the one before; what ended ``before`` holds up neither."""
        if len(a.after) != len(b.after):
            return False
        ops, place, beside = self._plan.ops, self._place, self._plan.beside_choice
        for x, y in zip(a.after, b.after, strict=True):
            if ops[x].stream != ops[y].stream:
                return False
            t = self._number[ops[x].stream]
            if place[y] != place[x] + steps[t] and max(place[x], place[y]) >= before[t]:
                return False
        return (a.index in beside) == (b.index in beside)

    def _awaited(self, steps: Sequence[int]) -> tuple[list[set[int]], list[tuple[int, int]]]:
        """Places of each stream whose ends streams that move wait for; (stream, place) of what the others wait for."""
        moving = [{s.at} for s in self._streams]
        fixed: list[tuple[int, int]] = []
        for stream, step in zip(self._streams, steps, strict=True):
            if stream.over or stream.phase < 0:
                continue
            index = stream.ops[stream.at].after[stream.phase]
            t = self._number[self._plan.ops[index].stream]
            if step:
                moving[t].add(self._place[index])
            else:
                fixed.append((t, self._place[index]))
        return moving, fixed

    def _move_events(self, moving: Sequence[set[int]], steps: Sequence[int], times: int) -> None:
        """Give the operations that streams come to the events of those that stood where they stand."""
        finished, moved = self._finished, []
        for stream, step, places in zip(self._streams, steps, moving, strict=True):
            for at in places if step else ():
                old, new = stream.ops[at].index, stream.ops[at + step * times].index
                moved.append((new, finished[old]))
                finished[old] = None
        for index, event in moved:
            finished[index] = event


def _places(plan: Plan, streams: Sequence[Stream]) -> list[int]:
    """By index in the plan, each operation's place in its stream."""
    places = [0] * len(plan.ops)
    for stream in streams:
        for place, op in enumerate(stream.ops):
            places[op.index] = place
    return places


def _repeat(stream: Stream, step: int, period: int, times: int) -> None:
    """Move ``stream`` on by ``times`` periods of ``step`` operations, whose times are those of the last one."""
    for happened in (stream.starts, stream.ends):
        last = happened[-step:]
        for later in range(period, period * times + 1, period):
            happened += [ns + later for ns in last]
    stream.at += step * times
