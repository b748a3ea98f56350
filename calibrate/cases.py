"""What a measured step ran: workload and configuration, read back from a row's case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from sparda.calibrate.store import Row, Value
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read


def workload_of(row: Row) -> Workload:
    """The workload a step or validation row was measured on. Raises SpardaError where its case lacks one."""
    case = _case(row, ("batch", "context_tokens", "miss_rate"))
    return Workload(int(case["batch"]), int(case["context_tokens"]), float(case["miss_rate"]))


def config_of(row: Row) -> Config:
    """The configuration a step or validation row was measured with; knobs it does not name have their defaults."""
    case = _case(row, ("top_k",))
    named = {f.name: case[f.name] for f in fields(Config) if f.name in case}
    return read(Config, named, where=f"a {row.kind} row of session {row.session}")


def _case(row: Row, needed: Sequence[str]) -> Mapping[str, Value]:
    missing = [k for k in needed if k not in row.case]
    if missing:
        raise SpardaError(
            f"a {row.kind} row of session {row.session} lacks {', '.join(missing)}; remove the row or measure again."
        )
    return row.case
