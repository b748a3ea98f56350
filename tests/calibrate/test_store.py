"""Rows on disk: whole or dropped, one GPU to a folder, and of a case the newest counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.calibrate.store import KINDS, Row, Store, read_rows
from sparda.engine.errors import SpardaError

words = st.text(max_size=12)
micros = st.integers(0, 10**12).map(lambda n: n / 1000)
rows = st.builds(
    Row,
    kind=st.sampled_from(KINDS),
    op=words,
    session=words,
    method=words,
    case=st.dictionaries(words, words | st.integers() | st.booleans() | st.floats(allow_nan=False), max_size=4),
    samples_us=st.lists(micros, min_size=1, max_size=5).map(tuple),
    values=st.dictionaries(words, st.integers(-(10**12), 10**12).map(lambda n: n / 10**6), max_size=3),
    complete=st.booleans(),
)


def row(batch: int = 1, us: float = 5.0, *, kind: str = "kernel", session: str = "s1", complete: bool = True) -> Row:
    return Row(kind, "qkv", session, "by hand", {"batch": batch}, (us,), {"hbm_bytes": 7.0}, complete)


def sampled(*samples: float) -> Row:
    return replace(row(), samples_us=samples)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def file(store: Store) -> Path:
    store.append("kernel", [row(1), row(2)])
    return store.folder / "rows" / "kernel.jsonl"


@settings(deadline=None, max_examples=50)
@given(st.lists(rows, max_size=4))
def test_rows_come_back_from_disk_as_they_were(tmp_path_factory: pytest.TempPathFactory, written: list[Row]) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    store.append("some", written)
    assert list(read_rows(store.folder / "rows" / "some.jsonl")) == written
    assert store.rows() == [r for r in written if r.complete]


def test_times_are_kept_to_a_nanosecond_and_values_to_six_digits_after_the_point() -> None:
    record = json.loads(replace(sampled(1.23456789), values={"gb_s": 1 / 3}).to_json())
    assert record["samples_us"] == [1.235]
    assert record["values"] == {"gb_s": 0.333333}


@pytest.mark.parametrize("length", [1, 10, 60])
def test_a_last_line_cut_short_is_dropped(file: Path, length: int) -> None:
    with file.open("a") as f:
        f.write(row(3).to_json()[:length])
    assert list(read_rows(file)) == [row(1), row(2)]


@pytest.mark.parametrize("whole_lines", [0, 1, 2])
def test_after_a_line_cut_short_rows_are_appended_on_a_line_of_their_own(
    store: Store, file: Path, whole_lines: int
) -> None:
    kept = [row(1), row(2)][:whole_lines]
    file.write_text("".join(r.to_json() + "\n" for r in kept) + row(3).to_json()[:25])
    store.append("kernel", [row(4)])
    store.append("kernel", [row(5)])
    assert store.rows() == [*kept, row(4), row(5)]


def test_a_whole_last_line_that_lacks_only_its_end_is_kept(store: Store, file: Path) -> None:
    file.write_text(file.read_text().rstrip("\n"))
    assert store.rows() == [row(1), row(2)]
    store.append("kernel", [row(3)])
    assert store.rows() == [row(1), row(2), row(3)]


def test_a_damaged_line_within_the_file_is_named(file: Path) -> None:
    first, second = file.read_text().splitlines()
    file.write_text(f"{first}\n{second[:30]}\n{first}\n")
    with pytest.raises(SpardaError, match=r"kernel\.jsonl:2: not JSON"):
        list(read_rows(file))


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[1, 2]",
        "null",
        row().to_json().replace("[5.0]", '["fast"]'),
        row().to_json().replace("[5.0]", "5.0"),
        row().to_json().replace('{"batch": 1}', "[3]"),
        row().to_json().replace('"op"', '"operation"'),
    ],
)
def test_json_that_is_no_row_is_named_wherever_it_stands(file: Path, line: str) -> None:
    with file.open("a") as f:
        f.write(line + "\n")
    with pytest.raises(SpardaError, match=r"kernel\.jsonl:3: not a measurement row"):
        list(read_rows(file))


def test_a_file_that_is_not_there_is_said_to_be_unreadable(tmp_path: Path) -> None:
    with pytest.raises(SpardaError, match=r"cannot read measurement rows from .*none\.jsonl"):
        list(read_rows(tmp_path / "none.jsonl"))


def test_an_empty_folder_has_no_rows_and_no_provenance(store: Store) -> None:
    assert (store.rows(), store.latest("step"), store.provenance) == ([], [], {})


def test_rows_of_one_kind_are_found_in_whatever_file_they_stand(store: Store) -> None:
    store.append("a", [row(1, kind="step"), row(2, kind="link")])
    store.append("b", [row(3, kind="step"), row(4, kind="step", complete=False)])
    assert store.rows("step") == [row(1, kind="step"), row(3, kind="step")]
    assert len(store.rows()) == 3


def test_the_latest_row_of_a_case_is_the_one_written_last_and_complete(store: Store) -> None:
    store.append("kernel", [row(1, 5.0), row(2, 6.0)])
    store.append("kernel", [row(1, 7.0, session="s2"), row(2, 8.0, session="s2", complete=False)])
    assert store.latest("kernel") == [row(1, 7.0, session="s2"), row(2, 6.0)]


def test_a_case_is_the_same_in_any_order_of_its_conditions_and_in_any_session() -> None:
    one = replace(row(), case={"batch": 1, "top_k": 96})
    other = replace(row(us=9.0, session="s2"), case={"top_k": 96, "batch": 1})
    assert one.key == other.key
    assert len({one.key, replace(one, op="down").key, replace(one, kind="step").key, row().key}) == 4


def test_the_time_of_a_row_is_its_median_sample() -> None:
    assert sampled(9.0, 1.0, 5.0).us == 5.0
    assert sampled(9.0, 1.0, 5.0, 6.0).us == 5.5


def test_the_spread_is_half_the_way_from_the_10th_to_the_90th_percentile_over_the_median() -> None:
    assert sampled(5.0).spread == 0.0
    assert sampled(8.0, 10.0, 13.0).spread == (13 - 8) / 2 / 10
    assert sampled(1.0, *range(91, 109), 500.0).spread == pytest.approx((107 - 92) / 2 / 99.5)
    assert sampled(0.0, 0.0, 3.0).spread == 0.0


def test_sessions_of_one_gpu_share_a_folder_and_may_be_told_more_later(store: Store) -> None:
    store.add_session("s1", {"gpu": "A", "driver": "1"})
    store.add_session("s2", {"gpu": "A", "driver": "2"})
    store.add_session("s1", {"gpu": "A", "driver": "1", "ended": "complete"})
    assert store.provenance == {
        "s1": {"gpu": "A", "driver": "1", "ended": "complete"},
        "s2": {"gpu": "A", "driver": "2"},
    }
    assert [p.name for p in store.folder.iterdir()] == ["provenance.json"]


def test_another_gpu_is_refused_and_leaves_no_trace(store: Store) -> None:
    store.add_session("s1", {"gpu": "A"})
    with pytest.raises(SpardaError, match=r"holds measurements of A; this GPU is B\."):
        store.add_session("s2", {"gpu": "B"})
    assert list(store.provenance) == ["s1"]


def test_damaged_provenance_is_named(store: Store) -> None:
    store.add_session("s1", {"gpu": "A"})
    (store.folder / "provenance.json").write_text("{")
    with pytest.raises(SpardaError, match=r"provenance\.json is damaged"):
        _ = store.provenance
