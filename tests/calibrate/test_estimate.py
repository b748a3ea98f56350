"""What a session would do, said beforehand: cases that are left, what fits, and what a budget covers. No GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.calibrate.measure.estimate import SETUP_S, Estimate, estimate
from sparda.calibrate.measure.parts import Case, Part
from sparda.calibrate.store import Row, Store
from sparda.engine.config import Config, Workload
from sparda.engine.memory import memory_of
from sparda.engine.shapes import MODELS, ModelShape, SparseSpec

SHAPE = MODELS["minicpm4.1-8b"]
LARGE = Case("step", "sparda", {"batch": 64}, Workload(64, 131072), Config(resident_blocks=768))
LONG = Case("step", "sparda", {"batch": 1}, Workload(1, 1 << 22), Config())


def nothing(bench: object) -> None: ...


def part(name: str, count: int, seconds: float, *more: Case) -> Part:
    def cases(shape: ModelShape) -> list[Case]:
        return [Case("kernel", name, {"batch": batch}) for batch in range(count)] + list(more)

    return Part(name, nothing, seconds, cases)


def kept(case: Case, hot: bool = False) -> Row:
    return Row(case.kind, case.op, "s1", "made up", case.conditions, (1.0,), {"throttled": 1.0} if hot else {})


def of(folder: Path, *parts: Part, gpu_bytes: int | None = None, budget_s: float = 1e6) -> Estimate:
    return estimate(parts, Store(folder), SHAPE, gpu_bytes, budget_s)


def test_what_is_measured_already_takes_no_time(tmp_path: Path) -> None:
    made = part("norm", 10, 3.0)
    cases = list(made.cases(SHAPE))
    assert of(tmp_path, made).seconds == SETUP_S + 30.0
    Store(tmp_path).append("kernel", [kept(c) for c in cases[:6]])
    expected = of(tmp_path, made)
    assert (expected.parts[0].measured, expected.left, expected.seconds) == (6, 4, SETUP_S + 12.0)
    Store(tmp_path).append("kernel", [kept(c) for c in cases[6:]])
    assert (of(tmp_path, made).left, of(tmp_path, made).seconds) == (0, 0.0)


def test_a_case_that_only_a_hot_gpu_measured_is_left(tmp_path: Path) -> None:
    made = part("norm", 2, 1.0)
    Store(tmp_path).append("kernel", [kept(c, hot=True) for c in made.cases(SHAPE)])
    assert of(tmp_path, made).left == 2


def test_what_does_not_fit_is_named_and_takes_no_time(tmp_path: Path) -> None:
    assert LARGE.workload
    assert LARGE.config
    needed = memory_of(SHAPE, SparseSpec(), LARGE.workload, LARGE.config).gpu_bytes
    made = part("norm", 1, 1.0, LARGE)
    for there, left in ((needed, 2), (needed - 1, 1), (None, 2)):
        expected = of(tmp_path, made, gpu_bytes=there)
        assert expected.left == left
    small = of(tmp_path, made, gpu_bytes=80 << 30)
    assert small.parts[0].too_big == (
        f"sparda, batch 64, 131072 tokens, 768 resident blocks: needs {needed / 2**30:.0f} GiB of GPU memory, "
        "80 GiB are there",
    )
    assert "not here: sparda, batch 64" in small.lines[0]
    assert any("what does not fit is unknown" in line for line in of(tmp_path, made).lines)


def test_what_the_model_cannot_do_is_named_whatever_the_memory(tmp_path: Path) -> None:
    assert f"{SHAPE.name} reaches {SHAPE.max_context}" in of(tmp_path, part("norm", 0, 1.0, LONG)).parts[0].too_big[0]


@pytest.mark.parametrize(
    ("budget_s", "within"),
    [
        (SETUP_S + 30.0, ["whole", "whole", "whole"]),
        (SETUP_S + 29.0, ["whole", "whole", "cut short"]),
        (SETUP_S + 15.0, ["whole", "cut short", "not begun"]),
        (SETUP_S + 10.0, ["whole", "not begun", "not begun"]),
        (SETUP_S, ["not begun", "not begun", "not begun"]),
    ],
)
def test_a_budget_says_which_parts_it_cuts(tmp_path: Path, budget_s: float, within: list[str]) -> None:
    parts = [part(name, 10, 1.0) for name in ("norm", "qkv", "down")]
    expected = of(tmp_path, *parts, budget_s=budget_s)
    assert [p.within_budget for p in expected.parts] == within
    assert expected.cut == tuple(p.name for p, w in zip(parts, within, strict=True) if w != "whole")
    assert ("the budget does not cover all" in expected.lines[-1]) == bool(expected.cut)


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0.01, 10.0)), max_size=5), st.floats(0.1, 500.0))
def test_whole_parts_fit_the_budget_and_the_first_that_is_cut_does_not(
    sizes: list[tuple[int, float]], budget_s: float
) -> None:
    parts = [part(str(i), count, seconds) for i, (count, seconds) in enumerate(sizes)]
    expected = of(Path("nowhere"), *parts, budget_s=budget_s)
    assert bool(expected.cut) == (expected.left > 0 and expected.seconds > budget_s)
    if expected.cut:
        first = [p.name for p in expected.parts].index(expected.cut[0])
        spent = expected.setup_s + sum(p.seconds for p in expected.parts[:first])
        assert spent + expected.parts[first].seconds > budget_s
