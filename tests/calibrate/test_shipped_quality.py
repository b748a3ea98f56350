"""The quality profile that comes with the package: its traces are those that its figures speak of."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparda.calibrate.quality import SHIPPED, load_quality, quality_names
from sparda.engine.dynamics.choices_file import read_choices
from sparda.engine.dynamics.fit import fit
from sparda.engine.dynamics.generator import generate, max_gap
from sparda.engine.dynamics.generator_params import read_params
from sparda.engine.dynamics.stack import miss_curve

TRACES = sorted(SHIPPED.glob("*/*.choices"))
ALLOWED = 0.02
"""Misses of free picks by which a drawn trace may lie off the recorded one, at 1, 1.5, 2 and 4 times top-k."""


def test_every_profile_names_the_traces_beside_it() -> None:
    assert TRACES
    for name in quality_names():
        assert set(load_quality(name).traces) == {f.name for f in TRACES if f.parent.name == name}


@pytest.mark.parametrize("file", TRACES, ids=lambda f: f.stem)
def test_a_recorded_trace_misses_as_its_document_is_said_to(file: Path) -> None:
    quality, choices = load_quality(file.parent.name), read_choices(file)
    facts = choices.facts
    row = quality.dynamics_of(facts.top_k)
    assert row is not None
    assert (facts.model, facts.forced) == (quality.model, row.forced)
    assert any(d.sha256.startswith(file.stem[-8:]) for d in quality.documents)
    first = miss_curve(choices, skip=int(quality.conditions["skip_steps"])).missed[0]
    assert row.documents["1"].low - 1e-6 <= first <= row.documents["1"].high + 1e-6


@pytest.mark.parametrize("file", TRACES[:1], ids=lambda f: f.stem)
def test_a_trace_drawn_from_its_fit_misses_as_the_recorded_one(file: Path) -> None:
    choices = read_choices(file)
    facts, skip = choices.facts, 512
    size = {"layers": len(facts.layers), "kv_heads": facts.kv_heads}
    drawn = generate(fit(choices), steps=choices.steps, seed=7, **size)
    gap = max_gap(choices, drawn, skip=skip, skip_generated=skip)
    assert gap <= ALLOWED
    claimed = load_quality(file.parent.name).conditions["generator_max_gap"]
    assert gap == pytest.approx(float(claimed), abs=0.005)


def test_the_shipped_parameters_are_read() -> None:
    for name in quality_names():
        assert read_params(SHIPPED / name / "generator.json").layers
