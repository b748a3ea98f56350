"""The HTML report: one file that needs nothing else, whose numbers are the table's."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import plotly.offline
import pytest

from sparda.calibrate.judged import ErrorBand
from sparda.calibrate.leave_one_out import Errors
from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.explore.blame import exposed_ns
from sparda.explore.predict import Predictor
from sparda.explore.report import SECTIONS, write_report
from sparda.explore.report_data import Report, band_of, collect, undominated
from sparda.explore.report_page import count
from sparda.explore.report_sources import commands
from sparda.explore.scenario import Scenario, load_scenario
from sparda.explore.table import cta_table
from sparda.explore.text import percent

MakeRow = Callable[..., Row]
BUNDLE = plotly.offline.get_plotlyjs()


@pytest.fixture
def scenario(small: Scenario) -> Scenario:
    """On a cell of the small grid, with few block budgets."""
    return replace(
        small, workload=Workload(16, 32768, 0.06), grid=replace(small.grid, prefetch_ctas=(1, 2, 16), top_k=(96, 128))
    )


@pytest.fixture
def known(profile: Profile, scenario: Scenario) -> Report:
    return collect(profile, scenario)


def written(folder: Path, profile: Profile, scenario: Scenario) -> str:
    """The report without Plotly, non-breaking spaces made plain."""
    path = folder / "report.html"
    write_report(path, profile, scenario)
    text = path.read_text(encoding="utf-8")
    assert text.count(BUNDLE) == 1
    return text.replace(BUNDLE, "").replace("\u00a0", " ")


def words_of(page: str) -> str:
    """What a reader reads."""
    page = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_the_file_loads_nothing_from_anywhere(tmp_path: Path, profile: Profile, scenario: Scenario) -> None:
    page = written(tmp_path, profile, scenario)
    links = re.findall(r"""(?:src|href|action)\s*=\s*["']([^"']*)""", page)
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"https?://|//cdn|@import|url\(", page)
    assert "default-src 'none'" in page


def test_it_has_every_section_and_the_answer_comes_first(tmp_path: Path, profile: Profile, scenario: Scenario) -> None:
    page = written(tmp_path, profile, scenario)
    assert re.findall(r'<section id="(\w+)"><h2>([^<]*)', page) == [(k, name) for k, (name, _) in SECTIONS.items()]
    assert next(iter(SECTIONS)) == "answer"
    ids = re.findall(r'id="(plot-[\w-]+)"', page)
    assert ids == ["plot-errors", "plot-histogram", "plot-curve-4", "plot-curve-16", "plot-step", "plot-front"]
    assert "no accuracy was measured" in words_of(page)


def test_its_numbers_are_those_of_the_table(tmp_path: Path, profile: Profile, scenario: Scenario) -> None:
    page = written(tmp_path, profile, scenario)
    words = words_of(page)
    table = cta_table(profile, scenario)
    for row in table.rows:
        cell = f"{row.prefetch_ctas} {row.tokens_per_s:,.0f} tok/s {percent(row.gain, sign=True)}"
        assert cell in words
        assert f"{row.low:,.0f} {row.high:,.0f}" in words
    own = next(r for r in table.rows if r.workload == scenario.workload)
    title = re.findall(r"<h1>(.*?)</h1>", page)[0]
    assert f"{count(own.prefetch_ctas, 'CTA')} for the prefetch kernel: {own.tokens_per_s:,.0f} tokens/s" in title
    assert f"{percent(own.gain)} above the public rule" in title
    assert "measured on NVIDIA Fake $1, 1 session" in words
    assert "Hardware has confirmed nothing yet" in words


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path, profile: Profile, scenario: Scenario) -> None:
    first = written(tmp_path, profile, scenario)
    assert written(tmp_path, profile, scenario) == first


def test_measured_cells_are_counted(tmp_path: Path, profile: Profile, scenario: Scenario, row: MakeRow) -> None:
    cell = next(r for r in cta_table(profile, scenario).rows if r.workload == scenario.workload)
    chosen = Config(top_k=cell.top_k, prefetch_ctas=cell.prefetch_ctas, lookahead=cell.lookahead)
    public = replace(chosen, prefetch_ctas=16)
    profile.store.append(
        "v", [row("validation", cell.workload, chosen, 1000), row("validation", cell.workload, public, 1100)]
    )
    words = words_of(written(tmp_path, profile, scenario))
    assert "Hardware: of the 2 cells below, 1 confirmed" in words
    assert "largest measured gain over the public rule is +10.0 %" in words
    assert "2 measured steps of just these conditions" in words
    assert "Hardware confirms it: measured as chosen, a step takes 1.00 ms, +10.0 % over the public rule" in words
    assert "✓ +10.0 %" in words


def test_a_contradicted_answer_names_the_better_one(
    tmp_path: Path, profile: Profile, scenario: Scenario, row: MakeRow
) -> None:
    cell = next(r for r in cta_table(profile, scenario).rows if r.workload == scenario.workload)
    chosen = Config(top_k=cell.top_k, prefetch_ctas=cell.prefetch_ctas, lookahead=cell.lookahead)
    public = replace(chosen, prefetch_ctas=16)
    rows = [row("validation", cell.workload, chosen, 1100), row("validation", cell.workload, public, 1000)]
    profile.store.append("v", rows)
    words = words_of(written(tmp_path, profile, scenario))
    assert "Hardware contradicts it" in words
    assert "16 CTAs x 1 warp x 8 stages" in words


def test_every_measured_step_is_held_against_its_prediction(
    tmp_path: Path, profile: Profile, scenario: Scenario, known: Report
) -> None:
    assert len(known.held) == 3
    band = band_of(known.held)
    assert band is not None
    # The fixture's steps are 2 % slower than simulated.
    assert band.median == pytest.approx(1 - 1 / 1.02, rel=1e-4)
    assert band.bias < 0
    words = words_of(written(tmp_path, profile, scenario))
    assert "3 measured whole steps, each simulated" in words
    assert f"Median error {percent(band.median)}" in words


def test_a_profile_without_steps_says_so(tmp_path: Path, profile: Profile, scenario: Scenario) -> None:
    shutil.rmtree(profile.folder / "rows")
    bare = replace(profile, tier="datasheet", sessions=(), envelope={}, band=ErrorBand(0, 0, 0, 0, 0, 0, 0))
    page = written(tmp_path, bare, scenario)
    words = words_of(page)
    assert "no measured whole steps" in words
    assert "their error is not known" in words
    assert "datasheet, not measured on NVIDIA Fake $1" in words
    assert "plot-errors" not in page
    assert "plot-curve-16" in page
    assert "None of " not in words


def test_what_is_left_out_of_a_table_stands_beside_its_spread(
    tmp_path: Path, profile: Profile, scenario: Scenario
) -> None:
    words = words_of(written(tmp_path, profile, scenario))
    assert "Each inner point of the tables behind a prediction was left out in turn" in words
    assert "down 1.1 % / 3.2 % - 5.4 % table 0.2 % 2.3 % / 21.0 % - 1.3 % 1.7 % / 14.0 % - - - -" in words
    assert "copy alone, 8 stages - - - - - - - - 0.3 % / 5.1 % - 2.0 % table 0.4 %" in words
    bare = replace(profile, errors=Errors({}, {}, ()))
    assert "no tables with points that could be left out" in words_of(written(tmp_path, bare, scenario))


def test_exposed_time_adds_up_to_the_step(known: Report) -> None:
    for step in (known.step, known.rule_step):
        assert sum(exposed_ns(step).values()) == step.makespan_ns
    busy = {kind: total.ns for kind, total in known.step.by_kind().items()}
    blame = exposed_ns(known.step)
    assert all(blame.get(kind, 0) <= ns for kind, ns in busy.items())
    assert blame["gateup"] == busy["gateup"]


def test_a_slow_link_is_to_blame_for_the_wait(profile: Profile, scenario: Scenario) -> None:
    slow = replace(scenario, workload=replace(scenario.workload, miss_rate=0.9, batch=64))
    step = collect(profile, slow).step
    assert max(exposed_ns(step), key=lambda kind: exposed_ns(step)[kind]) == "prefetch"
    assert sum(exposed_ns(step).values()) == step.makespan_ns


def test_the_front_drops_budgets_that_a_larger_one_outruns(predictor: Predictor, scenario: Scenario) -> None:
    points = [predictor(scenario.workload, Config(top_k=k)) for k in (64, 96, 128)]
    assert undominated(points) == points
    as_fast = replace(points[2], tokens_per_s=points[0].tokens_per_s)
    assert undominated([points[0], points[1], as_fast]) == [as_fast]


def test_budgets_that_cannot_be_are_left_out(profile: Profile, scenario: Scenario) -> None:
    grid = replace(scenario.grid, top_k=(16, 64, 4096))
    fronts = collect(profile, replace(scenario, grid=grid)).fronts
    assert [[p.config.top_k for p in points] for _, points in fronts] == [[64, 96]]


def test_its_commands_give_the_same_scenario_again(known: Report, scenario: Scenario) -> None:
    report = commands(known)[0]
    sets = re.findall(r"--set (\S+)", report)
    assert load_scenario(None, sets) == scenario
    step = load_scenario(None, re.findall(r"--set (\S+)", commands(known)[2]))
    assert (step.workload, step.config) == (scenario.workload, known.answer.choice.best.config)


def test_names_from_files_are_text_not_markup(tmp_path: Path, profile: Profile, scenario: Scenario) -> None:
    path = profile.folder / "provenance.json"
    path.write_text(json.dumps({"s1": {"gpu": "<script>alert(1)</script>", "pcie_gen": "5", "pcie_width": "16"}}))
    page = written(tmp_path, profile, scenario)
    assert "<script>alert" not in page
    assert "gen 5 x16" in words_of(page)


def test_shared_host_blocks_are_told(
    tmp_path: Path, profile: Profile, scenario: Scenario, row: MakeRow, known: Report
) -> None:
    assert "none shared host blocks" in words_of(written(tmp_path, profile, scenario))
    shared = replace(row("step", Workload(64, 131072, 0.12), Config(), 9000), values={"pool_aliased": 1.0})
    profile.store.append("steps", [shared])
    words = words_of(written(tmp_path, profile, scenario))
    assert "Of 4 whole steps 1 ran with a pinned host pool smaller than the KV cache" in words
    assert "batch 64 at 131,072 tokens" in words


def test_a_damaged_row_and_a_path_that_cannot_be_written_are_mistakes(
    tmp_path: Path, profile: Profile, scenario: Scenario, row: MakeRow
) -> None:
    for path in (tmp_path / "no folder" / "report.html", tmp_path):
        with pytest.raises(SpardaError, match="cannot be written"):
            write_report(path, profile, scenario)
    bad = row("step", Workload(), Config(), 9000)
    profile.store.append("steps", [replace(bad, case={"batch": 4})])
    with pytest.raises(SpardaError, match="lacks context_tokens"):
        write_report(tmp_path / "report.html", profile, scenario)
    assert not (tmp_path / "report.html").exists()
