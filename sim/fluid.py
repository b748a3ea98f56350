"""The shared machine: everything that runs progresses at a rate that changes only when what runs changes."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf

import simpy
from simpy.events import Event

from sparda.engine.plan import Plan
from sparda.sim.costs import CostModel
from sparda.sim.rates import Load, Rates, Role, share_rates
from sparda.sim.timeline import Sample

ROUNDING_NS = 1e-6
"""Float noise in a finishing time; without it a time of exactly 7 ns could round up to 8."""

NEVER = -1

MachineState = tuple[object, ...]


class _Flow:
    """A running operation, or some of a copy's CTAs: what is left of the amount, and how fast that goes."""

    __slots__ = ("ctas", "done", "index", "left", "load", "rate", "stream")

    def __init__(self, stream: str, load: Load, done: Event | None, amount: float, ctas: int = 0) -> None:
        self.stream = stream
        self.load = load
        self.index = (load.index, ctas)
        self.left = amount
        self.rate = 0.0
        self.ctas = ctas
        self.done = done


class FluidMachine:
    """Runs loads at once on one GPU and its link. Time is whole nanoseconds; operations end rounded up.

    A copy's list is split between its CTAs once and for all, so CTAs that find no multiprocessor free start late and
    end late, with their share of the list. ``samples`` collects the GB/s on link and HBM from each instant at which
    they change. ``turn`` numbers the waits of the whole play; ``left_out_ns`` is the time that was not simulated.
    """

    def __init__(self, env: simpy.Environment, plan: Plan, costs: CostModel, turn: Callable[[], int]) -> None:
        self._env = env
        self._turn = turn
        self._plan = plan
        self._costs = costs
        self._known: dict[tuple[tuple[int, int], ...], Rates] = {}
        self._running: list[_Flow] = []
        self._late: list[tuple[_Flow, _Flow]] = []
        """CTAs that wait for a multiprocessor, each group with the operation whose end makes room."""
        self._advanced_to: float = 0
        self._wakes_at: float = NEVER
        self._alarm: Event | None = None
        """The timeout that counts; those set before it change nothing when they fire."""
        self._alarm_turn = NEVER
        self._sampled_at: float = NEVER
        self._settles_later = False
        self.left_out_ns = 0
        self.samples: list[Sample] = []

    def start(self, stream: str, load: Load, done: Event) -> Event:
        """Begin ``load`` of ``stream`` now; ``done`` (which is returned) succeeds when all of it is through."""
        if load.role is Role.PREFETCH:
            self._place(stream, load, done)
        else:
            self._running.append(_Flow(stream, load, done, load.amount))
        if not self._settles_later:
            self._settle()
        return done

    def _place(self, stream: str, load: Load, done: Event) -> None:
        """Start the copy's CTAs that find room; the others wait for the operation that has the least."""
        ctas = load.ctas
        full = min((f for f in self._running if f.load.places is not None), key=_places, default=None)
        early = ctas if full is None else min(ctas, max(0, _places(full) - sum(f.ctas for f in self._running)))
        if early:
            # A copy is done when its last CTA is: the late ones carry the event where there are any.
            begun = _Flow(stream, load, None if early < ctas else done, load.amount * early / ctas, early)
            self._running.append(begun)
        if full is not None and early < ctas:
            late = ctas - early
            self._late.append((_Flow(stream, load, done, load.amount * late / ctas, late), full))

    def _settle(self, _: Event | None = None) -> None:
        """Work out the rates of what runs from now on, and set a timeout for the first that ends."""
        self._settles_later = False
        env, running = self._env, self._running
        now = env.now
        passed, self._advanced_to = now - self._advanced_to, now
        # Layers repeat: a step of hundreds of operations has a few dozen different sets of running loads.
        key = tuple([flow.index for flow in running])
        rates = self._known.get(key) or self._share(key)
        if self._sampled_at == now:
            self.samples.pop()
        self._sampled_at = now
        self.samples.append((int(now) + self.left_out_ns, rates.link_gb_s, rates.hbm_gb_s))
        soonest = inf
        for flow, rate in zip(running, rates.each, strict=True):
            if passed:
                flow.left -= flow.rate * passed
            flow.rate = rate
            if rate and flow.left < soonest * rate:
                soonest = flow.left / rate
        if soonest < inf:
            delay = ceil(soonest - ROUNDING_NS) if soonest > ROUNDING_NS else 0
            if now + delay != self._wakes_at:
                self._wakes_at = now + delay
                self._alarm, self._alarm_turn = env.timeout(delay), self._turn()
                self._alarm.callbacks.append(self._wake)

    def _wake(self, alarm: Event) -> None:
        """End what is through."""
        if alarm is not self._alarm:
            return  # What runs has changed since this timeout was set; another stands in for it.
        now = self._env.now
        self._wakes_at, self._alarm = NEVER, None
        passed, self._advanced_to = now - self._advanced_to, now
        last: Event | None = None
        still: list[_Flow] = []
        for flow in self._running:
            flow.left -= flow.rate * passed
            # Twice the tolerance of the delay: a flow whose end set the timeout is through when it fires.
            if flow.left <= 2 * ROUNDING_NS * flow.rate:
                last = flow.done.succeed() if flow.done else last
                self._make_room(flow, still)
            else:
                still.append(flow)
        self._running = still
        if last is None:
            self._settle()
        else:
            # Whoever waits for these ends starts its next operation in this same instant. Behind them all, as
            # the last callback of the last end, rates are worked out once, without an event of their own.
            self._settles_later = True
            last.callbacks.append(self._settle)

    def _make_room(self, ended: _Flow, running: list[_Flow]) -> None:
        """Start the CTAs that waited for ``ended``."""
        if self._late and ended.load.places is not None:
            running += [flow for flow, full in self._late if full is ended]
            self._late = [(flow, full) for flow, full in self._late if full is not ended]

    def state(self, now: int) -> tuple[int, float, MachineState]:
        """Turn of the alarm that is set, the time until it, and all else that the machine's future depends on.

        To be asked at the end of an instant. Rates need not be in it: they follow from what runs, in its order.
        """
        running = self._running
        late = [(f.stream, f.index, f.left, running.index(full)) for f, full in self._late]
        flows = [(f.stream, f.index, f.left) for f in running]
        return self._alarm_turn, self._wakes_at - now if self._alarm else inf, (now - self._advanced_to, *flows, *late)

    def repeat(self, since: int, period_ns: int, times: int) -> None:
        """Go on ``times`` periods later, in each of which the samples from number ``since`` on came again."""
        last = self.samples[since:]
        for later in range(period_ns, period_ns * times + 1, period_ns):
            self.samples += [(at + later, link, hbm) for at, link, hbm in last]
        self.left_out_ns += period_ns * times

    def _share(self, key: tuple[tuple[int, int], ...]) -> Rates:
        rates = share_rates([(flow.load, flow.ctas) for flow in self._running], self._plan, self._costs)
        self._known[key] = rates
        return rates


def _places(flow: _Flow) -> int:
    """CTAs of a copy that can run beside the flow's operation."""
    return flow.load.places or 0
