"""Watching a GPU with an nvidia-smi that is a script: what it says reaches rows and provenance, and it never stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sparda.calibrate.measure import watch as module
from sparda.calibrate.measure.watch import FIELDS, REASONS, Watch, sample_of
from sparda.calibrate.store import Row, Store

COOL, IDLE, CAPPED, HOT = (
    f"{sm}, 3201, {w}, 55, 0x{bits:016x}, 5, 16"
    for sm, w, bits in ((1980, 500, 0), (345, 80, 1), (1700, 700, 4), (900, 300, 0x48))
)

Install = Callable[..., Path]


def wait_for(condition: Callable[[], bool]) -> None:
    """Until ``condition`` holds; the patience is for a loaded machine, and none of it is used up where it holds."""
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def alive(pid: int) -> bool:
    """Whether it runs; one that ended and that nobody has asked after yet does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put an nvidia-smi on PATH that prints ``lines`` and stays; returns the file that its process number is put in."""

    def put(*lines: str, stays: bool = True, stubborn: bool = False) -> Path:
        pid, folder = tmp_path / "pid", tmp_path / "bin"
        folder.mkdir()
        body = [f"#!{sys.executable}", "import os, signal, sys, time"]
        body += ["signal.signal(signal.SIGTERM, signal.SIG_IGN)"] if stubborn else []
        body += [f"print({line!r}, flush=True)" for line in lines]
        body += [f"open({str(pid) + '.new'!r}, 'w').write(str(os.getpid()) + ' ' + ' '.join(sys.argv[1:]))"]
        body += [f"os.rename({str(pid) + '.new'!r}, {str(pid)!r})"]
        # Like the real one it goes on talking, to whoever is left to listen.
        body += ["while True:", "    time.sleep(0.01)", "    print('', flush=True)"] if stays else []
        tool = folder / "nvidia-smi"
        tool.write_text("\n".join(body) + "\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return pid

    return put


def watched(install: Install, *lines: str) -> Watch:
    pid = install(*lines)
    with Watch("0") as watch:
        wait_for(lambda: pid.exists() and len(watch.samples) == len(lines))
    return watch


def test_every_line_is_a_sample_and_the_tool_is_asked_for_this_gpu_and_interval_only(install: Install) -> None:
    pid = install(COOL, HOT)
    with Watch("GPU-1-2", interval_s=0.25) as watch:
        wait_for(lambda: len(watch.samples) == 2 and pid.exists())
        words = pid.read_text().split()[1:]
    assert words == [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "-i", "GPU-1-2", "-lms", "250"]
    assert [(s.sm_clock_mhz, s.power_w, s.reasons, s.pcie_width) for s in watch.samples] == [
        (1980.0, 500.0, 0, 16.0),
        (900.0, 300.0, 0x48, 16.0),
    ]


def test_the_summary_gives_ranges_at_work_and_seconds_by_reason(install: Install) -> None:
    summary = watched(install, IDLE, COOL, CAPPED, HOT, HOT).summary()
    assert summary["samples"] == 5
    assert summary["sm_clock_mhz"] == {"min": 900.0, "median": 1300.0, "max": 1980.0}, "idle clocks measured nothing"
    assert summary["power_w"] == {"min": 300.0, "median": 400.0, "max": 700.0}
    assert summary["pcie_gen"] == {"min": 5.0, "median": 5.0, "max": 5.0}
    assert summary["reasons_s"] == {"idle": 0.5, "sw_power_cap": 0.5, "hw_slowdown": 1.0, "hw_thermal": 1.0}
    assert summary["throttled_s"] == 1.0


def test_what_a_gpu_does_not_say_is_left_out(install: Install) -> None:
    summary = watched(install, "[N/A], 3201, [Not Supported], 55, [N/A], 5, 16").summary()
    assert (summary["samples"], summary["sm_clock_mhz"], summary["power_w"]) == (1, None, None)
    assert (summary["reasons_s"], summary["throttled_s"]) == ({}, 0.0)


@pytest.mark.parametrize(
    ("lines", "values"),
    [
        ((COOL, CAPPED, COOL), {"sm_clock_mhz": 1980.0, "power_capped": 1.0}),
        ((COOL, HOT, HOT), {"sm_clock_mhz": 900.0, "throttled": 1.0}),
        ((IDLE, COOL), {"sm_clock_mhz": 1980.0}),
        ((IDLE,), {}),
    ],
)
def test_a_row_says_its_clock_and_whether_the_gpu_throttled_or_was_capped(
    install: Install, lines: tuple[str, ...], values: dict[str, float]
) -> None:
    assert watched(install, *lines).seen() == values


@pytest.mark.parametrize("bits", REASONS)
def test_only_heat_slowdowns_and_the_power_brake_mark_a_row(install: Install, bits: int) -> None:
    seen = watched(install, f"1500, 3201, 700, 80, {bits:#x}, 5, 16").seen()
    assert ("throttled" in seen) == (REASONS[bits] in ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"))


def test_a_row_shorter_than_the_interval_has_no_clock_but_is_marked_by_the_sample_before_it(install: Install) -> None:
    watch = watched(install, HOT)
    watch.interval_s = 600.0
    watch.begin()
    assert watch.seen() == {"throttled": 1.0}
    watch.interval_s = 0.0
    watch.begin()
    assert watch.seen() == {}, "what was seen long ago says nothing"


def test_without_the_tool_nothing_is_sampled_and_the_summary_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with Watch("0") as watch:
        assert watch.seen() == {}
    assert watch.summary() == {"samples": 0, "complaint": "nvidia-smi cannot be run (No such file or directory)"}


def test_a_tool_that_complains_is_quoted(install: Install) -> None:
    said = 'Field "clocks_event_reasons.active" is not a valid field to query.'
    pid = install(said, stays=False)
    with Watch("0") as watch:
        wait_for(lambda: pid.exists() and bool(watch.complaint))
    assert watch.summary() == {"samples": 0, "complaint": f"nvidia-smi: {said}"}


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("stubborn", [False, True])
def test_the_tool_never_outlives_the_watch(
    install: Install, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None, stubborn: bool
) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.05)
    pid = install(COOL, stubborn=stubborn)

    def session() -> None:
        with Watch("0"):
            wait_for(pid.exists)
            if error:
                raise error

    if error:
        with pytest.raises(error):
            session()
    else:
        session()
    assert not alive(int(pid.read_text().split()[0]))


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGKILL])
def test_the_tool_goes_with_a_program_that_is_interrupted_or_killed(
    install: Install, tmp_path: Path, signal_: signal.Signals
) -> None:
    pid = install(COOL)
    code = "import sys; from sparda.calibrate.measure.watch import Watch\nwith Watch('0'): sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
        wait_for(pid.exists)
        program.send_signal(signal_)
        program.wait(30)
    tool = int(pid.read_text().split()[0])
    wait_for(lambda: not alive(tool))


def test_a_line_that_is_no_reading_is_none() -> None:
    assert sample_of("Unable to determine the device handle", 0.0) is None
    assert sample_of("", 0.0) is None


def throttled(us: float, hot: bool, session: str) -> Row:
    return Row("kernel", "norm", session, "made up", {"batch": 1}, (us,), {"throttled": 1.0} if hot else {})


def test_of_a_case_the_newest_row_that_was_not_throttled_is_the_latest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append("kernel", [throttled(9.0, True, "s1")])
    assert [r.us for r in store.latest("kernel")] == [9.0], "a GPU that is never cool still has rows"
    store.append("kernel", [throttled(8.0, True, "s2")])
    assert [r.us for r in store.latest("kernel")] == [8.0]
    store.append("kernel", [throttled(5.0, False, "s3"), throttled(7.0, True, "s4")])
    assert [r.us for r in store.latest("kernel")] == [5.0]
    store.append("kernel", [throttled(4.0, False, "s5")])
    assert [r.us for r in store.latest("kernel")] == [4.0]


def test_a_case_that_only_a_hot_gpu_measured_is_measured_once_more(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cool = throttled(5.0, False, "s1")
    store.append("kernel", [throttled(9.0, True, "s1")])
    assert store.settled() == set()
    store.append("kernel", [throttled(8.0, True, "s2")])
    assert store.settled() == {cool.key}
    other = Store(tmp_path / "other")
    other.append("kernel", [cool])
    assert other.settled() == {cool.key}
