"""NOSA: a query-agnostic eviction head beside the query's own choice, so that most chosen blocks rarely change.

Every token has a bias per KV head, from its value alone. The query names a share of the blocks by its scores (as
``sparse``); the others are those of the highest biases. The bias also counts in the attention.
"""

from __future__ import annotations

from sparda.engine.config import Config, Workload
from sparda.engine.plan import MAIN, Plan
from sparda.engine.policies.base import Policy, first_layer
from sparda.engine.policies.common import StepBuilder
from sparda.engine.shapes import ModelShape, SparseSpec

BY_QUERY, OF_FREE = 23, 78
"""Blocks that the query chooses of those that are not forced: the published split of 96 = 18 forced + 23 + 55."""


def by_query(config: Config, spec: SparseSpec) -> int:
    """Blocks that the query names, forced ones included; 41 of 96 where 18 are forced, as published."""
    forced = min(spec.forced, config.top_k)
    return forced + round((config.top_k - forced) * BY_QUERY / OF_FREE)


def plan(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config) -> Plan:
    """KV in host memory, missing blocks fetched by the main stream before the attention. Layer 0 is resident."""
    step = StepBuilder(shape, spec, workload, config)
    sizes, add = step.sizes, step.ops.add
    step.prologue()
    for layer in range(shape.layers):
        appended = step.project(layer, queries=0)
        add("bias", sizes.bias(), layer=layer, after=[appended])
        add("headscore", sizes.headscore(), layer=layer)
        add("shortlist", sizes.shortlist(), layer=layer)
        ready = add("select", sizes.select(), layer=layer)
        if layer > 0:
            ready = step.fetch(layer, MAIN, step.report(layer, MAIN, ready))
        step.attend(layer, [ready], "biased_attention")
    return step.epilogue(shape.layers - 1)


POLICIES = (
    Policy(
        "nosa",
        "the query and an eviction head choose together, fetched on demand, biased attention",
        plan,
        first_layer,
        side=("bias",),
    ),
)
