"""Full attention over a KV cache that is wholly on the GPU: what every other policy is measured against."""

from __future__ import annotations

from sparda.engine.config import Config, Workload
from sparda.engine.plan import Plan
from sparda.engine.policies.base import Policy, every_layer
from sparda.engine.policies.common import StepBuilder
from sparda.engine.shapes import ModelShape, SparseSpec


def plan(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config) -> Plan:
    """Nothing is scored, chosen, fetched or written back; ``top_k`` and ``lookahead`` mean nothing here."""
    step = StepBuilder(shape, spec, workload, config)
    step.prologue()
    for layer in range(shape.layers):
        step.project(layer, queries=0)
        step.attend_densely(layer)
    return step.epilogue(offloaded_layers=0)


POLICIES = (Policy("dense", "full attention, KV cache on the GPU", plan, every_layer),)
