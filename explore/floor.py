"""The time that no step can beat: its bytes at the best rate ever measured, of the GPU's memory or of the link."""

from __future__ import annotations

from dataclasses import dataclass

from sparda.engine.config import Config, Workload
from sparda.engine.policies import make_plan, resident_layers
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.sim.costs import Machine


@dataclass(frozen=True, slots=True)
class Floor:
    """Microseconds that a step's bytes take on each resource with it to themselves; the two may overlap."""

    hbm_us: float
    link_us: float

    @property
    def us(self) -> float:
        return max(self.hbm_us, self.link_us)


def floor_of(
    shape: ModelShape,
    spec: SparseSpec,
    workload: Workload,
    config: Config,
    machine: Machine,
    misses_per_layer: float | None = None,
) -> Floor:
    """The floor of one step: its plan's GPU memory bytes, and the blocks that it fetches.

    ``misses_per_layer``: blocks fetched per offloaded layer, as counted; without it those that the workload states.
    Raises SpardaError where the combination cannot be.
    """
    plan = make_plan(shape, spec, workload, config)
    hbm_bytes = sum(op.work.hbm_bytes for op in plan)
    link_bytes = float(sum(op.work.h2d_bytes for op in plan))
    if misses_per_layer is not None:
        offloaded = shape.layers - resident_layers(config, shape.layers)
        link_bytes = misses_per_layer * offloaded * shape.block_bytes(spec)
    # GB/s are thousands of bytes a microsecond.
    return Floor(hbm_bytes / machine.hbm_gb_s / 1e3, link_bytes / machine.link_h2d_gb_s / 1e3)
