"""Why a step takes its time: parts that add up, a path, a regime by its rule, and what would make it shorter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.calibrate import profile as profile_module
from sparda.calibrate.profile import Profile
from sparda.calibrate.step_trace import MeasuredStep, median_replay, save_step
from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.plan import MAIN
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, SparseSpec
from sparda.explore import cli
from sparda.explore.explain import (
    ATTENTION_PART,
    COPY_PART,
    HEAD_PART,
    LAUNCH_PART,
    LINEAR_PART,
    PARTS,
    SLOWED_PART,
    Explanation,
    explain,
    parts_us,
)
from sparda.explore.explain_text import explanation_text, gain_sentence
from sparda.sim.player import play
from sparda.sim.replay import replay
from tests.calibrate.step_events import recorded
from tests.sim.sim_fakes import SMALL, FakeCosts

SPEC = SparseSpec()
MODEL = MODELS["minicpm4.1-8b"]
PRICED = tuple(policy for policy in POLICIES if policy != "infinigen")

Capture = pytest.CaptureFixture[str]


def explained(workload: Workload | None = None, config: Config | None = None, **costs: Any) -> Explanation:
    return explain(FakeCosts(**costs), MODEL, SPEC, workload or Workload(), config or Config())[0]


workloads = st.builds(Workload, st.integers(1, 64), st.just(65536), st.sampled_from([0.0, 0.06, 0.5]))
configs = st.builds(Config, policy=st.sampled_from(PRICED), lookahead=st.integers(0, 3), score_layer=st.integers(0, 2))
machines = st.builds(FakeCosts, slower=st.floats(1.0, 2.0), link_gb_s=st.floats(5.0, 90.0), join=st.floats(0.0, 3000.0))


@settings(max_examples=60, deadline=None)
@given(workloads, configs, machines)
def test_the_parts_add_up_to_the_step_and_none_is_negative(w: Workload, c: Config, costs: FakeCosts) -> None:
    timeline = play(make_plan(SMALL, SPEC, w, c), costs)
    for parts in (parts_us(timeline, costs), parts_us(timeline)):
        assert tuple(parts) == PARTS
        assert min(parts.values()) >= 0.0
        assert sum(parts.values()) == pytest.approx(timeline.step_us, abs=1e-6)


def test_what_an_operation_takes_alone_and_what_it_is_slowed_by_are_apart() -> None:
    calm, slowed = explained(slower=1.0), explained(slower=1.5)
    assert slowed.parts_us[LINEAR_PART] == calm.parts_us[LINEAR_PART]
    assert slowed.parts_us[SLOWED_PART] > calm.parts_us[SLOWED_PART]


def test_a_measured_steps_slow_down_stays_in_its_operations() -> None:
    plan = make_plan(SMALL, SPEC, Workload(), Config())
    parts = parts_us(replay(plan, [1000] * len(plan.ops)))
    assert parts[SLOWED_PART] == 0.0
    assert (parts[LINEAR_PART], parts[ATTENTION_PART], parts[HEAD_PART]) == (16.0, 4.0, 3.0)


def test_a_fetch_on_the_main_stream_is_a_copy_that_main_waits_for() -> None:
    demanded = explained(config=Config(policy="sparda-on-demand"))
    assert demanded.parts_us[COPY_PART] > 0.0
    assert demanded.path.copies_us == pytest.approx(demanded.parts_us[COPY_PART])


def test_the_critical_path_and_the_time_between_are_the_step() -> None:
    for config in (Config(), Config(policy="sparse"), Config(policy="dense")):
        e = explained(config=config)
        assert sum(e.path.us.values()) + e.path.gaps_us == pytest.approx(e.step_us)


def test_gains_are_sorted_and_those_of_steps_played_again() -> None:
    e = explained()
    assert [g.step_us for g in e.gains] == sorted(g.step_us for g in e.gains)
    assert {g.name for g in e.gains} == {"link x 2", "HBM x 1.5", "no slow-down", "no misses", "no launches"}
    for gain in e.gains:
        assert gain.gain == pytest.approx(1 - gain.step_us / e.step_us)
    none = next(g for g in e.gains if g.name == "no misses")
    assert none.step_us == explained(Workload(miss_rate=0.0)).step_us


def test_a_link_twice_as_fast_halves_a_step_that_is_all_copies() -> None:
    e = explained(Workload(64, 131072, 0.9), link_gb_s=5.0, copy_gb_s=5.0, share=1.0)
    assert e.regime.word == "link-bound"
    assert next(g for g in e.gains if g.name == "link x 2").gain == pytest.approx(0.5, abs=0.03)
    assert e.gains[0].name == "no misses"


def test_where_all_is_in_fast_memory_the_link_changes_nothing() -> None:
    e = explained(config=Config(policy="sparda-resident"))
    assert {g.name: g.gain for g in e.gains}["link x 2"] == 0.0
    assert e.regime.link_us == e.regime.copies_us == 0.0


@pytest.mark.parametrize(
    ("word", "workload", "config", "costs"),
    [
        ("weight-bound", Workload(1), Config(), {"floor_ns": 100.0}),
        ("KV-bound", Workload(64), Config(policy="dense"), {}),
        ("latency-bound", Workload(1), Config(), {"floor_ns": 40_000.0}),
        ("link-bound", Workload(64, 131072, 0.5), Config(), {}),
        ("link-bound", Workload(64, 131072, 0.5), Config(policy="sparse"), {}),
    ],
)
def test_the_regime_follows_the_rule(word: str, workload: Workload, config: Config, costs: dict[str, float]) -> None:
    r = explained(workload, config, **costs).regime
    assert r.word == word
    longest = max(r.weights_us, r.kv_us, r.latency_us, r.copies_us)
    by_rule = {"weight-bound": r.weights_us, "KV-bound": r.kv_us, "latency-bound": r.latency_us}
    assert (r.link_us >= r.main_us or r.copies_us == longest) if word == "link-bound" else by_rule[word] == longest


def test_the_text_has_every_part_that_takes_time_and_every_gain() -> None:
    e = explained()
    text = explanation_text(e)
    assert all((part in text) == (us > 0) for part, us in e.parts_us.items())
    assert all(gain_sentence(g) in " ".join(text.split()) for g in e.gains)
    assert max(map(len, text.splitlines())) <= 80


def one_object(capsys: Capture, *words: str) -> dict[str, Any]:
    assert cli.main(["explain", *words, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_explain_prints_one_object_whose_parts_are_the_step_that_simulate_predicts(
    shipped: Profile, capsys: Capture
) -> None:
    data = one_object(capsys, "--set", "workload.batch=4")
    e = data["explanation"]
    assert data["prediction"]["step_us"] == e["step_us"] == pytest.approx(sum(e["parts_us"].values()))
    assert (data["trace"], data["measured"]) == (None, None)
    assert e["rule"].startswith("link-bound")
    assert cli.main(["simulate", "--json", "--set", "workload.batch=4"]) == 0
    assert json.loads(capsys.readouterr().out)["prediction"] == data["prediction"]


def test_explain_says_band_regime_and_what_would_help_in_words(shipped: Profile, capsys: Capture) -> None:
    assert cli.main(["explain", "--set", "workload.batch=128"]) == 0
    text = capsys.readouterr().out
    assert "-/+ 5.0 %" in text
    assert "This step is link-bound." in text
    assert "With every chosen block already on the GPU, the step takes" in " ".join(text.split())
    assert "Outside the measured range: batch 128" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    workload, config = Workload(), Config()
    timeline = play(make_plan(MODEL, SPEC, workload, config), FakeCosts())
    path = tmp_path / "step.json"
    samples = (timeline.step_us * 0.9, timeline.step_us * 0.95)
    events = median_replay(recorded(timeline))
    save_step(path, MeasuredStep(MODEL.name, "NVIDIA Fake", workload, config, "made up", "s1", samples, events))
    return path


def test_a_measured_step_is_a_second_process_of_the_trace_and_stands_beside(
    shipped: Profile, capsys: Capture, tmp_path: Path, measured: Path
) -> None:
    trace = tmp_path / "new" / "trace.json"
    data = one_object(capsys, "--trace", str(trace), "--measured", str(measured))
    events = json.loads(trace.read_text())["traceEvents"]
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [t.split(":")[0] for t in titles] == ["simulated", "measured"]
    seen = data["measured"]
    assert (seen["same_case"], seen["machine"], seen["file"]) == (True, "NVIDIA Fake", str(measured))
    assert sum(seen["parts_us"].values()) == pytest.approx(seen["kernels_us"])
    assert cli.main(["explain", "--measured", str(measured), "--set", "config.policy=sparse"]) == 0
    text = capsys.readouterr().out
    assert "measured us" in text
    assert "It is another case than the one explained" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_a_measured_file_that_is_none_or_does_not_fit_its_plan_is_one_sentence(
    shipped: Profile, capsys: Capture, tmp_path: Path, measured: Path
) -> None:
    data = json.loads(measured.read_text())
    cut = tmp_path / "cut.json"
    cut.write_text(json.dumps({**data, "events": data["events"][:-1]}))
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**data, "model": "gpt"}))
    for path, said in (
        (tmp_path / "none.json", "no such file"),
        (cut, "_advance_kernel was"),
        (other, "unknown model"),
    ):
        assert cli.main(["explain", "--measured", str(path)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1
        assert str(path) in err
        assert said in err


def test_a_policy_that_cannot_be_priced_is_one_sentence(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    known = profile_module.load_profile("h200-sxm.measured")
    kernels = {kind: cost for kind, cost in known.costs.fitted.kernels.items() if kind != "dense_attention"}
    poorer = replace(known, costs=replace(known.costs, fitted=replace(known.costs.fitted, kernels=kernels)))
    monkeypatch.setattr(profile_module, "load_profile", lambda name: poorer)
    assert cli.main(["explain", "--set", "config.policy=dense"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "no measured cost for 'dense_attention'" in err


def test_slowed_time_is_only_of_the_main_streams_own_work() -> None:
    e, timeline = explain(FakeCosts(slower=2.0), MODEL, SPEC, Workload(), Config())
    own = sum(s.ns for s in timeline.spans if s.stream == MAIN) / 1e3
    assert e.parts_us[SLOWED_PART] < own
    assert e.parts_us[LAUNCH_PART] >= replace(FakeCosts()).step / 1e3
