"""The command line as a user types it: results, JSON and nothing else on stdout, mistakes in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparda.calibrate import profile as profile_module
from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Row, Store
from sparda.explore import cli
from sparda.explore.validate import FILE, read_cells

SMALL = ["--set", "grid.batch=4,16", "--set", "grid.context_tokens=32768", "--set", "grid.miss_rate=0.06"]
FEW = ["--set", "grid.prefetch_ctas=1,2,4,16", "--set", "grid.prefetch_warps=1", "--set", "grid.prefetch_stages=8"]

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report writer that only says it was asked."""
    module: Any = types.ModuleType("sparda.explore.report")
    module.write_report = lambda path, profile, scenario: path.write_text(f"{profile.label} {scenario.model}")
    monkeypatch.setitem(sys.modules, "sparda.explore.report", module)


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sparda.explore.cli", *words], capture_output=True, text=True, check=False, timeout=120
    )


def one_object(capsys: Capture, *words: str) -> dict[str, Any]:
    assert cli.main([*words, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert data["schema"] == 1
    assert data["command"] == words[0]
    return data


def mistake(capsys: Capture, *words: str) -> str:
    assert cli.main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("command", ["simulate", "explore", "table", "report"])
def test_a_policy_of_a_kind_that_was_not_measured_is_a_mistake_that_names_those_that_were(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    known = profile_module.load_profile("h200-sxm.measured")
    kernels = {kind: cost for kind, cost in known.costs.fitted.kernels.items() if kind != "headscore"}
    poorer = replace(known, costs=replace(known.costs, fitted=replace(known.costs.fitted, kernels=kernels)))
    monkeypatch.setattr(profile_module, "load_profile", lambda name: poorer)
    where = ["--out", str(tmp_path / "report.html")] if command == "report" else []
    err = mistake(capsys, command, "--set", "config.policy=sparse", *SMALL, *FEW, *where)
    assert "no measured cost for 'headscore', which policy 'sparse' needs" in err
    assert "(dense, sparda, sparda-on-demand, sparda-resident, shallow)" in err


def test_help_names_every_command() -> None:
    done = typed("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_mistakes_typed_in_a_shell_end_with_2_and_a_sentence() -> None:
    for words in (["simulat"], [], ["simulate", "--set", "config.topk=3"], ["table", "--profile", "rtx-9090"]):
        done = typed(*words)
        assert done.returncode == 2, words
        assert len(done.stderr.splitlines()) == 1
        assert done.stdout == ""
    done = typed("table", "--profile", "rtx-9090", "--json")
    assert json.loads(done.stdout)["error"].startswith("no profile 'rtx-9090'")


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_explains_itself(capsys: Capture, name: str) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["simulate", "explore", "table", "doctor"])
def test_json_is_one_object(shipped: Profile, capsys: Capture, name: str) -> None:
    one_object(capsys, name, *([] if name == "doctor" else [*SMALL, *FEW]))


def test_simulate_says_where_the_time_goes(shipped: Profile, capsys: Capture, tmp_path: Path) -> None:
    trace = tmp_path / "new" / "trace.json"
    data = one_object(capsys, "simulate", "--trace", str(trace))
    assert {k["kind"] for k in data["by_kind"]} >= {"attention", "prefetch", "gateup"}
    assert data["prediction"]["step_us"] > 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert cli.main(["simulate", "--set", "workload.batch=64"]) == 0
    text = capsys.readouterr().out
    assert "Does not fit: pinned memory" in text
    assert "fake.measured (measured)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_resident_blocks_above_memory_are_reported_not_refused(shipped: Profile, capsys: Capture) -> None:
    data = one_object(capsys, "simulate", "--set", "config.resident_blocks=2048", "--set", "workload.batch=64")
    assert data["prediction"]["fits"] is False
    assert "GPU memory" in data["prediction"]["limit_reason"]


def test_explore_holds_trials_to_the_enumeration(shipped: Profile, capsys: Capture, tmp_path: Path) -> None:
    words = ["explore", *FEW, "--trials", "6", "--journal", str(tmp_path / "j")]
    assert one_object(capsys, *words)["study"]["trials"] == 6
    data = one_object(capsys, *words)
    assert (data["study"]["trials"], data["study"]["new_trials"]) == (12, 6)
    assert data["study"]["regret"] is not None
    assert data["considered"] == 12
    assert cli.main(["explore", *FEW, "--trials", "4", "--objective", "speed-and-blocks"]) == 0
    text = capsys.readouterr().out
    assert "regret" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("fmt", ["text", "md", "json", "toml", "csv", "sh"])
def test_table_prints_or_writes_every_format(shipped: Profile, capsys: Capture, tmp_path: Path, fmt: str) -> None:
    words = ["table", *SMALL, *FEW, "--format", fmt]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    path = tmp_path / "table"
    assert cli.main([*words, "--out", str(path)]) == 0
    assert path.read_text().rstrip("\n") == printed.rstrip("\n")


def test_evidence_has_every_figure(shipped: Profile, capsys: Capture) -> None:
    figures = one_object(capsys, "evidence", "--seconds", "0.01")["figures"]
    assert len(figures) == 58
    keys = {"value", "unit", "target", "rows", "conditions", "provenance", "met"}
    assert all(keys <= set(f) for f in figures.values())
    assert cli.main(["evidence", "--seconds", "0.01"]) == 0
    text = capsys.readouterr().out
    assert "NOT MET" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    for name, figure in figures.items():
        assert lines[name].removeprefix(name).lstrip().startswith(figure["unit"]), "every figure's own unit"


def test_validate_writes_winners_and_judges_rows(
    shipped: Profile, capsys: Capture, tmp_path: Path, row: Callable[..., Row]
) -> None:
    path = shipped.folder / FILE
    assert len(one_object(capsys, "validate", "--winners", str(path), *SMALL, *FEW)["cells"]) == 2
    assert "has no rows of what" in mistake(capsys, "validate", "--verdicts")
    cells = read_cells(path).cells
    rows = [row("validation", c.workload, r.config, r.predicted_us) for c in cells for r in c.runs]
    Store(shipped.folder).append("v", rows)
    assert one_object(capsys, "validate", "--verdicts")["summary"]["confirmed"] == 2
    assert cli.main(["validate", "--verdicts"]) == 0
    text = capsys.readouterr().out
    assert "2 confirmed, 0 contradicted" in text
    assert max(map(len, text.splitlines())) <= 80


def test_demo_prints_the_table_and_writes_the_report(
    shipped: Profile, report: None, capsys: Capture, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    assert cli.main(["demo", *SMALL, *FEW, "--report", str(path)]) == 0
    text = capsys.readouterr().out
    assert "tier measured" in text
    assert f"Report: {path}" in text
    assert path.read_text() == "fake.measured (measured) minicpm4.1-8b"
    one_object(capsys, "report", "--out", str(path))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["simulate", "--set", "config.top_k=4000", "--set", "config.resident_blocks=0"], "2048 blocks"),
        (["simulate", "--set", "config.prefetch_ctas=two"], "an integer"),
        (["simulate", "--set", "model=gpt"], "minicpm4.1-8b"),
        (["simulate", "--scenario", "nowhere.toml"], "nowhere.toml"),
        (["simulate", "--profile", "a100"], "another GPU's numbers are never used"),
        (["explore", "--trials", "x"], "--trials"),
        (["explore", "--trials", "-1"], "0 or more"),
        (["table", "--format", "xml"], "xml"),
        (["table", "--set", "grid.batch=0"], "1 to 1024"),
        (["evidence", "--seconds", "0"], "above 0"),
        (["calibrate", "nowhere"], "sparda measure"),
        (["measure"], "--out"),
        (["measure", "--out", "x", "--parts", "linc"], "link"),
        (["tabel"], "did you mean 'table'"),
        ([], "no command given"),
        (["validate", "--verdicts", "--cells", "nowhere.json"], "--winners nowhere.json"),
    ],
)
def test_a_mistake_is_one_sentence(shipped: Profile, capsys: Capture, words: list[str], said: str) -> None:
    assert said in mistake(capsys, *words)


def test_a_damaged_profile_is_named(capsys: Capture, tmp_path: Path) -> None:
    for text in ("{", "[]", '{"schema": 9}', '{"schema": 1}'):
        (tmp_path / "profile.json").write_text(text)
        said = mistake(capsys, "simulate", "--profile", str(tmp_path))
        assert "profile.json" in said
    assert "schema 1, this version reads 2; calibrate again." in said


def test_an_interruption_ends_with_130_and_a_line(
    shipped: Profile, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sparda.explore.study.run_study", interrupt)
    assert cli.main(["explore", *FEW, "--trials", "9", "--json"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1


def test_ctrl_c_ends_with_130_and_one_line(monkeypatch: pytest.MonkeyPatch, shipped: Profile, capsys: Capture) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sparda.explore.table.cta_table", interrupted)
    assert cli.main(["table"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err


def test_a_library_that_prints_cannot_spoil_the_object(
    monkeypatch: pytest.MonkeyPatch, shipped: Profile, capsys: Capture
) -> None:
    from sparda.explore import table

    whole = table.cta_table

    def chatty(*args: Any, **named: Any) -> Any:
        print("hello")
        return whole(*args, **named)

    monkeypatch.setattr(table, "cta_table", chatty)
    assert cli.main(["table", *SMALL, *FEW, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["command"] == "table"
    assert "hello" in err


def test_nothing_loads_torch() -> None:
    code = (
        "import sys; from sparda.explore import cli; cli.parser(); cli.main(['doctor']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
