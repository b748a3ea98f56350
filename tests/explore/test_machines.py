"""``sparda machines``: both tiers in one table, one machine in full, sources for every value."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from sparda.calibrate.datasheet import datasheets
from sparda.calibrate.profile import profile_names
from sparda.explore import cli
from sparda.explore.machines import entries

Capture = pytest.CaptureFixture[str]


def shown(capsys: Capture, *words: str) -> str:
    assert cli.main(["machines", *words]) == 0
    text = capsys.readouterr().out
    # An address has no place to break.
    assert all(len(line) <= 80 or "http" in line for line in text.splitlines())
    return text


def answered(capsys: Capture, *words: str) -> dict[str, Any]:
    assert cli.main(["machines", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    data: dict[str, Any] = json.loads(out)
    assert (data["schema"], data["command"]) == (1, "machines")
    return data


def test_every_profile_that_can_be_named_is_a_row(capsys: Capture) -> None:
    assert [e.profile for e in entries()] == profile_names()
    rows = shown(capsys).splitlines()
    for entry in entries():
        assert any(line.split()[:2] == [entry.machine, entry.tier] for line in rows), entry.profile


def test_a_measured_machine_shows_what_was_measured_not_what_is_printed() -> None:
    measured, sheet = (e for e in entries() if e.machine == "h200-sxm")
    assert (measured.tier, sheet.tier) == ("measured", "datasheet")
    assert measured.link_gb_s < sheet.link_gb_s
    assert measured.hbm_gb_s < sheet.hbm_gb_s
    assert measured.sheet is None


def test_json_holds_every_field_of_every_datasheet(capsys: Capture) -> None:
    by_name = {m["profile"]: m for m in answered(capsys)["machines"]}
    for name, sheet in datasheets().items():
        plain = by_name[f"{name}.datasheet"]["sheet"]
        assert plain["sms"] == sheet.sms
        assert plain["link"]["raw_gb_s"] == sheet.link_gb_s
        assert plain["sources"] == list(sheet.sources)


def test_sources_are_shown_when_asked_for(capsys: Capture) -> None:
    assert "http" not in shown(capsys)
    text = shown(capsys, "--sources")
    assert "not re-read" in text
    assert text.count("http") > len(datasheets())


def test_one_machine_is_shown_in_full_by_either_name(capsys: Capture) -> None:
    assert shown(capsys, "gh200") == shown(capsys, "gh200.datasheet")
    text = shown(capsys, "gh200")
    assert "450 GB/s from the host" in text
    assert "96 GB HBM3" in text
    assert "as measured on the base" in text
    assert [m["profile"] for m in answered(capsys, "h200-sxm")["machines"]] == [
        "h200-sxm.measured",
        "h200-sxm.datasheet",
    ]
    assert [m["tier"] for m in answered(capsys, "h200-sxm.measured")["machines"]] == ["measured"]


@pytest.mark.parametrize(("name", "said"), [("h900", "Known machines: h200-sxm"), ("mi300x", "out of scope")])
def test_a_name_that_no_machine_has_ends_with_2_and_a_sentence(name: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparda.explore.cli", "machines", name, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert said in json.loads(done.stdout)["error"]
    assert len(done.stderr.splitlines()) == 1
