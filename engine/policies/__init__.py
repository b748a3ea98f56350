"""Policies by name: each a small module that turns (model, workload, configuration) into a plan."""

from __future__ import annotations

from sparda.engine.config import Config, Workload, check_fits
from sparda.engine.plan import Plan
from sparda.engine.policies import dense, infinigen, nosa, shallow, sparda, sparse
from sparda.engine.policies.base import Policy
from sparda.engine.shapes import ModelShape, SparseSpec

_MODULES = (dense, sparse, sparda, infinigen, nosa, shallow)

REGISTRY: dict[str, Policy] = {p.name: p for module in _MODULES for p in module.POLICIES}


def make_plan(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config) -> Plan:
    """The plan of one decode step. Raises SpardaError where the combination cannot be."""
    check_fits(shape, spec, workload, config)
    return REGISTRY[config.policy].plan(shape, spec, workload, config)


def resident_layers(config: Config, layers: int) -> int:
    """How many layers, from the first on, keep their whole KV cache on the GPU."""
    return REGISTRY[config.policy].resident(config, layers)


def projections(config: Config, layer: int, layers: int) -> tuple[str, ...]:
    """Selection queries that a layer's fused projection emits after Q, K and V, in order: see ``Policy.queries``."""
    return REGISTRY[config.policy].queries(config, layer, layers)


def side_data(config: Config) -> tuple[str, ...]:
    """What is kept of every token besides its key and value: see ``Policy.side``."""
    return REGISTRY[config.policy].side
