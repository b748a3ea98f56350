"""What moved between two profiles: cases matched by what they measure, and a move counted only beyond the noise.

A case has moved where its time differs by more than three times what both runs spread, and by more than 1 %. The
spread of a row is about one standard deviation of a single sample (half the way from the 10th to the 90th percentile),
and times are medians of several, which vary less: by chance alone three of them are all but never reached, not in
thousands of cases either. What samples of one run cannot show, from one session to the next, is what the 1 % is for.
Events resolve half a microsecond, so differences of a tenth of one are none, whatever the samples say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, log
from statistics import median

from sparda.calibrate.judged import ErrorBand
from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Row, Value, grouped
from sparda.engine.loader import to_plain

COMPARED = ("link", "kernel", "corun", "step", "policy")
TIMES = 3.0
FLOOR = 0.01
RESOLUTION_US = 0.1
"""Half a microsecond over the least operations that a measurement divides it among, twice."""

LEAST_US = 0.001
"""What the store rounds to: a time of 0 is less than this."""

FACTS = (
    "gpu",
    "model",
    "driver",
    "vbios",
    "power_limit_w",
    "sm_clock_max_mhz",
    "ecc",
    "pcie_gen_max",
    "pcie_width",
    "host_cpu",
    "torch",
    "triton",
    "cuda",
    "commit",
)
"""What of a session's provenance may explain that times moved."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One case in both. ``spread``: both rows' spreads combined, as a share."""

    kind: str
    op: str
    case: Mapping[str, Value]
    a_us: float
    b_us: float
    spread: float

    @property
    def ratio(self) -> float:
        """B over A."""
        return max(self.b_us, LEAST_US) / max(self.a_us, LEAST_US)

    @property
    def shift(self) -> float:
        """Logarithm of the ratio: the same way up as down, whichever of the two comes first."""
        return log(self.ratio)

    @property
    def threshold(self) -> float:
        """Shift beyond which the case has moved."""
        return max(FLOOR, TIMES * self.spread)

    @property
    def moved(self) -> int:
        """1: B takes longer; -1: B takes less; 0: no difference beyond the noise."""
        if abs(self.b_us - self.a_us) <= RESOLUTION_US or abs(self.shift) <= self.threshold:
            return 0
        return 1 if self.shift > 0 else -1

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "kind": self.kind,
            "op": self.op,
            "case": dict(self.case),
            "a_us": self.a_us,
            "b_us": self.b_us,
            "ratio": self.ratio,
            "spread": self.spread,
            "threshold": self.threshold,
            "moved": self.moved,
        }


@dataclass(frozen=True, slots=True)
class OpDiff:
    """All cases of one operation. ``only_a``, ``only_b``: how many are in one alone."""

    kind: str
    op: str
    pairs: tuple[Pair, ...]
    only_a: int
    only_b: int

    @property
    def up(self) -> int:
        return sum(p.moved > 0 for p in self.pairs)

    @property
    def down(self) -> int:
        return sum(p.moved < 0 for p in self.pairs)

    @property
    def median_ratio(self) -> float | None:
        """None without a case in both."""
        return median(p.ratio for p in self.pairs) if self.pairs else None

    @property
    def worst(self) -> Pair | None:
        """Of the cases that moved the one that moved farthest."""
        return max((p for p in self.pairs if p.moved), key=lambda p: abs(p.shift), default=None)

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON, without the cases."""
        return {
            "kind": self.kind,
            "op": self.op,
            "both": len(self.pairs),
            "up": self.up,
            "down": self.down,
            "median_ratio": self.median_ratio,
            "worst": self.worst.to_dict() if self.worst else None,
            "only_a": self.only_a,
            "only_b": self.only_b,
        }


@dataclass(frozen=True, slots=True)
class Side:
    """What one of the two is: its label, machine, provenance (every value that a session of it has) and band."""

    label: str
    gpu: str
    machine: Mapping[str, object]
    facts: Mapping[str, tuple[str, ...]]
    band: ErrorBand
    throttled_rows: int


@dataclass(frozen=True, slots=True)
class Diff:
    """Two profiles side by side."""

    a: Side
    b: Side
    ops: tuple[OpDiff, ...]

    @property
    def same_gpu(self) -> bool:
        return self.a.gpu == self.b.gpu

    @property
    def machine(self) -> dict[str, tuple[object, object]]:
        """Values of the machine that differ; its name is not one."""
        keys = [k for k in self.a.machine if k != "name" and self.a.machine[k] != self.b.machine.get(k)]
        return {k: (self.a.machine[k], self.b.machine.get(k)) for k in keys}

    @property
    def facts(self) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Provenance that differs."""
        keys = dict.fromkeys([*self.a.facts, *self.b.facts])
        pairs = {k: (self.a.facts.get(k, ()), self.b.facts.get(k, ())) for k in keys}
        return {k: (a, b) for k, (a, b) in pairs.items() if a != b}

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON: the summary by operation, then every case."""
        return {
            "a": self.a.label,
            "b": self.b.label,
            "same_gpu": self.same_gpu,
            "moved": sum(o.up + o.down for o in self.ops),
            "both": sum(len(o.pairs) for o in self.ops),
            "rule": {"times_spread": TIMES, "floor": FLOOR, "resolution_us": RESOLUTION_US},
            "machine": {k: list(v) for k, v in self.machine.items()},
            "provenance": {k: [list(a), list(b)] for k, (a, b) in self.facts.items()},
            "bands": [to_plain(self.a.band), to_plain(self.b.band)],
            "throttled_rows": [self.a.throttled_rows, self.b.throttled_rows],
            "ops": [o.to_dict() for o in self.ops],
            "cases": [p.to_dict() for o in self.ops for p in o.pairs],
        }


def compare_rows(a: Iterable[Row], b: Iterable[Row]) -> tuple[OpDiff, ...]:
    """Rows by operation, matched by key; of each side one row a case. In the order of COMPARED, then by operation."""
    sides = [grouped(rows, lambda r: (r.kind, r.op)) for rows in (a, b)]
    order = sorted(dict.fromkeys([*sides[0], *sides[1]]), key=lambda k: (COMPARED.index(k[0]), k[1]))
    return tuple(_compare_op(kind, op, *(side.get((kind, op), []) for side in sides)) for kind, op in order)


def _compare_op(kind: str, op: str, a: Sequence[Row], b: Sequence[Row]) -> OpDiff:
    others, usual = {r.key: r for r in b}, (_usual_spread(a), _usual_spread(b))
    pairs = tuple(
        Pair(kind, op, r.case, r.us, other.us, hypot(_spread(r, usual[0]), _spread(other, usual[1])))
        for r in a
        if (other := others.get(r.key))
    )
    return OpDiff(kind, op, pairs, len(a) - len(pairs), len(b) - len(pairs))


def _usual_spread(rows: Iterable[Row]) -> float:
    return median([r.spread for r in rows if len(r.samples_us) > 1] or [0.0])


def _spread(row: Row, usual: float) -> float:
    """A single sample does not show its noise: that of the operation's other rows stands in for it."""
    return row.spread if len(row.samples_us) > 1 else usual


def diff(a: Profile, b: Profile) -> Diff:
    """Compare two profiles by the newest rows of each that no throttling GPU measured, where there are such."""
    rows = [[r for kind in COMPARED for r in profile.store.latest(kind)] for profile in (a, b)]
    sides = [_side(profile, of) for profile, of in zip((a, b), rows, strict=True)]
    return Diff(sides[0], sides[1], compare_rows(*rows))


def _side(profile: Profile, rows: Sequence[Row]) -> Side:
    known = profile.store.provenance
    names = {r.session for r in rows}
    sessions = [facts for name, facts in known.items() if name in names] or list(known.values())
    facts = {key: _values(s.get(key) for s in sessions) for key in FACTS}
    facts["sm_clock_seen_mhz"] = _values(_clock(s) for s in sessions)
    return Side(
        label=profile.label,
        gpu=profile.machine.gpu,
        machine=to_plain(profile.machine),
        facts={k: v for k, v in facts.items() if v},
        band=profile.band,
        throttled_rows=sum(r.throttled for r in rows),
    )


def _values(found: Iterable[object]) -> tuple[str, ...]:
    return tuple(sorted({str(v) for v in found if v is not None}))


def _clock(session: Mapping[str, object]) -> object:
    """Median SM clock throughout the session, where it was watched."""
    watched = session.get("watched")
    clock = watched.get("sm_clock_mhz") if isinstance(watched, Mapping) else None
    return clock.get("median") if isinstance(clock, Mapping) else None
