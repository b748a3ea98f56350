"""`sparda profile`: made in one go, listed, shown and compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparda.calibrate import profile as profile_module
from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Store
from sparda.calibrate.transfer import RULES
from sparda.explore import cli

Capture = pytest.CaptureFixture[str]
H200 = "h200-sxm.measured"


def answer(capsys: Capture, *words: str) -> dict[str, Any]:
    assert cli.main(["profile", *words, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (data["command"], data["action"]) == ("profile", words[0])
    return data


def text(capsys: Capture, *words: str) -> str:
    assert cli.main(["profile", *words]) == 0
    out: str = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if not line.startswith("Folder: ")) <= 80
    return out


def mistake(capsys: Capture, *words: str) -> str:
    assert cli.main(["profile", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    return str(err)


def test_the_profiles_of_the_package_are_listed(capsys: Capture) -> None:
    profiles = answer(capsys, "list")["profiles"]
    (found,) = [p for p in profiles if p["tier"] == "measured"]
    assert (found["profile"], found["gpu"]) == (H200, "NVIDIA H200")
    assert found["held_out_steps"] > 0
    assert all((p["held_out_steps"], p["median_error"]) == (0, None) for p in profiles if p is not found)
    said = text(capsys, "list")
    assert all(p["profile"] in said for p in profiles)


def test_a_profile_by_datasheet_shows_the_rules_it_rests_on_and_no_session_or_error_of_another_gpu(
    capsys: Capture,
) -> None:
    data = answer(capsys, "show", "h100-sxm.datasheet")
    assert (data["tier"], data["sessions"], data["band"]["count"]) == ("datasheet", {}, 0)
    assert data["errors"] == {"kernels": {}, "corun": {}, "copies": []}
    said = " ".join(text(capsys, "show", "h100-sxm.datasheet").split())
    assert "Held-out steps: none, so the error of its predictions is not known." in said
    assert f"Nothing was measured on it: costs and envelope are those of {H200}, carried over." in said
    assert all(rule[1:] in said for rule in RULES)
    assert "kernel alone" not in said


def test_a_profile_shows_machine_sessions_errors_and_envelope(capsys: Capture) -> None:
    data = answer(capsys, "show", H200)
    assert {"machine", "band", "errors", "envelope", "sessions"} <= set(data)
    rows = [s["rows"] for s in data["sessions"].values()]
    assert sum(sum(counts.values()) for counts in rows) == len(profile_module.load_profile(H200).store.rows())
    shown = text(capsys, "show", H200)
    assert all(said in shown for said in ("132 SMs", "Held-out steps", "context_tokens", "kernel alone", "580.159.04"))


def test_a_session_in_which_the_gpu_throttled_is_marked(shipped: Profile, capsys: Capture) -> None:
    watched = {"sm_clock_mhz": {"min": 900.0, "median": 1410.0, "max": 1980.0}, "throttled_s": 3.5}
    shipped.store.add_session("s2", {"gpu": "NVIDIA Fake $1", "watched": watched})
    assert "1410!" in text(capsys, "show", "fake.measured")


def test_a_profile_and_itself_do_not_differ(capsys: Capture) -> None:
    data = answer(capsys, "diff", H200, H200)
    assert (data["moved"], data["machine"], data["provenance"], data["same_gpu"]) == (0, {}, {}, True)
    assert data["both"] == len(data["cases"]) > 2000
    said = text(capsys, "diff", H200, H200)
    assert "0 moved" in said
    assert "machines' values are the same" in said


@pytest.fixture
def other(shipped: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """The fake profile of another GPU, whose steps take half as long again and which lacks a link row."""
    store = Store(tmp_path / "other")
    store.add_session("s1", {"gpu": "NVIDIA Other", "driver": "2"})
    store.append("link", shipped.store.rows("link")[1:])
    steps = [replace(r, samples_us=tuple(1.5 * s for s in r.samples_us)) for r in shipped.store.rows("step")]
    store.append("step", [*steps[:-1], replace(steps[-1], values={"throttled": 1.0})])
    made = replace(
        shipped, name="other.measured", folder=store.folder, machine=replace(shipped.machine, gpu="NVIDIA Other")
    )
    known = profile_module.load_profile
    monkeypatch.setattr(profile_module, "load_profile", lambda name: made if name == "other" else known(name))
    return made


def test_what_moved_is_said_with_its_worst_case(other: Profile, capsys: Capture) -> None:
    data = answer(capsys, "diff", "fake.measured", "other")
    assert (data["moved"], data["same_gpu"]) == (3, False)
    (steps,) = [o for o in data["ops"] if o["kind"] == "step"]
    assert (steps["both"], steps["up"], steps["down"], steps["median_ratio"]) == (3, 3, 0, pytest.approx(1.5))
    assert data["provenance"]["driver"] == [["1"], ["2"]]
    assert data["throttled_rows"] == [0, 1]
    said = " ".join(text(capsys, "diff", "fake.measured", "other").split())
    assert "different GPUs" in said
    assert "step (step), worst:" in said
    assert "+50.0 %" in said
    assert "prefetch (link): 1 case in A only." in said
    assert "Measured while the GPU throttled: 1 row of B." in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "ACTION"),
        (["nwe"], "'new', 'list', 'show', 'diff'"),
        (["show"], "NAME"),
        (["show", "rtx-9090"], "no profile 'rtx-9090'"),
        (["diff", H200], "B"),
        (["diff", H200, "rtx-9090"], "no profile 'rtx-9090'"),
        (["new"], "OUT"),
        (["new", "x", "--budget", "0"], "above 0"),
    ],
)
def test_a_mistake_is_one_sentence(capsys: Capture, words: list[str], said: str) -> None:
    assert said in mistake(capsys, *words)
