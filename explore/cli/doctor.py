"""Say what this machine has and lacks for each command. Loads neither torch nor triton."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sparda.explore.cli.common import Output, add_json
from sparda.explore.text import GIB, columns, wrapped

NEED_GPU = "measure, validate, profile new, generate, trace record, trace run"
NEED_ENGINE = "quality measure, quality train"
"""Those that a CPU does too, more slowly."""

PACKAGES = (
    ("numpy", "every command", "pip install sparda"),
    ("scipy", "calibrate", "pip install sparda"),
    ("simpy", "simulate, explain, explore, table", "pip install sparda"),
    ("optuna", "explore --trials", "pip install sparda"),
    ("plotly", "report, demo", "pip install sparda"),
    ("torch", f"{NEED_GPU}, {NEED_ENGINE}", "pip install 'sparda[engine]'"),
    ("triton", f"{NEED_GPU}, {NEED_ENGINE}", "pip install 'sparda[engine]'"),
    ("tokenizers", "generate --prompt, quality measure --text", "pip install 'sparda[tokenizer]'"),
)
NO_GPU_CHECKS = ("numpy", "scipy", "simpy", "optuna", "plotly", "profiles")
QUERY = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
NEED_NO_GPU = (
    "machines, simulate, explain, explore, table, policies, published, report, demo, evidence, calibrate, "
    "profile diff, quality show, trace show, validate --verdicts"
)
NO_GPU_HINT = f"only {NEED_GPU} need one: run them on a machine with an NVIDIA GPU, driver and torch for CUDA"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked for: ``state`` is "ok", "missing" or "warning"; ``hint`` says what to do."""

    name: str
    state: str
    found: str
    hint: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    add_json(parser)


def run(args: argparse.Namespace) -> Output:
    """Look, and report; nothing is changed."""
    checks = [
        Check("python", "ok", platform.python_version()),
        *map(_package, PACKAGES),
        *_gpus(),
        _memory(),
        _profiles(),
    ]
    gpu = all(c.state == "ok" for c in checks if c.name in ("torch", "triton") or c.name.startswith("gpu"))
    # A torch without CUDA is a warning, and enough.
    engine = all(c.state != "missing" for c in checks if c.name in ("torch", "triton"))
    simulator = all(c.state == "ok" for c in checks if c.name in NO_GPU_CHECKS)
    lines = [columns(["", "state", "found"], [[c.name, c.state, c.found] for c in checks], left=3)]
    lines += [wrapped(f"{c.name}: {c.hint}", "  ") for c in checks if c.hint and c.state != "ok"]
    lines.append("")
    lines.append(wrapped(f"Ready: {NEED_NO_GPU}." if simulator else f"Not ready: {NEED_NO_GPU}."))
    lines.append(wrapped(f"Ready: {NEED_GPU}." if gpu else f"Not ready: {NEED_GPU} (they need a GPU)."))
    lines.append(f"Ready: {NEED_ENGINE}." if engine else f"Not ready: {NEED_ENGINE} (they need torch and triton).")
    if simulator:
        lines.append("Next: sparda table, or sparda demo --report report.html")
    data = {"checks": [asdict(c) for c in checks], "can_simulate": simulator, "can_measure": gpu, "can_train": engine}
    return Output(data, "\n".join(lines))


def _package(wanted: tuple[str, str, str]) -> Check:
    name, use, install = wanted
    if importlib.util.find_spec(name) is None:
        return Check(name, "missing", "-", f"needed by {use}: {install}")
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "unknown version"
    if name == "torch" and found.endswith("+cpu"):
        return Check(
            name, "warning", found, "built without CUDA, enough for quality; to measure a GPU install a CUDA build"
        )
    return Check(name, "ok", found)


def _gpus() -> list[Check]:
    """GPUs as nvidia-smi lists them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [Check("gpu", "missing", "no nvidia-smi", NO_GPU_HINT)]
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return [Check("gpu", "missing", f"nvidia-smi failed ({type(e).__name__})", NO_GPU_HINT)]
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 4]
    if done.returncode or not rows:
        return [Check("gpu", "missing", "nvidia-smi lists none", NO_GPU_HINT)]
    return [
        Check(f"gpu {i}", "ok", f"{name}, {memory} MiB, driver {driver}, PCIe {gen} x{width}")
        for i, (name, driver, memory, gen, width) in enumerate(rows)
    ]


def _memory() -> Check:
    """Host memory: what of it can be pinned bounds batch times context."""
    try:
        text = Path("/proc/meminfo").read_text()
        kib = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return Check("host memory", "warning", "unknown", "the pinned pool needs 2 GiB and more for each sequence")
    return Check("host memory", "ok", f"{kib * 1024 / GIB:.0f} GiB available")


def _profiles() -> Check:
    from sparda.calibrate.datasheet import datasheets
    from sparda.calibrate.profile import measured_names

    names = measured_names()
    hint = "measure and calibrate one, then give its folder with --profile"
    found = f"{', '.join(names)}; {len(datasheets())} by datasheet (sparda machines)"
    return Check("profiles", "ok" if names else "missing", found if names else "-", "" if names else hint)
