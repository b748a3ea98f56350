"""On a GPU a Forecast is trained by kernels; on a CPU by their references. Both come to the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="the engine's kernels need triton: pip install 'sparda[engine]'")

import torch

from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.training.config import Student, Training
from sparda.engine.training.scorer import ScorerRows
from sparda.engine.training.trainer import Trainer
from sparda.engine.weights import LayerWeights, Weights, random_weights

pytestmark = pytest.mark.gpu

SHAPE = ModelShape(
    "small", layers=3, d_model=192, heads=6, kv_heads=2, head_dim=64, ffn=256, vocab=97, max_context=4096,
    value_bytes=4,
)  # fmt: skip
SPEC = SparseSpec(local_blocks=1)
STUDENTS = (Student(1), Student(2, heads=2), Student(1, heads=4), Student(0, begin="uniform"))


def moved(layer: LayerWeights, device: str) -> LayerWeights:
    own = {f: getattr(layer, f).to(device) for f in ("norm", "fused", "output", "ffn_norm", "gate_up", "down")}
    return LayerWeights(own["norm"], own["fused"], own["output"], own["ffn_norm"], own["gate_up"], own["down"])


def on(weights: Weights, device: str) -> Weights:
    return Weights(
        weights.shape,
        weights.embed.to(device),
        tuple(moved(layer, device) for layer in weights.layers),
        weights.final_norm.to(device),
        weights.head.to(device),
    )


def test_three_steps_lose_what_they_lose_on_a_cpu() -> None:
    weights = random_weights(SHAPE, "cpu", seed=1)
    text = torch.randint(0, SHAPE.vocab, (1500,), generator=torch.Generator().manual_seed(2))
    training = Training(steps=3, batch=1, learning_rate=2e-3, top_k=12)
    logs = []
    for device in ("cpu", "cuda"):
        own = on(weights, device)
        scorer = ScorerRows.begun(own, SPEC, 1, training.top_k)
        trainer = Trainer(own, SPEC, training, STUDENTS, [text, text[:900], text.flip(0)], scorer=scorer)
        trainer.run()
        logs.append([step.losses for step in trainer.log])
    for cpu, gpu in zip(*logs, strict=True):
        assert gpu == pytest.approx(cpu, rel=5e-3)


def test_a_long_sequence_takes_memory_in_proportion_to_its_length() -> None:
    weights = random_weights(replace(SHAPE, max_context=1 << 17, value_bytes=2), "cuda", seed=1)
    peaks = []
    for length in (32768, 65536):
        text = torch.randint(0, SHAPE.vocab, (length,))
        trainer = Trainer(weights, SPEC, Training(steps=1, batch=1, top_k=96), (Student(),), [text])
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.run()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # A matrix of queries by compressed keys would quadruple, one of 16 GiB at that.
    assert peaks[1] < 2.5 * peaks[0]
