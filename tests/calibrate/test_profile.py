"""Profiles: found by name or folder, refused where damaged, and aware of how far they reach."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparda.calibrate.costs import Fitted, FittedCosts
from sparda.calibrate.interval import Intervals
from sparda.calibrate.judged import ErrorBand, Judged, Term
from sparda.calibrate.leave_one_out import CopyErrors, CorunErrors, Duel, Errors, KernelErrors, LeftOut
from sparda.calibrate.profile import BASE, SCHEMA, Profile, load_profile, measured_names, profile_json
from sparda.calibrate.residuals import Residuals
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.plan import Plan
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, SparseSpec
from sparda.sim.costs import Machine
from tests.calibrate.conftest import MODEL

MACHINE = Machine("none", "NVIDIA None", 132, 4000.0, 50.0, 52.0, 1 << 37, 1 << 38)
ENVELOPE: dict[str, tuple[float, float]] = {
    "batch": (4.0, 64.0),
    "context_tokens": (32768.0, 131072.0),
    "miss_rate": (0.03, 0.12),
    "top_k": (64.0, 128.0),
    "lookahead": (1.0, 2.0),
    "prefetch_ctas": (2.0, 32.0),
    "prefetch_warps": (1.0, 4.0),
    "prefetch_stages": (4.0, 11.0),
}

NONE = LeftOut(0, None, None, None)
ERRORS = Errors(
    {"down": KernelErrors(LeftOut(6, 0.01, 0.03, 0.002), NONE, Duel(0.01, 0.05, "table"))},
    {"down": CorunErrors(LeftOut(4, 0.02, 0.2, 0.01), NONE, LeftOut(4, 0.01, 0.1, None), NONE)},
    (CopyErrors(8, NONE, Duel(None, None, "none")),),
)


LEFT = Residuals({"down": (0.01, -0.02)}, (0.03,), {"few": (0.1,)}, {"few": (), "many": (-0.2,)})
JUDGED = Judged(
    by_host=ErrorBand(4, 0.1, 0.2, 0.2, 0.3, -0.1, 0.02),
    residuals=LEFT,
    coverage=0.875,
    terms=(Term("join", "attention loses time", 0.01, 0.04, 0.02, 0.04, "term"),),
)


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    made = Profile(
        name="none.measured",
        tier="measured",
        machine=MACHINE,
        model=MODEL.name,
        band=ErrorBand(12, 0.02, 0.05, 0.06, 0.08, -0.01, 0.005),
        errors=ERRORS,
        envelope=ENVELOPE,
        sessions=("s1", "s2"),
        costs=FittedCosts(MACHINE, Fitted({}, (), {}, (), 1.0, (), (), 3.0)),
        folder=tmp_path,
    )
    (tmp_path / "profile.json").write_text(profile_json(made))
    return made


def change(profile: Profile, **parts: Any) -> None:
    """Write other values for some keys; None takes a key out."""
    path = profile.folder / "profile.json"
    data = {**json.loads(path.read_text()), **parts}
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


def plan_of(workload: Workload | None = None, config: Config | None = None, model: str = MODEL.name) -> Plan:
    return make_plan(MODELS[model], SparseSpec(), workload or Workload(), config or Config())


def test_a_folder_with_a_profile_is_read_as_it_was_written(profile: Profile) -> None:
    assert load_profile(str(profile.folder)) == profile
    assert json.loads((profile.folder / "profile.json").read_text())["schema"] == SCHEMA == 2


def test_what_steps_say_about_the_predictions_is_read_as_it_was_written(profile: Profile) -> None:
    known = replace(profile, judged=JUDGED)
    (profile.folder / "profile.json").write_text(profile_json(known))
    found = load_profile(str(profile.folder))
    assert found.judged == JUDGED
    assert found == known


def test_there_are_intervals_where_layers_were_measured_beside_copies_and_none_elsewhere(profile: Profile) -> None:
    assert profile.intervals is None
    assert replace(profile, judged=replace(JUDGED, residuals=replace(LEFT, layers=()))).intervals is None
    assert replace(profile, judged=JUDGED).intervals == Intervals(profile.costs, LEFT)


@pytest.mark.parametrize(
    ("config", "by_host"),
    [
        (Config(), False),
        (Config("dense"), False),
        (Config(transfer="gather"), True),
        (Config(transfer="batch"), True),
        (Config("infinigen"), True),
        (Config("sparse-resident", transfer="gather"), False),
    ],
)
def test_a_step_that_the_host_works_in_has_the_band_of_such_steps(
    profile: Profile, config: Config, by_host: bool
) -> None:
    known = replace(profile, judged=JUDGED)
    assert known.band_of(config) == (JUDGED.by_host if by_host else profile.band)


@pytest.mark.parametrize(
    ("part", "value", "complaint"),
    [
        ("winner", "nobody", "winner"),
        ("coverage", "all", "coverage"),
        ("terms", [{"name": "join"}], "terms"),
        ("residuals", {"kernels": {}}, "residuals"),
        ("by_host", {"count": 1}, "by_host"),
        ("covered", 0.9, "unknown key 'covered'"),
    ],
)
def test_a_judgement_that_is_not_as_it_should_be_is_refused_by_key(
    profile: Profile, part: str, value: object, complaint: str
) -> None:
    judged = json.loads(profile_json(replace(profile, judged=JUDGED)))["judged"]
    if part == "winner":
        judged["terms"][0]["winner"] = value
    else:
        judged[part] = value
    change(profile, judged=judged)
    with pytest.raises(SpardaError, match=rf"profile\.json: judged.*{complaint}"):
        load_profile(str(profile.folder))


def test_a_profile_of_datasheet_tier_is_outside_whatever_is_asked(profile: Profile) -> None:
    (reason,) = replace(profile, tier="datasheet").outside(plan_of())
    assert reason == f"costs carried over from {BASE} by datasheet"


@pytest.mark.parametrize("name", measured_names())
def test_a_shipped_profile_is_found_by_its_name(name: str) -> None:
    shipped = load_profile(name)
    assert shipped.name == shipped.machine.name == name
    assert shipped.model in MODELS
    assert shipped.tier == "measured"


@pytest.mark.parametrize("name", ["rtx-none.measured", "", "no/such/folder"])
def test_an_unknown_name_is_refused_with_those_known_and_never_another_gpus_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpardaError, match=rf"no profile '{name}'.*known: .*another GPU's numbers are never used"):
        load_profile(name)


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1', "[1]"])
def test_a_file_that_is_no_json_object_is_named(profile: Profile, text: str) -> None:
    (profile.folder / "profile.json").write_text(text)
    with pytest.raises(SpardaError, match=r"profile\.json"):
        load_profile(str(profile.folder))


@pytest.mark.parametrize("schema", [0, SCHEMA - 1, SCHEMA + 1, str(SCHEMA), None])
def test_another_schema_is_refused_with_both_versions(profile: Profile, schema: object) -> None:
    change(profile, schema=schema)
    with pytest.raises(
        SpardaError, match=rf"profile\.json: schema {schema!r}, this version reads {SCHEMA}; calibrate again"
    ):
        load_profile(str(profile.folder))


@pytest.mark.parametrize(
    "parts",
    [
        {"machine": None},
        {"machine": {"name": "none"}},
        {"band": {}},
        {"errors": None},
        {"errors": {"kernels": {}, "corun": {}}},
        {"errors": {"kernels": {"down": {}}, "corun": {}, "copies": []}},
        {"envelope": None},
        {"envelope": [1, 2]},
        {"envelope": {"batch": [1]}},
        {"envelope": {"batch": ["few", "many"]}},
        {"sessions": 3},
        {"costs": None},
        {"costs": {"kernels": {}}},
        {"costs": []},
        {"judged": None},
        {"judged": {}},
        {"judged": []},
    ],
)
def test_a_damaged_part_is_an_error_that_names_the_file_or_the_part(profile: Profile, parts: dict[str, Any]) -> None:
    change(profile, **parts)
    with pytest.raises(SpardaError, match=r"profile\.json|costs"):
        load_profile(str(profile.folder))


@pytest.mark.parametrize("batch", [4, 64])
def test_the_edges_of_the_envelope_lie_inside(profile: Profile, batch: int) -> None:
    assert profile.outside(plan_of(Workload(batch, 131072, 0.12), Config(prefetch_stages=4))) == []


@pytest.mark.parametrize(
    ("workload", "config", "reason"),
    [
        (Workload(batch=1), Config(), "batch 1, measured 4 to 64"),
        (Workload(context_tokens=16384), Config(), "context_tokens 16384, measured 32768 to 131072"),
        (Workload(miss_rate=0.0), Config(), "miss_rate 0, measured 0.03 to 0.12"),
        (Workload(miss_rate=0.5), Config(), "miss_rate 0.5, measured 0.03 to 0.12"),
        (Workload(), Config(top_k=256), "top_k 256, measured 64 to 128"),
        (Workload(), Config(lookahead=0), "lookahead 0, measured 1 to 2"),
        (Workload(), Config(prefetch_ctas=64), "prefetch_ctas 64, measured 2 to 32"),
        (Workload(), Config(prefetch_warps=8), "prefetch_warps 8, measured 1 to 4"),
        (Workload(), Config(prefetch_stages=12), "prefetch_stages 12, measured 4 to 11"),
    ],
)
def test_an_axis_that_leaves_the_envelope_is_named(
    profile: Profile, workload: Workload, config: Config, reason: str
) -> None:
    (found,) = profile.outside(plan_of(workload, config))
    assert found == reason


def test_every_axis_that_leaves_is_named_and_so_is_another_model(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "another", replace(MODEL, name="another"))
    plan = plan_of(Workload(batch=128, miss_rate=0.9), Config(lookahead=4), model="another")
    named = [reason.split()[0] for reason in profile.outside(plan)]
    assert sorted(named) == ["batch", "lookahead", "miss_rate", "model"]


def test_an_axis_that_was_not_measured_sets_no_limit(profile: Profile) -> None:
    change(profile, envelope={"batch": [4, 64]})
    assert load_profile(str(profile.folder)).outside(plan_of(Workload(16, 8192, 0.9), Config(top_k=40))) == []
