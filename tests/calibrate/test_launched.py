"""The table of kernels is what the engine launches: a tiny model decodes one step and every launch is written down."""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the engine's kernels need torch and triton")

import torch
from triton.runtime.interpreter import InterpretedFunction

from sparda.calibrate.launched import KERNELS, MERGE, MERGING
from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.policies import make_plan
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.tiers import Tiers
from sparda.engine.weights import random_weights
from tests.calibrate.step_events import plan_of

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter: set TRITON_INTERPRET=1"
)

SHAPE = ModelShape("tiny", layers=2, d_model=64, heads=2, kv_heads=1, head_dim=64, ffn=64, vocab=97)
SPEC = SparseSpec(block=16, kernel=8, stride=4, init_blocks=1, local_blocks=2)
ON_THE_GPU = tuple(policy for policy in POLICIES if policy != "infinigen")
KERNEL_FOLDER = Path(__file__).resolve().parents[2] / "kernels"


@pytest.fixture(scope="module")
def weights() -> object:
    return random_weights(SHAPE, "cpu", seed=1)


@pytest.mark.parametrize("policy", ON_THE_GPU)
def test_every_kind_launches_the_kernels_of_the_table(
    policy: str, weights: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []

    def write_down(kernel: InterpretedFunction, *args: object, **kwargs: object) -> None:
        launched.append(kernel.fn.__name__)

    workload, config = Workload(1, 100, 0.0), Config(policy, top_k=6, score_layer=0, refresh_steps=2, reserve=0.0)
    tiers = Tiers(SHAPE, SPEC, workload, config, "cpu", capacity=128)
    tiers.seed(3, [w.eviction for w in weights.layers])  # type: ignore[attr-defined]
    decoder = Decoder(make_plan(SHAPE, SPEC, workload, config), weights, tiers)  # type: ignore[arg-type]
    monkeypatch.setattr(InterpretedFunction, "run", write_down)
    by_kind: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    with torch.no_grad():
        for op in decoder.plan:
            launched.clear()
            decoder.bindings[op.kind](op)
            by_kind[op.kind].add(tuple(launched))
    for kind, found in by_kind.items():
        wanted = {KERNELS[kind], (*KERNELS[kind], MERGE)} if kind in MERGING else {KERNELS[kind]}
        assert found <= wanted, kind
        assert len(found) == 1, f"{kind} launches now these kernels, now others"


def test_a_kernel_of_several_streams_lets_none_start_early() -> None:
    several = set()
    for policy in ON_THE_GPU:
        for lookahead in (0, 1, 2):
            streams = defaultdict(set)
            for op in plan_of(policy, lookahead):
                for name in KERNELS[op.kind]:
                    streams[name].add(op.stream)
            several |= {name for name, of in streams.items() if len(of) > 1}
    assert several
    bodies = {
        node.name: ast.unparse(node)
        for file in KERNEL_FOLDER.glob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert all("gdc_" not in bodies[name] for name in several)
