"""InfLLM-V2 selection: every query head's softmax over the layer's compressed keys, summed over the group."""

from __future__ import annotations

from sparda.engine.config import Config, Workload
from sparda.engine.plan import MAIN, Plan
from sparda.engine.policies.base import Policy, every_layer, first_layer
from sparda.engine.policies.common import StepBuilder
from sparda.engine.shapes import ModelShape, SparseSpec


def offloaded(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config) -> Plan:
    """KV in host memory, missing blocks fetched by the main stream before the attention. Layer 0 is resident."""
    return _step(shape, spec, workload, config, resident=1)


def resident(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config) -> Plan:
    """The whole KV cache on the GPU: nothing is fetched, nothing is written back."""
    return _step(shape, spec, workload, config, resident=shape.layers)


def _step(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config, resident: int) -> Plan:
    step = StepBuilder(shape, spec, workload, config)
    step.prologue()
    for layer in range(shape.layers):
        appended = step.project(layer, queries=0)
        ready = step.choose("headscore", layer, (MAIN, MAIN), appended)
        if layer >= resident:
            ready = step.fetch(layer, MAIN, step.report(layer, MAIN, ready))
        step.attend(layer, [ready])
    return step.epilogue(shape.layers - resident)


POLICIES = (
    Policy(
        "sparse", "every query head's softmax over compressed keys chooses, fetched on demand", offloaded, first_layer
    ),
    Policy("sparse-resident", "the same choice, the whole KV cache on the GPU", resident, every_layer),
)
