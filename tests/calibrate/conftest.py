"""The measurements of a machine that is not: times by simple formulas, over a small grid of cases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from sparda.calibrate.costs import FittedCosts
from sparda.calibrate.fit import fit
from sparda.calibrate.store import Row, Store, Value
from sparda.engine.config import Config, Workload
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, SparseSpec

MODEL = MODELS["minicpm4.1-8b"]
SPEC = SparseSpec()
BATCHES, CONTEXTS, TOP_KS = (1, 16, 64), (16384, 131072), (64, 128)
CTAS, SHAPES = (1, 2, 4, 8, 16, 32), ((1, 4), (1, 8), (1, 12), (8, 1))
ONCE_A_STEP = ("embed", "final_norm", "lm_head", "sample", "writeback")
BY_LAYER = ("norm", "qkv", "append", "oproj", "ffn_norm", "gateup", "down")
BESIDE = ("norm", "qkv", "attention", "down", "score")
START_US, BLOCK_BYTES = 3.0, 32768
GRAPH_US = {"graph": 20.0, "serial": 1.0}
LANES_US = {1: 1.0, 64: 4.0}
LAUNCH_US = 6.0
GPU: dict[str, object] = {
    "gpu": "NVIDIA None",
    "sms": 132,
    "gpu_memory_bytes": 141 << 30,
    "host_memory_bytes": 200 << 30,
    "model": MODEL.name,
}


def row(
    kind: str, op: str, case: dict[str, Value], us: float, values: dict[str, float] | None = None, session: str = "s1"
) -> Row:
    return Row(kind, op, session, "made up", case, (us * 0.99, us, us * 1.02), values or {})


def kernel_us(kind: str, batch: int, context: int = 32768, top_k: int = 96) -> float:
    """A microsecond and a half, and the bytes of the kind's heaviest operation at 4 TB/s."""
    config = Config("sparse" if kind == "headscore" else "sparda", top_k=top_k)
    ops = make_plan(MODEL, SPEC, Workload(batch, context, 0.0), config).of_kind(kind)
    return round(1.5 + max(op.work.hbm_bytes for op in ops) / 4e6, 3)


def kernel_rows() -> Iterator[Row]:
    for batch in BATCHES:
        for kind in ONCE_A_STEP + BY_LAYER:
            yield row("kernel", kind, {"batch": batch}, kernel_us(kind, batch))
        for kind in ("score", "select", "headscore"):
            for context in CONTEXTS:
                case: dict[str, Value] = {"batch": batch, "context_tokens": context}
                yield row("kernel", kind, case, kernel_us(kind, batch, context))
        for top_k in TOP_KS:
            us = kernel_us("attention", batch, top_k=top_k)
            yield row("kernel", "attention", {"batch": batch, "top_k": top_k}, us)
    for name, us in GRAPH_US.items():
        yield row("kernel", name, {"batch": 1}, us)


def rate(ctas: int, stages: int) -> float:
    """GB/s of a copy alone: in proportion to its CTAs until the link is full."""
    return min(50.0, {1: 5.0, 4: 10.0, 8: 15.0, 12: 20.0}[stages] * ctas)


def link_rows() -> Iterator[Row]:
    for warps, stages in SHAPES:
        lists = {"all_miss": 3072, **({"none": 0, "miss15_b16": 461} if stages == 8 else {})}
        for ctas in CTAS:
            for name, blocks in lists.items():
                us = START_US + blocks * BLOCK_BYTES / rate(ctas, stages) / 1e3
                shape = {"ctas": ctas, "warps": warps, "stages": stages, "chunk_bytes": 16384}
                values = {"gb_s": blocks * BLOCK_BYTES / us / 1e3} if blocks else {}
                yield row("link", "prefetch", {"case": name, "blocks": blocks, **shape}, us, values)
    for direction, gb_s in (("h2d", 54.0), ("d2h", 52.0)):
        yield row("link", "copy_engine", {"direction": direction, "mib": 512}, 10_000.0, {"gb_s": gb_s})


def corun_rows() -> Iterator[Row]:
    """Each CTA beside it slows an operation by half a percent; the copy keeps nine tenths of its rate."""
    for kind in BESIDE:
        for batch in (1, 64):
            for warps, stages in SHAPES:
                for ctas in CTAS:
                    case = {"batch": batch, "ctas": ctas, "warps": warps, "stages": stages, "chunk_bytes": 16384}
                    slow = 1 + 0.005 * ctas
                    moved = 45e6
                    copy_us = START_US + moved / (0.9 * rate(ctas, stages)) / 1e3
                    values = {"alone_us": 10.0, "copy_us": copy_us, "copy_bytes": moved, "slowdown": slow}
                    yield row("corun", kind, dict(case), 10.0 * slow, values)
    for batch, lost in LANES_US.items():
        yield row("corun", "lanes", {"batch": batch}, 100.0 + lost, {"alone_us": 100.0})
        yield row("corun", "launches", {"batch": batch}, 100.0 + LAUNCH_US, {"alone_us": 100.0})


def step_row(workload: Workload, config: Config, us: float) -> Row:
    return row("step", config.policy, {**asdict(workload), **asdict(config)}, us)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Everything but whole steps."""
    return filled(tmp_path)


@pytest.fixture(scope="session")
def costs(tmp_path_factory: pytest.TempPathFactory) -> FittedCosts:
    """What is fitted to the rows of ``store``."""
    return fit("none", filled(tmp_path_factory.mktemp("costs")), MODEL, SPEC)


def filled(folder: Path) -> Store:
    """A store in ``folder`` with every row but those of whole steps."""
    made = Store(folder / "none.measured")
    made.add_session("s1", GPU)
    made.append("kernel", kernel_rows())
    made.append("link", link_rows())
    made.append("corun", corun_rows())
    return made
