"""What the GPU did while it was measured: clocks, power, temperature, link and throttle reasons, sampled throughout.

Nothing is set and nothing locked: `nvidia-smi` only reads, and needs no privileges for it.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType

TOOL = "nvidia-smi"
INTERVAL_S = 0.5
STOP_S = 2.0
"""Seconds that the tool has to end when asked to; after them it is killed."""

FIELDS = (
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "temperature.gpu",
    "clocks_event_reasons.active",
    "pcie.link.gen.current",
    "pcie.link.width.current",
)

REASONS = {
    0x001: "idle",
    0x002: "application_clocks",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
}
"""Bits of nvmlClocksEventReason, as nvml.h names them."""

IDLE, POWER_CAP = 0x001, 0x004
THROTTLED = 0x008 | 0x020 | 0x040 | 0x080
"""Reasons that make a time say something about cooling or supply instead of the GPU: thermal, slowdown, power brake.

The power cap is not among them: heavy kernels of a healthy GPU run at it, so it is counted apart.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading. ``at_s``: ``time.monotonic()`` when it was read; ``None``: the GPU does not say."""

    at_s: float
    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    reasons: int
    pcie_gen: float | None
    pcie_width: float | None


def sample_of(line: str, at_s: float) -> Sample | None:
    """A line of the tool's output; ``None`` where it is none, but a complaint."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(FIELDS):
        return None
    sm, memory, power, temperature, _, gen, width = map(_number, cells)
    return Sample(at_s, sm, memory, power, temperature, _mask(cells[4]), gen, width)


def _number(text: str) -> float | None:
    """``None`` for "[N/A]" and its like."""
    try:
        return float(text)
    except ValueError:
        return None


def _mask(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0


@dataclass(slots=True)
class Watch:
    """Samples ``gpu`` (an index, UUID or bus id, as nvidia-smi takes it) for as long as it is entered."""

    gpu: str
    interval_s: float = INTERVAL_S
    samples: list[Sample] = field(default_factory=list)
    complaint: str = ""
    """Why there are no samples, where there are none."""
    _began_s: float = field(default_factory=time.monotonic)
    _entered_s: float = 0.0
    _watched_s: float = 0.0
    _child: subprocess.Popen[str] | None = None
    _reader: threading.Thread | None = None

    def __enter__(self) -> Watch:
        # It dies with us even where nobody can end it: after us its pipe has no reader.
        query = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
        command = [TOOL, *query, "-i", self.gpu, "-lms", str(round(1e3 * self.interval_s))]
        try:
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        except OSError as e:
            self.complaint = f"{TOOL} cannot be run ({e.strerror})"
            return self
        self._reader = threading.Thread(target=self._read, daemon=True, name="watch")
        self._reader.start()
        self._entered_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._child is None or self._reader is None:
            return
        self._child.terminate()
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        # Whatever inherited the pipe could hold it open: the reader, a daemon, is not waited for without end.
        self._reader.join(STOP_S)
        self._watched_s = time.monotonic() - self._entered_s

    def _read(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                if found := sample_of(line, time.monotonic()):
                    self.samples.append(found)
                elif line.strip() and not self.complaint:
                    self.complaint = f"{TOOL}: {line.strip()}"

    def begin(self) -> None:
        """What is ``seen`` next begins here."""
        self._began_s = time.monotonic()

    def seen(self) -> dict[str, float]:
        """What a row's values say about the time from ``begin`` until now; empty where nothing was sampled.

        ``sm_clock_mhz``: median of the samples in which the GPU was at work. ``throttled`` and ``power_capped``: 1
        where a sample says so; of a time shorter than the interval the sample before it does.
        """
        since_s, samples = self._began_s, list(self.samples)
        inside = [s for s in samples if s.at_s >= since_s]
        clocks = [s.sm_clock_mhz for s in inside if s.sm_clock_mhz is not None and not s.reasons & IDLE]
        found = {"sm_clock_mhz": float(median(clocks))} if clocks else {}
        latest = samples[-1:] if samples and samples[-1].at_s >= since_s - 2 * self.interval_s else []
        reasons = 0
        for s in inside or latest:
            reasons |= s.reasons
        if reasons & THROTTLED:
            found["throttled"] = 1.0
        if reasons & POWER_CAP:
            found["power_capped"] = 1.0
        return found

    def summary(self) -> dict[str, object]:
        """The session in a few numbers, for its provenance.

        Least, median and most are over samples in which the GPU was at work, or over all if it never was; each sample
        stands for one interval in ``reasons_s``, the seconds seen by reason.
        """
        samples = list(self.samples)
        if not samples:
            return {"samples": 0, "complaint": self.complaint or f"{TOOL} said nothing"}
        busy = [s for s in samples if not s.reasons & IDLE] or samples
        seconds = {
            name: round(self.interval_s * sum(bool(s.reasons & bit) for s in samples), 1)
            for bit, name in REASONS.items()
        }
        return {
            "samples": len(samples),
            "interval_s": self.interval_s,
            "watched_s": round(self._watched_s, 1),
            "sm_clock_mhz": _range(busy, lambda s: s.sm_clock_mhz),
            "memory_clock_mhz": _range(busy, lambda s: s.memory_clock_mhz),
            "power_w": _range(busy, lambda s: s.power_w),
            "temperature_c": _range(busy, lambda s: s.temperature_c),
            "pcie_gen": _range(busy, lambda s: s.pcie_gen),
            "pcie_width": _range(busy, lambda s: s.pcie_width),
            "reasons_s": {name: s for name, s in seconds.items() if s},
            "throttled_s": round(self.interval_s * sum(bool(s.reasons & THROTTLED) for s in samples), 1),
        }


def _range(samples: Sequence[Sample], of: Callable[[Sample], float | None]) -> dict[str, float] | None:
    known = [v for s in samples if (v := of(s)) is not None]
    return {"min": min(known), "median": float(median(known)), "max": max(known)} if known else None
