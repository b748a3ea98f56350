"""What moved between two profiles: nothing where they are the same, and what moved beyond the noise either way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.calibrate.diff import COMPARED, FLOOR, RESOLUTION_US, TIMES, OpDiff, Pair, compare_rows, diff
from sparda.calibrate.profile import Profile, load_profile
from sparda.calibrate.store import Row, Store

us = st.floats(5.0, 1e6)
spreads = st.floats(0.0, 0.5)


def row(batch: int, *samples: float, kind: str = "kernel", op: str = "norm") -> Row:
    return Row(kind, op, "s1", "made up", {"batch": batch}, samples)


def around(batch: int, center: float, spread: float = 0.01, op: str = "norm") -> Row:
    """A row of that median and spread."""
    return row(batch, center * (1 - spread), center, center * (1 + spread), op=op)


def scaled(r: Row, factor: float) -> Row:
    return replace(r, samples_us=tuple(s * factor for s in r.samples_us))


def rows_of(points: Sequence[tuple[float, float]]) -> list[Row]:
    return [around(batch, center, spread) for batch, (center, spread) in enumerate(points, 1)]


def moves(ops: Sequence[OpDiff]) -> list[int]:
    return [p.moved for o in ops for p in o.pairs]


measured = st.lists(st.tuples(us, spreads), min_size=1, max_size=8).map(rows_of)


@given(measured)
def test_against_itself_nothing_moves(rows: list[Row]) -> None:
    ops = compare_rows(rows, rows)
    assert set(moves(ops)) == {0}
    assert all(o.worst is None and o.median_ratio == 1.0 and not o.only_a and not o.only_b for o in ops)


@given(us, st.booleans())
def test_ten_percent_stand_out_of_one_percent_of_noise(center: float, slower: bool) -> None:
    a = [around(1, center), around(2, center)]
    b = [a[0], scaled(a[1], 1.1 if slower else 1 / 1.1)]
    (op,) = compare_rows(a, b)
    assert moves([op]) == [0, 1 if slower else -1]
    assert (op.up, op.down) == ((1, 0) if slower else (0, 1))
    assert op.worst is not None
    assert op.worst.case == {"batch": 2}


@given(us, st.floats(0.04, 0.5), st.floats(0.9, 1.1))
def test_what_the_noise_explains_has_not_moved(center: float, spread: float, factor: float) -> None:
    a = [around(1, center, spread)]
    assert moves(compare_rows(a, [scaled(a[0], factor)])) == [0]


@given(st.lists(st.tuples(us, us, spreads, spreads), min_size=1, max_size=8))
def test_what_is_longer_one_way_is_shorter_the_other(points: list[tuple[float, float, float, float]]) -> None:
    a, b = rows_of([(p[0], p[2]) for p in points]), rows_of([(p[1], p[3]) for p in points])
    (there,), (back,) = compare_rows(a, b), compare_rows(b, a)
    assert moves([there]) == [-m for m in moves([back])]
    assert (there.up, there.down) == (back.down, back.up)
    assert [p.ratio * q.ratio for p, q in zip(there.pairs, back.pairs, strict=True)] == pytest.approx([1.0] * len(a))
    assert (there.worst is None) == (back.worst is None)


@given(us, st.floats(0.0, 0.02), st.floats(1.0, 2.0), st.floats(1.0, 2.0))
def test_moving_farther_never_counts_as_less(center: float, spread: float, near: float, more: float) -> None:
    a = around(1, center, spread)
    first, second = (moves(compare_rows([a], [scaled(a, f)]))[0] for f in (near, near * more))
    assert 0 <= first <= second


def test_without_any_noise_a_percent_is_the_least_that_counts() -> None:
    a = row(1, 100.0, 100.0, 100.0)
    for factor, moved in ((1 + FLOOR / 2, 0), (1 + 2 * FLOOR, 1)):
        assert moves(compare_rows([a], [scaled(a, factor)])) == [moved]


def test_differences_below_what_events_resolve_are_none() -> None:
    for center, factor in ((0.2, 1.4), (0.01, 5.0)):
        assert abs(center * factor - center) < RESOLUTION_US
        assert moves(compare_rows([around(1, center)], [around(1, center * factor)])) == [0]
    assert moves(compare_rows([row(1, 0.0)], [row(1, 5.0)])) == [1], "a time of nothing has no ratio, yet it moved"


def test_the_noise_of_both_counts() -> None:
    pair = Pair("kernel", "norm", {}, 100.0, 110.0, 0.05)
    assert (pair.threshold, pair.moved) == (TIMES * 0.05, 0)
    (op,) = compare_rows([around(1, 100.0, 0.03)], [around(1, 110.0, 0.04)])
    assert op.pairs[0].spread == pytest.approx(0.05)


def test_a_single_sample_has_the_noise_of_the_other_rows_of_its_operation() -> None:
    a = [row(1, 100.0), *(around(batch, 100.0, 0.04) for batch in (2, 3, 4))]
    (op,) = compare_rows(a, [scaled(r, 1.05) for r in a])
    assert [p.spread for p in op.pairs] == pytest.approx([op.pairs[1].spread] * 4)
    assert moves([op]) == [0] * 4


def test_cases_and_operations_of_one_alone_are_counted_and_not_compared() -> None:
    a = [around(1, 10.0), around(2, 10.0), around(1, 10.0, op="qkv")]
    b = [around(2, 20.0), around(3, 10.0), around(4, 10.0), around(1, 10.0, op="down")]
    found = {o.op: (len(o.pairs), o.only_a, o.only_b, o.median_ratio) for o in compare_rows(a, b)}
    assert found == {"norm": (1, 1, 2, 2.0), "qkv": (0, 1, 0, None), "down": (0, 0, 1, None)}


def test_operations_come_by_kind_in_the_order_in_which_they_are_measured() -> None:
    rows = [row(1, 5.0, kind=kind, op=op) for op in ("b", "a") for kind in reversed(COMPARED)]
    assert [(o.kind, o.op) for o in compare_rows(rows, rows)] == [(kind, op) for kind in COMPARED for op in ("a", "b")]


@pytest.fixture(scope="module")
def shipped() -> Profile:
    return load_profile("h200-sxm.measured")


def copied(profile: Profile, folder: Path, factor: float = 1.0, **facts: object) -> Profile:
    """The profile with every step ``factor`` times as long, measured by sessions of which ``facts`` are true."""
    store = Store(folder)
    for name, known in profile.store.provenance.items():
        store.add_session(name, {**known, **facts})
    for kind in COMPARED:
        rows = profile.store.latest(kind)
        store.append(kind, [scaled(r, factor) if kind == "step" else r for r in rows])
    return replace(profile, name="copy", folder=folder)


def test_the_shipped_profile_is_itself(shipped: Profile) -> None:
    found = diff(shipped, shipped)
    assert (found.same_gpu, found.machine, found.facts) == (True, {}, {})
    assert set(moves(found.ops)) == {0}
    assert sum(len(o.pairs) for o in found.ops) == sum(len(shipped.store.latest(kind)) for kind in COMPARED)


def test_what_differs_about_machine_and_provenance_is_listed(shipped: Profile, tmp_path: Path) -> None:
    watched = {"sm_clock_mhz": {"min": 1200.0, "median": 1755.0, "max": 1980.0}}
    other = copied(shipped, tmp_path, driver="999.1", watched=watched)
    found = diff(shipped, replace(other, machine=replace(shipped.machine, sms=100, name="other")))
    assert found.machine == {"sms": (132, 100)}
    assert found.facts == {"driver": (("580.159.04",), ("999.1",)), "sm_clock_seen_mhz": (("1980.0",), ("1755.0",))}
    assert set(moves(found.ops)) == {0}


def test_steps_that_take_a_fifth_longer_are_found_and_nothing_else_is(shipped: Profile, tmp_path: Path) -> None:
    found = diff(shipped, copied(shipped, tmp_path, 1.2))
    steps = [o for o in found.ops if o.kind == "step"]
    assert sum(o.up for o in steps) > 0.95 * sum(len(o.pairs) for o in steps)
    assert [o.median_ratio for o in steps] == pytest.approx([1.2] * len(steps))
    assert not any(o.up or o.down for o in found.ops if o.kind != "step")


def test_other_gpus_are_compared_and_said_to_be_others(shipped: Profile, tmp_path: Path) -> None:
    other = copied(shipped, tmp_path)
    found = diff(shipped, replace(other, machine=replace(shipped.machine, gpu="NVIDIA None")))
    assert (found.same_gpu, found.machine) == (False, {"gpu": ("NVIDIA H200", "NVIDIA None")})


def test_of_throttled_rows_only_those_are_compared_that_nothing_replaces(shipped: Profile, tmp_path: Path) -> None:
    other = copied(shipped, tmp_path)
    hot = [replace(scaled(r, 3.0), values={"throttled": 1.0}) for r in shipped.store.latest("step")]
    other.store.append("step", [*hot, replace(hot[0], case={**hot[0].case, "batch": 5})])
    found = diff(shipped, other)
    assert set(moves(found.ops)) == {0}
    assert (found.a.throttled_rows, found.b.throttled_rows) == (0, 1)
