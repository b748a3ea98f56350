"""Where a session measured: GPU, driver, clocks, link, host, versions, commit, time."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime

import torch
import triton

QUERY = {
    "gpu": "name",
    "driver": "driver_version",
    "vbios": "vbios_version",
    "power_limit_w": "power.limit",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "throttle_reasons": "clocks_event_reasons.active",
    "temperature_c": "temperature.gpu",
    "ecc": "ecc.mode.current",
    "pcie_gen": "pcie.link.gen.current",
    "pcie_gen_max": "pcie.link.gen.max",
    "pcie_width": "pcie.link.width.current",
}


def gpu_id() -> str:
    """Torch's device 0 as nvidia-smi knows it: its own numbers pass over what CUDA_VISIBLE_DEVICES hides."""
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return f"GPU-{uuid}" if uuid else "0"


def _smi() -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(QUERY.values())}", "--format=csv,noheader,nounits"]
        command += ["-i", gpu_id()]
        out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        found = dict(zip(QUERY, (v.strip() for v in out.splitlines()[0].split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        found = {"nvidia_smi": "unavailable"}
    return found


def commit() -> str:
    """The source's commit; ``SPARDA_COMMIT`` says it where the code was copied without its repository."""
    if given := os.environ.get("SPARDA_COMMIT"):
        return given
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        run = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=folder, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return run.stdout.strip() or "unknown"


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def provenance(seed: int) -> dict[str, object]:
    """Everything a later reader needs to tell whether two sessions may be compared. Needs a CUDA device."""
    device = torch.cuda.get_device_properties(0)
    return {
        **_smi(),
        "gpu": device.name,
        "sms": device.multi_processor_count,
        "gpu_memory_bytes": device.total_memory,
        "host_cpu": _cpu(),
        "host_cores": os.cpu_count(),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(),
        "seed": seed,
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def clocks() -> dict[str, str]:
    """SM clock, temperature and throttle reasons now: read before and after a session."""
    seen = _smi()
    return {k: seen[k] for k in ("sm_clock_mhz", "temperature_c", "throttle_reasons") if k in seen}
