"""The report's section on quality: how to measure without a profile; tier, answers, curves and the trade with one."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import plotly.offline
import pytest

from sparda.calibrate.profile import Profile
from sparda.engine.config import Workload
from sparda.explore.quality_answers import answers
from sparda.explore.report import render
from sparda.explore.report_data import collect
from sparda.explore.report_sources import commands
from sparda.explore.scenario import Limits, Scenario, load_scenario
from tests.explore.quality_fakes import tiny, written

PLOTS = ["plot-trade", "plot-recall", "plot-nats", "plot-misses", "plot-needle"]


@pytest.fixture
def scenario(small: Scenario) -> Scenario:
    grid = replace(small.grid, prefetch_ctas=(1, 2, 16), lookahead=(1, 2))
    return replace(small, workload=Workload(16, 32768, 0.06), grid=grid)


@pytest.fixture
def named(scenario: Scenario, tmp_path: Path) -> Scenario:
    folder = written(tmp_path)
    return replace(scenario, quality=folder, selection=folder)


def section(page: str) -> str:
    found = re.search(r'<section id="quality">(.*?)</section>', page, re.DOTALL)
    assert found
    return found[1]


def words(part: str) -> str:
    part = re.sub(r"<script\b.*?</script>", "", part, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", part)).replace("\u00a0", " ").split())


def plots(part: str) -> list[str]:
    return re.findall(r'id="(plot-[\w-]+)"', part)


def test_without_a_profile_the_section_says_how_to_measure_one(profile: Profile, scenario: Scenario) -> None:
    page = render(collect(profile, scenario))
    part = section(page)
    assert plots(part) == []
    assert "names no quality profile" in words(part)
    assert "sparda quality measure --checkpoint DIR --text FILES" in words(part)
    assert "no accuracy was measured" in words(page)


def test_the_tier_comes_first_then_the_trade_the_answers_and_the_curves(profile: Profile, named: Scenario) -> None:
    report = collect(profile, named)
    page = render(report)
    part = section(page)
    text = words(part)
    carried = "Carried over from tiny-1b at 8192 tokens by share of the context: not a measurement of minicpm4.1-8b."
    assert text.startswith(f"Quality {carried}")
    assert plots(part) == PLOTS
    assert all(sentence in text for sentence in answers(tiny()))
    assert "no accuracy was measured" not in words(page)
    ppl = [p.quality.ppl_increase for p in report.trade if p.quality]
    speeds = [p.tokens_per_s for p in report.trade]
    assert len(ppl) > 1
    assert ppl == sorted((v for v in ppl if v is not None), reverse=True)
    assert speeds == sorted(speeds, reverse=True)
    assert all(f"{speed:,.0f}" in text for speed in speeds)


def test_misses_of_a_selection_stand_where_a_grid_of_rates_stood(profile: Profile, named: Scenario) -> None:
    report = collect(profile, named)
    text = words(render(report))
    assert "by resident blocks" in text
    assert not re.search(r"(?<![\d.])6 % misses", text)
    for row in report.table.rows:
        assert f"{row.resident_blocks or row.top_k} resident, {100 * row.miss_rate:.1f} % misses" in text
    assert len(report.fronts) == 1
    # Measured steps are predicted at the misses that their rows state.
    assert {h.workload.miss_rate for h in report.held} == {0.06, 0.03}
    assert report.held == collect(profile, replace(named, quality="", selection="")).held


def test_a_broken_floor_is_a_warning_of_the_answer(profile: Profile, named: Scenario) -> None:
    text = words(render(collect(profile, replace(named, limits=Limits(min_recall=0.99)))))
    assert "Nothing in its cell keeps the floors of quality; this is nearest to them: recall:" in text


def test_a_profile_of_recalls_alone_has_the_panels_it_can(
    profile: Profile, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = replace(tiny(), perplexities=(), retrievals=(), dynamics=())
    report = replace(collect(profile, scenario), quality=bare, scenario=replace(scenario, quality="x"))
    part = section(render(report))
    assert plots(part) == ["plot-recall"]
    assert "no perplexity is known of any configuration here" in words(part)


def test_the_report_says_how_to_make_it_again_with_its_quality(profile: Profile, named: Scenario) -> None:
    floored = replace(named, limits=Limits(max_ppl_increase=0.5))
    report, _, step, _ = commands(collect(profile, floored))
    for line in (report, step):
        sets = re.findall(r"--set (\S+)", line)
        again = load_scenario(None, [s.strip("'") for s in sets])
        assert (again.quality, again.selection, again.limits) == (named.quality, named.selection, floored.limits)


def test_the_section_keeps_the_file_small(profile: Profile, scenario: Scenario, named: Scenario) -> None:
    bundle = plotly.offline.get_plotlyjs()
    own = [len(render(collect(profile, s)).replace(bundle, "")) for s in (scenario, named)]
    assert own[1] - own[0] < 60_000
