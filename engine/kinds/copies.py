"""Moving blocks between host memory and the GPU."""

from __future__ import annotations

from collections.abc import Mapping

from sparda.engine.lanes import Binding
from sparda.engine.plan import Op
from sparda.engine.run import Run, layer_of
from sparda.kernels.prefetch import prefetch
from sparda.kernels.writeback import write_newest

KINDS = ("prefetch", "writeback")


def bind(run: Run) -> Mapping[str, Binding]:
    """Bindings of the copies between host memory and slots."""
    c, t = run.plan.config, run.tiers

    def fetch(op: Op) -> None:
        layer = layer_of(op)
        prefetch(
            t.pool,
            t.layers[layer].rows,
            run.miss_src[layer],
            run.miss_dst[layer],
            t.miss_count[layer : layer + 1],
            ctas=c.prefetch_ctas,
            warps=c.prefetch_warps,
            stages=c.prefetch_stages,
        )

    def write(op: Op) -> None:
        write_newest(t.slot_cache, t.slot_of_block[t.whole :], t.positions, t.pool, block=run.plan.spec.block)

    return {"prefetch": fetch, "writeback": write}
