"""What a measured step ran: workload and configuration, read back from a row's case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparda.calibrate.store import Row, Value
from sparda.engine.config import OF_SHALLOW, Config, Workload
from sparda.engine.errors import SpardaError

KNOBS = ("policy", "top_k", "lookahead", "prefetch_ctas", "prefetch_warps", "prefetch_stages", "resident_blocks")


def workload_of(row: Row) -> Workload:
    """The workload a step or validation row was measured on. Raises SpardaError where its case lacks one."""
    case = _case(row, ("batch", "context_tokens", "miss_rate"))
    return Workload(int(case["batch"]), int(case["context_tokens"]), float(case["miss_rate"]))


def config_of(row: Row) -> Config:
    """The configuration a step or validation row was measured with; knobs it does not name have their defaults."""
    case = _case(row, ("top_k",))
    numbers = {k: int(case[k]) for k in KNOBS if k != "policy" and k in case}
    numbers |= {k: int(case[k]) for k in OF_SHALLOW if k != "reserve" and k in case}
    return Config(
        policy=str(case.get("policy", "sparda")), **numbers, reserve=float(case.get("reserve", Config().reserve))
    )


def _case(row: Row, needed: Sequence[str]) -> Mapping[str, Value]:
    missing = [k for k in needed if k not in row.case]
    if missing:
        raise SpardaError(
            f"a {row.kind} row of session {row.session} lacks {', '.join(missing)}; remove the row or measure again."
        )
    return row.case
