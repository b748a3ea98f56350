"""The CTA table, its exports, and verdicts on cells."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.explore.cells import cell_verdict, public_ctas
from sparda.explore.exports import FUNCTION, export, shell_snippet
from sparda.explore.predict import Predictor
from sparda.explore.scenario import Scenario
from sparda.explore.table import CtaTable, TableRow, cta_table
from sparda.explore.validate import read_cells, summary, verdict_dict, verdicts, winners

AT = Workload(16, 32768, 0.06)
MakeRow = Callable[..., Row]


@pytest.fixture
def table(profile: Profile, small: Scenario) -> CtaTable:
    return cta_table(profile, small)


def test_every_cell_has_a_row(table: CtaTable, small: Scenario) -> None:
    assert [r.workload for r in table.rows] == small.grid.cells
    for row in table.rows:
        assert row.prefetch_ctas in small.grid.prefetch_ctas
        assert row.prefetch_ctas == min(row.tied_ctas)
        assert row.low is not None
        assert row.high is not None
        assert row.low < row.tokens_per_s < row.high
        assert row.gain > 0
        assert row.confirmed == "-"
    assert table.label == "fake.measured (measured)"


def test_the_public_rule() -> None:
    assert [public_ctas(b) for b in (1, 16, 17, 64)] == [16, 16, 32, 32]


def test_a_table_is_confirmed_or_contradicted_by_rows(
    profile: Profile, small: Scenario, table: CtaTable, row: MakeRow
) -> None:
    first, second = table.rows
    for r, factor in ((first, 1.0), (second, 1.1)):
        own = Config(prefetch_ctas=r.prefetch_ctas, lookahead=r.lookahead)
        other = replace(own, prefetch_ctas=16)
        profile.store.append(
            "v", [row("validation", r.workload, own, 1000 * factor), row("validation", r.workload, other, 1005)]
        )
    assert [r.confirmed for r in cta_table(profile, small).rows] == ["yes", "no"]


def test_a_cell_is_judged_within_one_session(row: MakeRow) -> None:
    own, other = Config(), Config(prefetch_ctas=16)
    rows = [row("validation", AT, own, 1000), row("validation", AT, other, 1050)]
    judged = cell_verdict(AT, own, [*rows, row("validation", AT, Config(prefetch_ctas=4), 500, "s2")])
    assert judged.regret == 0
    assert judged.gain_16 == judged.gain_public == pytest.approx(0.05)
    assert judged.gain_32 is None
    assert cell_verdict(AT, Config(prefetch_ctas=3), rows).confirmed == "-"
    assert cell_verdict(replace(AT, batch=4), own, rows).confirmed == "-"


def test_winners_are_written_read_and_judged(
    predictor: Predictor, small: Scenario, tmp_path: Path, row: MakeRow
) -> None:
    path = tmp_path / "validation.json"
    cells = winners(predictor, small, path)
    assert read_cells(path) == cells
    for cell in cells.cells:
        assert cell.runs[0].config == cell.chosen
        assert {16, 32} <= {r.config.prefetch_ctas for r in cell.runs}
        assert len({r.config for r in cell.runs}) == len(cell.runs)
    good, bad = cells.cells
    rows = [row("validation", good.workload, r.config, r.predicted_us) for r in good.runs]
    rows += [
        row("validation", bad.workload, r.config, r.predicted_us * (1.5 if r.config == bad.chosen else 1))
        for r in bad.runs
    ]
    found = verdicts(cells, rows)
    assert [v.confirmed for v in found] == ["no", "yes"]
    assert found[0].error == pytest.approx(1 / 1.5 - 1)
    totals = summary(found)
    assert (totals.confirmed, totals.contradicted, totals.not_run) == (1, 1, 0)
    assert totals.max_regret == found[0].regret
    json.dumps([verdict_dict(v) for v in found])
    assert [v.confirmed for v in verdicts(cells, [])] == ["-", "-"]


def test_a_damaged_cells_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    for text in ("{", '{"schema": 2}', '{"schema": 1, "profile": "a", "model": "b"}'):
        path.write_text(text)
        with pytest.raises(SpardaError, match=r"v\.json"):
            read_cells(path)


def test_exports_hold_the_same_numbers(table: CtaTable) -> None:
    want = [(r.context_tokens, r.batch, r.prefetch_ctas) for r in table.rows]
    parsed = json.loads(export(table, "json"))
    assert parsed["schema"] == 1
    toml = tomllib.loads(export(table, "toml"))
    # TOML has no null: what was not measured is not there.
    known = [{k: v for k, v in r.items() if v is not None} for r in parsed["rows"]]
    assert toml == {**parsed, "rows": known}
    for rows in (parsed["rows"], toml["rows"], list(csv.DictReader(io.StringIO(export(table, "csv"))))):
        assert [(int(r["context_tokens"]), int(r["batch"]), int(r["prefetch_ctas"])) for r in rows] == want
    lines = [line for line in export(table, "md").splitlines() if line.startswith("| 32K")]
    assert [tuple(int(c) for c in line.split("|")[2:5:2]) for line in lines] == [(b, n) for _, b, n in want]


def test_a_terminal_of_80_columns_is_enough(table: CtaTable) -> None:
    wide = replace(
        table.rows[0], batch=1024, tokens_per_s=123456.0, low=113456.0, high=133456.0, inside=False, fits=False
    )
    text = export(replace(table, rows=(wide, *table.rows)), "text")
    assert max(map(len, text.splitlines())) <= 80


def test_a_table_says_what_hardware_said_and_what_is_short(table: CtaTable) -> None:
    first, second = table.rows
    short = "pinned memory: 9.0 GiB needed, 8.0 GiB there, 1.0 GiB too much"
    rows = (
        replace(first, gain=0.1, confirmed="yes", measured_gain=0.07),
        replace(second, confirmed="no", fits=False, limit_reason=short),
        replace(second, fits=False, limit_reason=short),
    )
    text = " ".join(export(replace(table, rows=rows), "text").split())
    assert "+10.0 % yes +7.0 %" in text
    assert "1 yes (measured within 3 % of the best measured configuration), 1 no (contradicted), 1 -" in text
    assert "off by 3.0 points in the median, 3.0 at most" in text
    assert "Contradicted: 32K batch 16 6 %." in text
    assert f"(batch 16 at 32K: {short})" in text
    lines = export(replace(table, rows=rows), "md").splitlines()
    assert lines[2].endswith("| +10.0 % | yes | +7.0 % |")


def test_an_unknown_format_is_refused(table: CtaTable) -> None:
    with pytest.raises(SpardaError, match="text, md, json, toml, csv, sh"):
        export(table, "xml")


def _cell(row: TableRow, context: int, batch: int, miss: float, ctas: int) -> TableRow:
    return replace(row, context_tokens=context, batch=batch, miss_rate=miss, prefetch_ctas=ctas)


@pytest.fixture
def varied(table: CtaTable) -> CtaTable:
    row = table.rows[0]
    cells = [
        _cell(row, c, b, m, n)
        for c, b, m, n in (
            (32768, 1, 0.06, 1),
            (32768, 16, 0.06, 2),
            (32768, 64, 0.06, 3),
            (131072, 1, 0.06, 4),
            (131072, 16, 0.06, 6),
            (131072, 16, 0.12, 32),
        )
    ]
    return replace(table, rows=tuple(cells), miss_rate=0.06)


@pytest.mark.parametrize("shell", [s for s in ("sh", "bash", "dash") if shutil.which(s)])
@pytest.mark.parametrize(
    ("batch", "context", "ctas"),
    [(1, 32768, 1), (2, 32768, 2), (16, 100, 2), (64, 32768, 3), (999, 32768, 3), (1, 32769, 4), (16, 999999, 6)],
)
def test_the_shell_function_prints_the_tables_numbers(
    varied: CtaTable, tmp_path: Path, shell: str, batch: int, context: int, ctas: int
) -> None:
    done = _shell(varied, tmp_path, shell, f"{FUNCTION} 'NVIDIA Fake $1' {batch} {context}")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{ctas}\n", "")


def test_the_shell_function_says_which_lookahead_its_counts_go_with(varied: CtaTable) -> None:
    rows = tuple(replace(r, lookahead=2 if r.batch == 64 else 1) for r in varied.rows)
    assert "Counts go with lookahead 1; 2 at 32K for batch 64." in export(replace(varied, rows=rows), "sh")


def test_the_shell_function_of_one_cell_is_a_number(varied: CtaTable, tmp_path: Path) -> None:
    done = _shell(replace(varied, rows=varied.rows[:1]), tmp_path, "sh", f"{FUNCTION} fake 8 64")
    assert done.stdout == "1\n"


@pytest.mark.parametrize(
    "call",
    [
        f"{FUNCTION} 'NVIDIA Fake 2' 1 1",
        f"{FUNCTION} fake x 1",
        f"{FUNCTION} fake 1 ''",
        FUNCTION,
        f"{FUNCTION} fake 1",
    ],
)
def test_the_shell_function_refuses_what_it_does_not_know(varied: CtaTable, tmp_path: Path, call: str) -> None:
    done = _shell(varied, tmp_path, "sh", call)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


def test_the_snippet_exports_the_launchers_variable(varied: CtaTable, tmp_path: Path) -> None:
    snippet = shell_snippet(varied)
    assert snippet.strip() in export(varied, "sh")
    done = _shell(varied, tmp_path, "sh", f"BATCH=1 CONTEXT=32768\n{snippet}\nenv | grep ^PREFETCH_CTAS=")
    assert done.stdout == "PREFETCH_CTAS=1\n"


def _shell(table: CtaTable, folder: Path, shell: str, text: str) -> subprocess.CompletedProcess[str]:
    path = folder / "ctas.sh"
    path.write_text(export(table, "sh"))
    command = [
        shell,
        "-eu" if text.startswith("BATCH") else "-c",
        *([] if text.startswith("BATCH") else [f". {path}\n{text}"]),
    ]
    script = f". {path}\n{text}" if text.startswith("BATCH") else None
    return subprocess.run(command, input=script, capture_output=True, text=True, check=False)
