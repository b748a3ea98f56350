"""Policies by name: each a small module that turns (model, workload, configuration) into a plan."""

from __future__ import annotations

from collections.abc import Callable

from sparda.engine.config import Config, Workload, check_fits
from sparda.engine.plan import Plan
from sparda.engine.policies import sparda, sparse
from sparda.engine.shapes import ModelShape, SparseSpec

PolicyPlan = Callable[[ModelShape, SparseSpec, Workload, Config], Plan]

PLANNERS: dict[str, PolicyPlan] = {
    "sparda": sparda.prefetched,
    "sparda-on-demand": sparda.on_demand,
    "sparse": sparse.offloaded,
    "sparse-resident": sparse.resident,
}


def make_plan(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config) -> Plan:
    """The plan of one decode step. Raises SpardaError where the combination cannot be."""
    check_fits(shape, spec, workload, config)
    return PLANNERS[config.policy](shape, spec, workload, config)


def resident_layers(config: Config, layers: int) -> int:
    """How many layers, from the first on, keep their whole KV cache on the GPU.

    Layer 0 has no predecessor that could forecast it, so it stays resident under every offloading policy (the
    baselines get what the Forecast gets); with lookahead d the first d layers do.
    """
    if config.policy == "sparse-resident":
        return layers
    if config.policy == "sparse":
        return 1
    return max(1, config.lookahead)


def projections(config: Config, layer: int, layers: int) -> tuple[str, ...]:
    """Selection queries that a layer's fused projection emits after Q, K and V, in order.

    ``forecast``: scored against the layer ``lookahead`` ahead. ``current``: scored against the layer itself,
    where no earlier layer could forecast it. Each is one head per KV head.
    """
    if config.policy.startswith("sparse"):
        return ()
    forecast = ("forecast",) if layer + config.lookahead < layers else ()
    current = ("current",) if layer < config.lookahead else ()
    return forecast + current
