"""The loader: what goes out comes back, and bad input is told in a sentence."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.engine.config import POLICIES, TRANSFERS, Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, read_json, read_toml, to_plain, write_json, write_text


@dataclass(frozen=True, slots=True)
class Point:
    """A leaf."""

    x: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Everything:
    """One field of every kind that the loader reads."""

    count: int
    ratio: float
    flag: bool
    name: str
    mode: Literal["fast", "slow", 3]
    point: Point
    maybe: int | None = None
    maybe_point: Point | None = None
    shape: tuple[int, ...] = ()
    pair: tuple[str, float] = ("", 0.0)
    points: tuple[Point, ...] = ()
    listed: list[Point] = field(default_factory=list)
    named: dict[str, Point] = field(default_factory=dict)
    either: int | str = 0


finite = st.floats(allow_nan=False, allow_infinity=False)
points = st.builds(Point, x=finite, label=st.text())
everything = st.builds(
    Everything,
    count=st.integers(),
    ratio=finite,
    flag=st.booleans(),
    name=st.text(),
    mode=st.sampled_from(["fast", "slow", 3]),
    point=points,
    maybe=st.none() | st.integers(),
    maybe_point=st.none() | points,
    shape=st.lists(st.integers(), max_size=3).map(tuple),
    pair=st.tuples(st.text(), finite),
    points=st.lists(points, max_size=3).map(tuple),
    listed=st.lists(points, max_size=3),
    named=st.dictionaries(st.text(), points, max_size=3),
    either=st.integers() | st.text(),
)
configs = st.builds(
    Config,
    policy=st.sampled_from(POLICIES),
    top_k=st.integers(1, 4096),
    lookahead=st.integers(0, 4),
    prefetch_ctas=st.integers(1, 1024),
    prefetch_warps=st.sampled_from([1, 2, 4, 8]),
    prefetch_stages=st.integers(1, 12),
    resident_blocks=st.just(0) | st.integers(4096, 8192),
    score_layer=st.integers(0, 60),
    refresh_steps=st.integers(0, 99),
    reserve=st.floats(0, 1),
    transfer=st.sampled_from(TRANSFERS),
)

GOOD: dict[str, object] = {
    "count": 1,
    "ratio": 0.5,
    "flag": True,
    "name": "n",
    "mode": "fast",
    "point": {"x": 1.0},
}


@settings(deadline=None)
@given(everything)
def test_what_is_made_plain_reads_back_equal(thing: Everything) -> None:
    assert read(Everything, to_plain(thing), where="there") == thing


@settings(deadline=None)
@given(everything)
def test_json_in_between_changes_nothing(thing: Everything) -> None:
    assert read(Everything, json.loads(json.dumps(to_plain(thing))), where="there") == thing


@settings(deadline=None)
@given(configs)
def test_configurations_read_back_equal(config: Config) -> None:
    assert read(Config, to_plain(config), where="config") == config
    assert to_plain(config) == asdict(config)


def test_left_out_keys_take_their_defaults() -> None:
    assert read(Everything, GOOD, where="there") == Everything(1, 0.5, True, "n", "fast", Point(1.0))
    assert read(Workload, {}, where="workload") == Workload()


def test_an_integer_becomes_a_float_where_one_is_wanted() -> None:
    ratio = read(Everything, GOOD | {"ratio": 2}, where="there").ratio
    assert ratio == 2.0
    assert type(ratio) is float


def test_an_unknown_key_is_named_with_its_closest_match_and_what_is_allowed() -> None:
    with pytest.raises(
        SpardaError, match=r"run\.toml \[config\]: unknown key 'topk'; did you mean 'top_k'\?"
    ) as caught:
        read(Config, {"topk": 96}, where="run.toml [config]")
    assert "Allowed keys: policy, top_k, lookahead" in str(caught.value)


def test_a_key_unlike_any_other_gets_no_guess() -> None:
    with pytest.raises(SpardaError, match="unknown key 'zzz'; Allowed keys"):
        read(Config, {"zzz": 1}, where="there")


def test_a_missing_key_is_named_with_what_is_wanted() -> None:
    with pytest.raises(SpardaError, match=r"there: key 'point\.x' is missing; a finite number is wanted\."):
        read(Everything, GOOD | {"point": {}}, where="there")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("count", True, "key 'count' is true; an integer is wanted"),
        ("count", 1.0, "key 'count' is 1.0; an integer is wanted"),
        ("count", "1", "key 'count' is '1'; an integer is wanted"),
        ("count", None, "key 'count' is null; an integer is wanted"),
        ("ratio", False, "key 'ratio' is false; a finite number is wanted"),
        ("ratio", float("nan"), "key 'ratio' is nan; a finite number is wanted"),
        ("ratio", 10**400, "a finite number is wanted"),
        ("flag", 1, "key 'flag' is 1; true or false is wanted"),
        ("name", 1, "key 'name' is 1; a string is wanted"),
        ("mode", "medium", "key 'mode' is 'medium'; one of 'fast', 'slow', 3 is wanted"),
        ("mode", 3.0, "key 'mode' is 3.0; one of"),
        ("point", [1], r"key 'point' is \[1\]; a table is wanted"),
        ("point", {"x": "far"}, r"key 'point\.x' is 'far'; a finite number is wanted"),
        ("point", {"y": 1}, r"unknown key 'point\.y'"),
        ("maybe", "1", "key 'maybe' is '1'; an integer or null is wanted"),
        ("maybe_point", {"x": True}, r"key 'maybe_point\.x' is true"),
        ("shape", [1, 2.5], r"key 'shape\[1\]' is 2\.5; an integer is wanted"),
        ("shape", 3, "key 'shape' is 3; a list, each an integer, is wanted"),
        ("shape", "12", "key 'shape' is '12'; a list"),
        ("pair", ["a"], r"key 'pair' is \['a'\]; a list of 2 \(a string, a finite number\) is wanted"),
        ("points", [{"x": 1}, {}], r"key 'points\[1\]\.x' is missing"),
        ("listed", {"x": 1}, "key 'listed' is a table; a list"),
        ("named", {"a": 1}, r"key 'named\.a' is 1; a table is wanted"),
        ("either", 1.5, "key 'either' is 1.5; an integer or a string is wanted"),
    ],
)
def test_a_value_of_another_type_is_refused(key: str, value: object, says: str) -> None:
    with pytest.raises(SpardaError, match=f"^there: .*{says}"):
        read(Everything, GOOD | {key: value}, where="there")


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*GOOD, "maybe", "shape", "points", "named", "other"]).filter(lambda key: key != "count"),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=5,
        ),
    )
)
def test_any_table_that_lacks_a_key_is_refused_on_one_line(data: dict[str, Any]) -> None:
    said = ""
    try:
        read(Everything, data, where="there")
    except SpardaError as error:
        said = str(error)
    assert said.startswith("there: ")
    assert "\n" not in said


def test_what_the_dataclass_refuses_says_where_it_stood() -> None:
    with pytest.raises(SpardaError, match=r"^run\.toml \[config\]: config\.top_k is 0; allowed are 1 to 4096"):
        read(Config, {"top_k": 0}, where="run.toml [config]")


def test_something_else_than_a_table_is_refused() -> None:
    with pytest.raises(SpardaError, match="there: the whole is 3; a table is wanted"):
        read(Config, 3, where="there")  # type: ignore[arg-type]


def test_json_and_toml_files_read_back(tmp_path: Path) -> None:
    write_json(tmp_path / "w.json", Workload(batch=3))
    assert read(Workload, read_json(tmp_path / "w.json"), where="w.json") == Workload(batch=3)
    write_text(tmp_path / "w.toml", "[workload]\nbatch = 3\n")
    assert read_toml(tmp_path / "w.toml") == {"workload": {"batch": 3}}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.toml", b"x = ", r"a\.toml: not valid TOML"),
        ("a.toml", b"x = 1\nx = 2\n", r"a\.toml: not valid TOML"),
        ("a.json", b'{"x": 1', r"a\.json: not valid JSON"),
        ("a.json", b'{"x": 1, "x": 2}', r"key 'x' is given twice"),
        ("a.json", b"[1]", r"a\.json: holds \[1\]; a table"),
        ("a.json", b"\xff\xfe", r"a\.json: not valid JSON"),
        ("a.json", b"[" * 100_000, r"a\.json: not valid JSON"),
    ],
)
def test_a_corrupt_file_is_named_with_what_to_do(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpardaError, match=says):
        (read_toml if name.endswith("toml") else read_json)(tmp_path / name)


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(SpardaError, match=r"none\.json: there is no such file; check the path"):
        read_json(tmp_path / "none.json")
    with pytest.raises(SpardaError, match="cannot be read"):
        read_toml(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(SpardaError, match="no place in JSON"):
        write_json(tmp_path / "a.json", {"x": float("inf")})
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a.json", "half\ud800")
    assert read_json(tmp_path / "a.json") == {"x": 1}
    assert [f.name for f in tmp_path.iterdir()] == ["a.json"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpardaError, match=r"cannot be written .*existing folder"):
        write_text(tmp_path / "no" / "a.txt", "x")
