"""What a policy is: a plan, and where its KV cache lives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparda.engine.config import Config, Workload
from sparda.engine.plan import Plan
from sparda.engine.shapes import ModelShape, SparseSpec

PolicyPlan = Callable[[ModelShape, SparseSpec, Workload, Config], Plan]


@dataclass(frozen=True, slots=True)
class Policy:
    """One way of decoding.

    ``resident(config, layers)``: how many layers, from the first on, keep their whole KV cache on the GPU.
    ``queries(config, layer, layers)``: selection queries that a layer's fused projection emits after Q, K and V, one
    head per KV head each: ``forecast`` and ``proxy`` are scored against the layer ``lookahead`` ahead, ``current``
    against the layer itself.
    ``side``: what is kept of every token besides its key and value, always on the GPU: ``partial`` (InfiniGen's partial
    keys), ``bias`` (NOSA's eviction head).
    """

    name: str
    about: str
    plan: PolicyPlan
    resident: Callable[[Config, int], int]
    queries: Callable[[Config, int, int], tuple[str, ...]] = lambda config, layer, layers: ()
    side: tuple[str, ...] = ()


def first_layer(config: Config, layers: int) -> int:
    """Layer 0 only: it has no predecessor that could forecast it, so no offloading policy keeps it in host memory."""
    return 1


def every_layer(config: Config, layers: int) -> int:
    """All of them: nothing is offloaded."""
    return layers
