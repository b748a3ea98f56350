"""What a configuration costs in quality, and what it misses: measured points, points between, and nothing beyond."""

from __future__ import annotations

from dataclasses import replace
from math import expm1, log
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.calibrate.quality import Spread
from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.dynamics.choices_file import write_choices
from sparda.engine.dynamics.stack import miss_curve
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import SparseSpec
from sparda.explore.quality import NO_LOSS, UNKNOWN, Quality, QualityLookup, broken_by, tier_of
from sparda.explore.scenario import Limits, Scenario, load_scenario
from sparda.explore.selection import Selection, load_selection
from tests.engine.made_choices import drifting
from tests.explore.quality_fakes import CURVE, MODEL, NATS, RECALLS, nats_of, recall_of, tiny

AT = Workload(16, 131072)
"""2048 blocks: 16 times as many as were measured on."""
FORECAST = ("forecast", 1, 1)
LOOKUP = QualityLookup(tiny(), "minicpm4.1-8b", SparseSpec())


def test_a_measured_share_of_the_context_is_returned_exactly() -> None:
    for top_k in (8, 16, 32, 64):
        q = LOOKUP(AT, Config(top_k=16 * top_k))
        assert q.recall == recall_of(FORECAST, top_k)
        assert q.mass == recall_of(FORECAST, top_k) - 0.05
        assert q.ppl_increase == expm1(nats_of(FORECAST, top_k))
        assert q.spread == Spread(q.recall, q.recall - 0.01, q.recall, q.recall + 0.01)
        assert q.reason == ""
    error = LOOKUP(AT, Config(top_k=256)).standard_error
    assert error == pytest.approx(0.004 * (1 + expm1(NATS[FORECAST])))


def test_between_two_measured_points_a_value_is_linear_in_the_logarithm_of_top_k() -> None:
    q = LOOKUP(AT, Config(top_k=384))
    weight = log(1.5) / log(2)
    assert q.recall == pytest.approx(RECALLS[FORECAST] + 0.02 * weight)
    assert q.ppl_increase == pytest.approx(expm1(NATS[FORECAST] * (1 - weight / 2)))


@pytest.mark.parametrize("top_k", [63, 1025])
def test_outside_the_measured_range_nothing_is_known_and_the_reason_names_the_range(top_k: int) -> None:
    q = LOOKUP(AT, Config(top_k=top_k))
    assert (q.recall, q.mass, q.ppl_increase, q.spread, q.standard_error) == (None,) * 5
    assert f"top-k {top_k} is {100 * top_k / 2048:.1f} % of the context, measured were 3.1 % to 50.0 %" in q.reason


def test_what_one_measurement_reaches_is_known_where_the_other_does_not() -> None:
    q = LOOKUP(AT, Config(top_k=96))
    assert q.recall is not None
    assert q.ppl_increase is None
    assert q.reason.startswith("perplexity: top-k 96 is 4.7 %")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (Config(policy="sparda", top_k=256, lookahead=2), ("forecast", 2, 1)),
        (Config(policy="sparda-on-demand", top_k=256), FORECAST),
        (Config(policy="sparda-resident", top_k=256, lookahead=4), ("forecast", 4, 1)),
        (Config(policy="infinigen", top_k=256, lookahead=3), ("infinigen", 1, 0)),
        (Config(policy="sparse", top_k=256), ("sparse", 0, 0)),
        (Config(policy="sparse-resident", top_k=256), ("sparse", 0, 0)),
        (Config(policy="shallow", top_k=256), ("shallow", 0, 0)),
    ],
)
def test_each_policy_is_stood_for_by_its_own_choice(config: Config, key: tuple[str, int, int]) -> None:
    q = LOOKUP(AT, config)
    assert (q.recall, q.ppl_increase) == (RECALLS[key], expm1(NATS[key]))


def test_what_nobody_measured_is_unknown_and_not_another_policys() -> None:
    for config in (Config(policy="nosa"), Config(lookahead=0), Config(policy="shallow", refresh_steps=0)):
        q = LOOKUP(AT, replace(config, top_k=256))
        assert (q.recall, q.ppl_increase) == (None, None)
        assert q.reason
    assert "nothing was measured for forecast d=0" in LOOKUP(AT, Config(top_k=256, lookahead=0)).reason


@pytest.mark.parametrize("policy", POLICIES)
def test_a_choice_of_every_block_loses_nothing(policy: str) -> None:
    q = LOOKUP(Workload(16, 8192), Config(policy=policy, top_k=128))
    assert (q.recall, q.mass, q.ppl_increase, q.tier) == (1.0, 1.0, 0.0, NO_LOSS)
    assert LOOKUP(AT, Config(policy="dense")).tier == NO_LOSS


def test_the_tier_says_whether_this_model_and_context_were_measured() -> None:
    profile = tiny()
    assert tier_of(profile, MODEL, 8192) == "measured on tiny-1b at 8192 tokens"
    carried = "carried over from tiny-1b at 8192 tokens by share of the context: not a measurement "
    assert tier_of(profile, "minicpm4.1-8b", 8192) == carried + "of minicpm4.1-8b"
    assert tier_of(profile, MODEL, 4096) == carried + "at 4096 tokens"
    assert LOOKUP(AT, Config()).tier == carried + "of minicpm4.1-8b"


def test_a_search_tries_the_measured_shares_that_can_be_chosen() -> None:
    assert LOOKUP.top_ks(AT, Config()) == (64, 128, 256, 512, 1024)
    # 34 blocks are always chosen; of 512 blocks a measured 4 of 128 is only 16.
    assert LOOKUP.top_ks(Workload(16, 32768), Config()) == (64, 128, 256)
    assert LOOKUP.lookaheads(Config()) == (1, 2, 3, 4)


@given(st.integers(34, 2048), st.integers(34, 2048))
def test_more_blocks_never_lose_more(a: int, b: int) -> None:
    """As long as what was measured says so at every measured point, which the fake does."""
    few, many = (LOOKUP(AT, Config(top_k=k)) for k in sorted((a, b)))
    if few.recall is not None and many.recall is not None:
        assert few.recall <= many.recall + 1e-12
    if few.ppl_increase is not None and many.ppl_increase is not None:
        assert few.ppl_increase >= many.ppl_increase - 1e-12


def _quality(recall: float | None, ppl: float | None) -> Quality:
    return Quality("forecast d=1", recall, None, ppl, "measured", reason="" if recall else "nothing was measured")


def test_a_broken_floor_is_named_with_what_is_missing() -> None:
    limits = Limits(min_recall=0.9, max_ppl_increase=0.05)
    broken = broken_by(_quality(0.86, 0.07), limits)
    assert "recall: 86.0 %, at least 90.0 % wanted, 4.0 points too little" in broken.reason
    assert "perplexity: +7.0 %, at most +5.0 % wanted, 2.0 points too much" in broken.reason
    assert broken.recall_short == pytest.approx(0.04)
    assert broken.ppl_over == pytest.approx(0.02)
    kept = broken_by(_quality(0.95, 0.05), limits)
    assert (kept.reason, kept.ppl_over) == ("", 0.0)
    assert kept.recall_short < 0


def test_an_unknown_quality_breaks_a_floor_and_says_why() -> None:
    broken = broken_by(_quality(None, None), Limits(min_recall=0.5))
    assert broken.reason == "recall not known (nothing was measured)"
    assert broken.recall_short == UNKNOWN
    assert broken_by(_quality(None, None), Limits()).reason == ""


def test_a_floor_without_a_quality_profile_is_a_mistake(tmp_path: Path) -> None:
    for name in ("min_recall", "max_ppl_increase"):
        with pytest.raises(SpardaError, match=rf"limits\.{name} is 0\.5 but no quality profile"):
            load_scenario(None, [f"limits.{name}=0.5"])
    path = tmp_path / "s.toml"
    path.write_text("[limits]\nmin_recall = 0.5\n")
    assert load_scenario(path, ["quality=some.measured"]).quality == "some.measured"
    for wrong in ("limits.min_recall=1.1", "limits.min_recall=-1", "limits.max_ppl_increase=-0.1"):
        with pytest.raises(SpardaError, match="share"):
            load_scenario(None, ["quality=x", wrong])


SELECTION = Selection.of(tiny())
SPEC = SparseSpec()


def test_misses_follow_from_the_curve_at_the_ratio_of_slots() -> None:
    config = Config(top_k=256)
    free = 256 - SPEC.forced
    assert SELECTION.miss_rate(SPEC, AT, config) == pytest.approx(0.18 * free / 256)
    twice = replace(config, resident_blocks=SPEC.forced + 2 * free)
    assert SELECTION.miss_rate(SPEC, AT, twice) == pytest.approx(0.02 * free / 256)
    assert SELECTION.outside(SPEC, AT, twice) == []


def test_nothing_is_missed_where_nothing_is_fetched_or_all_is_resident() -> None:
    assert SELECTION.miss_rate(SPEC, AT, Config(policy="sparda-resident")) == 0
    assert SELECTION.miss_rate(SPEC, AT, Config(top_k=256, resident_blocks=2048)) == 0
    assert SELECTION.outside(SPEC, AT, Config(top_k=256, resident_blocks=2048)) == []


def test_misses_beyond_what_was_measured_say_so() -> None:
    free = 256 - SPEC.forced
    far = Config(top_k=256, resident_blocks=SPEC.forced + 5 * free)
    assert "measured up to 4 times the free picks: 922" in SELECTION.outside(SPEC, AT, far)[0]
    assert SELECTION.miss_rate(SPEC, AT, far) == pytest.approx(CURVE.missed[-1] * free / 256)
    assert "50.0 % of the context, the nearest measured is 25.0 %" in SELECTION.outside(SPEC, AT, Config(top_k=1024))[0]
    assert SELECTION.outside(SPEC, AT, Config(top_k=96)) == []
    assert "choice of sparse; that of shallow" in SELECTION.outside(SPEC, AT, Config(policy="shallow", top_k=256))[0]


@given(st.integers(128, 512), st.integers(0, 1600), st.integers(0, 1600))
def test_more_resident_blocks_never_miss_more(top_k: int, a: int, b: int) -> None:
    few, many = (
        SELECTION.miss_rate(SPEC, AT, Config(top_k=top_k, resident_blocks=top_k + extra)) for extra in sorted((a, b))
    )
    assert few >= many


def test_a_profile_that_says_nothing_of_its_dynamics_is_no_selection() -> None:
    with pytest.raises(SpardaError, match="no rows of how the choice moves"):
        Selection.of(replace(tiny(), dynamics=()))


def test_a_selection_leaves_one_cell_for_each_context_and_batch() -> None:
    scenario = Scenario(selection="x")
    cells = [(w.context_tokens, w.batch) for w in scenario.cells]
    assert len(set(cells)) == len(cells) == len(scenario.grid.cells) / 3
    assert len(Scenario().cells) == len(scenario.grid.cells)


def test_a_trace_may_say_what_is_missed(tmp_path: Path) -> None:
    choices = drifting(64)
    write_choices(tmp_path / "a.choices", choices)
    found = load_selection(str(tmp_path / "a.choices"))
    top_k = choices.facts.top_k
    assert found.curves == ((top_k, miss_curve(choices, skip=16)),)
    assert "not a measurement of" in found.tier("another", 131072)
    with pytest.raises(SpardaError, match="nowhere"):
        load_selection("nowhere.choices")


def test_what_is_carried_over_is_also_told_by_the_number_of_blocks() -> None:
    q = LOOKUP(AT, Config(top_k=96))
    assert q.as_many is not None
    # The most blocks measured that are no more than 96.
    most = max(p.choice.top_k for p in tiny().perplexities if p.choice.selector == "forecast")
    assert q.as_many.blocks == most <= 96
    assert q.as_many.ppl_increase == pytest.approx(expm1(nats_of(FORECAST, most)))
    here = QualityLookup(tiny(), MODEL, SparseSpec())(Workload(16, 8192), Config(top_k=48))
    assert here.as_many is None, "it was measured there"
    assert LOOKUP(AT, Config("nosa")).as_many is None
