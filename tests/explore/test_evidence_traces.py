"""Steps that followed a trace are held to the misses that it foretold and to the time that the simulator predicts."""

from __future__ import annotations

import pytest

from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload
from sparda.explore.evidence_traces import traced
from sparda.explore.figures import Rows
from sparda.explore.predict import predict

FORETOLD = 355.2


def followed(profile: Profile, counted: float, slower: float) -> Row:
    """A step that missed ``counted`` blocks a layer and was so many times slower than predicted."""
    known, config = Rows(profile), Config(resident_blocks=96)
    workload = Workload(16, 131072, FORETOLD / (16 * known.shape.kv_heads * config.top_k))
    us = predict(profile, known.shape, known.spec, workload, config).step_us * slower
    case = {"batch": 16, "context_tokens": 131072, **config.settings, "trace": "a", "followed": "replayed"}
    return Row(
        "trace", "sparda", "s1", "graph", case, (us,), {"misses_per_layer": counted, "foretold_per_layer": FORETOLD}
    )


def test_the_largest_gap_and_error_are_told(profile: Profile) -> None:
    profile.store.append("trace", [followed(profile, FORETOLD * 1.05, 1.25)])
    found = traced(Rows(profile))
    assert found["trace.misses.max_gap"].value == pytest.approx(0.05)
    assert found["trace.misses.max_gap"].met is False
    assert found["trace.step_error.max"].value == pytest.approx(0.2, abs=1e-3)
    assert "batch 16, 96 resident blocks" in found["trace.step_error.max"].conditions


def test_a_step_as_foretold_has_no_gap(profile: Profile) -> None:
    profile.store.append("trace", [followed(profile, FORETOLD, 1.0)])
    found = traced(Rows(profile))
    assert [f.value for f in found.values()] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert all(f.met for f in found.values())


def test_without_such_rows_nothing_is_claimed(profile: Profile) -> None:
    assert [(f.value, f.rows) for f in traced(Rows(profile)).values()] == [(None, 0)] * 2
