"""A machine with simple costs and a profile folder with rows, for searching and commanding without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from sparda.calibrate import profile as profile_module
from sparda.calibrate.judged import ErrorBand
from sparda.calibrate.leave_one_out import CopyErrors, CorunErrors, Duel, Errors, KernelErrors, LeftOut
from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Row, Store
from sparda.engine.config import Config, Workload
from sparda.engine.plan import Op, Plan
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, SparseSpec
from sparda.explore.predict import Predictor
from sparda.explore.scenario import Grid, Scenario
from sparda.sim.costs import Machine
from sparda.sim.player import play

GIB = 1 << 30
MACHINE = Machine("fake", "NVIDIA Fake $1", 132, 4000.0, 50.0, 50.0, 141 * GIB, 160 * GIB)
MODEL = "minicpm4.1-8b"
NONE = LeftOut(0, None, None, None)
ERRORS = Errors(
    {"down": KernelErrors(LeftOut(6, 0.011, 0.032, 0.002), NONE, Duel(0.011, 0.054, "table"))},
    {"down": CorunErrors(LeftOut(4, 0.023, 0.21, 0.013), NONE, LeftOut(4, 0.017, 0.14, None), NONE)},
    (CopyErrors(8, LeftOut(8, 0.003, 0.051, 0.004), Duel(0.003, 0.02, "table")),),
)


@dataclass(frozen=True, slots=True)
class FakeCosts:
    """HBM time at 4 TB/s plus 1.5 us; each prefetch CTA slows compute by half a percent and moves 25 GB/s."""

    machine: Machine = MACHINE

    def alone_ns(self, op: Op, plan: Plan) -> float:
        return 1500 + op.work.hbm_bytes / 4000.0

    def slowdown(self, op: Op, plan: Plan, ctas: int) -> float:
        return 1 + 0.005 * ctas

    def transfer_start_ns(self, plan: Plan) -> float:
        return 1000.0

    def transfer_gb_s(self, plan: Plan, ctas: int) -> float:
        return min(50.0, 25.0 * ctas)

    def transfer_share(self, op: Op, plan: Plan, ctas: int) -> float:
        return 1.0

    def places(self, op: Op, plan: Plan) -> int | None:
        return None

    def issue_ns(self, op: Op, plan: Plan) -> float:
        return 6000.0

    def join_ns(self, op: Op, plan: Plan) -> float:
        return 800.0

    def step_ns(self, plan: Plan) -> float:
        return 5000.0


def step_us(workload: Workload, config: Config) -> float:
    return play(make_plan(MODELS[MODEL], SparseSpec(), workload, config), FakeCosts()).step_us


def case_of(workload: Workload, config: Config) -> dict[str, float | int | str | bool]:
    return {
        "batch": workload.batch,
        "context_tokens": workload.context_tokens,
        "miss_rate": workload.miss_rate,
        "policy": config.policy,
        "top_k": config.top_k,
        "lookahead": config.lookahead,
        "prefetch_ctas": config.prefetch_ctas,
        "prefetch_warps": config.prefetch_warps,
        "prefetch_stages": config.prefetch_stages,
    }


def measured_row(kind: str, workload: Workload, config: Config, us: float, session: str = "s1") -> Row:
    return Row(kind, "step", session, "graph", case_of(workload, config), (us * 0.99, us, us * 1.01))


def link_row(ctas: int, case: str, gb_s: float, warps: int = 1) -> Row:
    conditions = {"ctas": ctas, "warps": warps, "stages": 8, "chunk_bytes": 4096, "case": case}
    return Row("link", "prefetch", "s1", "events", cast(Any, conditions), (10.0, 11.0, 12.0), {"gb_s": gb_s})


@pytest.fixture
def row() -> Callable[..., Row]:
    return measured_row


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A profile's folder: link rows, and step rows that are 2 % slower than simulated."""
    store = Store(tmp_path / "fake.measured")
    store.add_session("s1", {"gpu": "NVIDIA Fake $1", "driver": "1"})
    store.append(
        "link", [link_row(16, "all_miss", 50.0), link_row(2, "all_miss", 40.0), link_row(2, "all_miss", 48.0, 2)]
    )
    store.append("link", [link_row(2, "miss15_b16", 44.0)])
    steps = [(Workload(b, 131072, m), Config()) for b, m in ((4, 0.06), (16, 0.06), (64, 0.03))]
    store.append("steps", [measured_row("step", w, c, step_us(w, c) * 1.02) for w, c in steps])
    (store.folder / "profile.json").write_text(json.dumps({"schema": 1}))
    return store.folder


@pytest.fixture
def profile(folder: Path) -> Profile:
    return Profile(
        name="fake.measured",
        tier="measured",
        machine=FakeCosts().machine,
        model=MODEL,
        band=ErrorBand(count=3, median=0.02, p90=0.05, p95=0.06, worst=0.08, bias=-0.02, spread=0.01),
        errors=ERRORS,
        envelope={"batch": (1, 64), "context_tokens": (32768, 131072), "prefetch_ctas": (1, 32)},
        sessions=("s1",),
        costs=cast(Any, FakeCosts()),
        folder=folder,
    )


@pytest.fixture
def shipped(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """The fake profile, under its name, for the command line; every other name is looked up as usual."""
    known = profile_module.load_profile

    def load(name: str) -> Profile:
        return profile if name in (profile.name, "h200-sxm.measured") else known(name)

    monkeypatch.setattr(profile_module, "load_profile", load)
    return profile


@pytest.fixture
def small() -> Scenario:
    grid = Grid(context_tokens=(32768,), batch=(4, 16), miss_rate=(0.06,), prefetch_ctas=(1, 2, 4, 16, 32))
    return replace(Scenario(), grid=grid)


@pytest.fixture
def predictor(profile: Profile, small: Scenario) -> Predictor:
    return Predictor.of(profile, small)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in, with a tiny model and token files, on a machine with torch and no GPU."""
    torch = pytest.importorskip("torch", reason="the engine needs torch")
    from tests.explore.tiny_checkpoint import prepare

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    return tmp_path
