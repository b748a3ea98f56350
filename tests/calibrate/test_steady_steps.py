"""Every measured step is predicted the same with and without the shortcut through equal layers."""

from __future__ import annotations

from sparda.calibrate.cases import config_of, workload_of
from sparda.calibrate.holdout import held_out_rows
from sparda.calibrate.profile import load_profile
from sparda.engine.policies import make_plan
from sparda.engine.shapes import SparseSpec, model_named
from sparda.sim.player import play, play_whole

EVERY = 2
"""Of the measured configurations so many are one that is tried."""


def test_measured_steps_have_the_bytes_of_the_whole_simulation() -> None:
    profile = load_profile("h200-sxm.measured")
    rows, _ = held_out_rows(profile.store)
    cases = list(dict.fromkeys((workload_of(row), config_of(row)) for row in rows))[::EVERY]
    assert len(cases) > 150
    for workload, config in cases:
        plan = make_plan(model_named("minicpm4.1-8b"), SparseSpec(), workload, config)
        assert play(plan, profile.costs).to_json() == play_whole(plan, profile.costs).to_json(), (workload, config)
