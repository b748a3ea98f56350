"""The profile that a scenario asks for: another link, changed values of the machine, another model's shape."""

from __future__ import annotations

from sparda.calibrate import profile as profiles
from sparda.calibrate.changes import changed
from sparda.calibrate.profile import Profile
from sparda.calibrate.reshape import on_shape
from sparda.calibrate.transfer import on_link
from sparda.explore.scenario import Scenario


def profile_for(scenario: Scenario) -> Profile:
    """The profile as the scenario has it: measured where nothing is changed, else carried over by rule and called so.

    Raises SpardaError for an unknown profile, link or model, and for changes that cannot be.
    """
    profile = profiles.load_profile(scenario.profile)
    if scenario.link:
        profile = on_link(profile, scenario.link)
    # The machine before the model: rules about machines are written in terms of the measured model's kernels.
    planned = scenario.planned_model
    return on_shape(changed(profile, scenario.machine), planned.shape, planned.notes)
