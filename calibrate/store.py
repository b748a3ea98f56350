"""Measurement rows: raw samples with the method and the session they came from, one JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeVar

from sparda.engine.errors import SpardaError

Value = float | int | str | bool

Key = TypeVar("Key")

KINDS = (
    "link",
    "kernel",
    "corun",
    "step",
    "validation",
    "policy",
    "residency",
    "parity",
    "handicap",
    "training",
    "trace",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case.

    ``kind`` says what was measured (one of KINDS), ``op`` the operation's kind where there is one, ``case`` the
    conditions, ``samples_us`` every repeat in microseconds, ``values`` what else was read off (GB/s, misses...),
    ``method`` how it was timed, ``session`` the key into the store's provenance.
    """

    kind: str
    op: str
    session: str
    method: str
    case: Mapping[str, Value]
    samples_us: tuple[float, ...]
    values: Mapping[str, float] = field(default_factory=dict)
    complete: bool = True

    @property
    def us(self) -> float:
        """Median of the samples, microseconds."""
        return median(self.samples_us)

    @property
    def spread(self) -> float:
        """Half the distance between the 10th and 90th percentile, as a share of the median."""
        ordered = sorted(self.samples_us)
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        return (high - low) / 2 / self.us if self.us else 0.0

    @property
    def throttled(self) -> bool:
        """Whether heat, a slowdown or the power brake held the GPU's clocks down while this was measured."""
        return bool(self.values.get("throttled"))

    @property
    def key(self) -> str:
        """Identity of the case, whatever session measured it: what resuming and comparing go by."""
        return case_key(self.kind, self.op, self.case)

    def number(self, name: str) -> float:
        """A condition as a number; 0 where the case has none of that name."""
        value = self.case.get(name, 0)
        return float(value) if not isinstance(value, str) else 0.0

    def to_json(self) -> str:
        record = {
            "kind": self.kind,
            "op": self.op,
            "session": self.session,
            "method": self.method,
            "case": dict(self.case),
            "samples_us": [round(s, 3) for s in self.samples_us],
            "values": {k: round(v, 6) for k, v in self.values.items()},
            "complete": self.complete,
        }
        return json.dumps(record)


def case_key(kind: str, op: str, case: Mapping[str, Value]) -> str:
    """The key of the row that measuring this case leaves."""
    return json.dumps([kind, op, dict(sorted(case.items()))])


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Rows by ``key``, in the order they come."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _row(record: Mapping[str, object], where: str) -> Row:
    try:
        if not record["samples_us"]:
            raise ValueError("samples_us is empty")
        return Row(
            kind=str(record["kind"]),
            op=str(record["op"]),
            session=str(record["session"]),
            method=str(record["method"]),
            case=dict(record["case"]),  # type: ignore[call-overload]
            samples_us=tuple(float(s) for s in record["samples_us"]),  # type: ignore[attr-defined]
            values=dict(record.get("values", {})),  # type: ignore[call-overload]
            complete=bool(record.get("complete", True)),
        )
    except (KeyError, TypeError, ValueError) as e:
        raise SpardaError(f"{where}: not a measurement row ({e!r}); remove the line or measure again.") from None


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of one JSONL file. A last line cut short by an interruption is dropped; any other bad line is an error."""
    try:
        lines = path.read_text().splitlines()
    except OSError as e:
        raise SpardaError(f"cannot read measurement rows from {path}: {e.strerror}.") from None
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                return
            raise SpardaError(f"{where}: not JSON; the file is damaged, restore it or measure again.") from None
        yield _row(record, where)


def _end_last_line(path: Path) -> None:
    """Begin on a fresh line after a run that was cut inside one: what it left of a row goes, a whole row stays."""
    data = path.read_bytes()
    start = data.rfind(b"\n") + 1
    if start == len(data):
        return
    try:
        json.loads(data[start:])
    except ValueError:
        os.truncate(path, start)
    else:
        with path.open("ab") as f:
            f.write(b"\n")


class Store:
    """A folder of measurement rows: ``rows/<name>.jsonl`` and ``provenance.json`` (session -> where and how)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, kind: str | None = None) -> list[Row]:
        """All complete rows, of one kind if given; in file order, the newest session's last."""
        found: list[Row] = []
        for path in sorted((self.folder / "rows").glob("*.jsonl")):
            found += [r for r in read_rows(path) if r.complete and (kind is None or r.kind == kind)]
        return found

    def latest(self, kind: str) -> list[Row]:
        """The last row of every case; of rows measured while the GPU throttled, only where a case has no other.

        A throttled row is kept out rather than thrown away: it says how slow a hot GPU is, and where a GPU is never
        cool it is all there is. What is fitted and judged comes from here, so nothing else need know.
        """
        found: dict[str, Row] = {}
        for r in self.rows(kind):
            if not r.throttled or found.get(r.key, r).throttled:
                found[r.key] = r
        return list(found.values())

    def settled(self) -> set[str]:
        """Keys of the cases that need not be measured again.

        A case whose only row was measured while the GPU throttled is measured once more, and no oftener: a GPU that
        always throttles would otherwise never be done.
        """
        return {
            key for key, rows in grouped(self.rows(), lambda r: r.key).items() if len(rows) > 1 or not rows[0].throttled
        }

    def append(self, name: str, rows: Iterable[Row]) -> None:
        """Add rows to ``rows/<name>.jsonl`` at once, flushed to disk: an interruption loses no finished row."""
        path = self.folder / "rows" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(r.to_json() + "\n" for r in rows)
        if path.exists():
            _end_last_line(path)
        with path.open("a") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())

    @property
    def provenance(self) -> dict[str, dict[str, object]]:
        path = self.folder / "provenance.json"
        if not path.exists():
            return {}
        try:
            data = json.loads(path.read_text())
        except json.JSONDecodeError:
            raise SpardaError(f"{path} is damaged (not JSON); restore it or measure again.") from None
        if not isinstance(data, dict) or not all(isinstance(v, dict) for v in data.values()):
            raise SpardaError(f"{path} must hold one table for each session; restore it or measure again.")
        return data

    def add_session(self, session: str, provenance: Mapping[str, object]) -> None:
        """Record where and how a session measured. Refuses to mix GPUs in one store."""
        known = self.provenance
        others = {str(p.get("gpu")) for p in known.values()}
        if others and str(provenance.get("gpu")) not in others:
            raise SpardaError(
                f"{self.folder} holds measurements of {', '.join(sorted(others))}; this GPU is "
                f"{provenance.get('gpu')}. Give a folder of its own to each GPU."
            )
        known[session] = dict(provenance)
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / "provenance.json.tmp"
        temporary.write_text(json.dumps(known, indent=1) + "\n")
        os.replace(temporary, self.folder / "provenance.json")
