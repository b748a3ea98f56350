"""Plain tables of at most 80 columns, and progress that only a terminal sees."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Sequence

WIDTH = 80
GIB = 1 << 30


def columns(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table in plain text: the first ``left`` columns flush left, the others flush right."""
    widths = [max(len(str(r[i])) for r in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        parts = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(parts).rstrip()

    return "\n".join([line(headers), "  ".join("-" * w for w in widths), *(line(r) for r in rows)])


def wrapped(text: str, indent: str = "") -> str:
    """``text`` broken to the width of a table."""
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def percent(share: float, digits: int = 1, sign: bool = False) -> str:
    """A share as a percentage."""
    return f"{100 * share:{'+' if sign else ''}.{digits}f} %"


def count(number: int, noun: str) -> str:
    """A number and what it counts: 1 step, 2 steps."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def number(value: float | None, form: str = ".0f") -> str:
    """A number as ``form`` has it; a dash where it is not known."""
    return "-" if value is None else format(value, form)


def misses(rate: float) -> str:
    """A miss rate, without a decimal where it needs none."""
    return percent(rate, 0 if round(100 * rate, 6).is_integer() else 1)


def tokens_label(tokens: int) -> str:
    """131072 as 128K; what is no whole number of 1024 in full."""
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


class Progress:
    """One line on stderr, rewritten at most ten times a second; silent where stderr is no terminal."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self._shows = sys.stderr.isatty()
        self._last = 0.0

    def step(self, count: int = 1) -> None:
        self.done += count
        now = time.monotonic()
        if self._shows and (now - self._last > 0.1 or self.done >= self.total):
            self._last = now
            print(f"\r{self.what}: {self.done} of {self.total}", end="", file=sys.stderr, flush=True)

    def to(self, done: int, total: int) -> None:
        """Say that ``done`` of ``total`` are done: for work that counts by itself."""
        self.total = total
        self.step(done - self.done)

    def close(self) -> None:
        if self._shows:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
