"""Costs carried over from the measured model's shape to another's on the same GPU: explicit rules, as for machines.

1. Kernels over KV heads (attention, scoring, choosing) know (sequence, KV head) pairs, not sequences: a model of four
   times the KV heads takes at a quarter of the batch what the measured one takes.
2. Of a kernel's time, what its bytes take at HBM's rate changes with its bytes; the rest (launch, latency, the ends of
   pipelines) stays.
3. Linears take as many turns as their own thread blocks make (``calibrate.waves``).
4. What a copy does to the kernels beside it, and they to it, stays as it is in shares: at the same batch, or for
   kernels of rule 1 at the same number of pairs.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from sparda.calibrate.costs import Beside, FittedCosts, KernelCost
from sparda.calibrate.fit_kernels import HOLDS
from sparda.calibrate.profile import Profile
from sparda.calibrate.transfer import as_what_if
from sparda.calibrate.waves import LINEARS, linear_ns
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.policies import make_plan
from sparda.engine.shapes import ModelShape, SparseSpec, model_named
from sparda.sim.costs import Machine

BY_PAIRS = (
    "attention", "biased_attention", "dense_attention", "score", "headscore", "select", "shortlist",
    "partial_query", "partial_score", "partial_keys", "report", "bias",
)  # fmt: skip
"""Kinds whose work is that of (sequence, KV head) pairs."""

RULES = (
    "attention, scoring and choosing go by (sequence, KV head) pairs",
    "of a kernel's time, the bytes' part changes with its bytes and the rest stays",
    "linears take as many turns as their own thread blocks make",
    "compute and copies slow each other as on the measured model",
)

_ANY_LENGTH = 1 << 22
_USUAL = Config()


def reshaped(costs: FittedCosts, measured: ModelShape, shape: ModelShape) -> FittedCosts:
    """``costs`` of decoding ``measured``, made those of decoding ``shape`` on the same machine."""
    fitted = costs.fitted
    pairs = measured.kv_heads / shape.kv_heads

    def beside(rows: tuple[Beside, ...], kind: str) -> tuple[Beside, ...]:
        return tuple(replace(b, batch=b.batch * pairs) for b in rows) if kind in BY_PAIRS else rows

    kernels = {}
    for kind, cost in fitted.kernels.items():
        # A model of two layers has no layer to share a choice with: no policy can ask it for such a kernel.
        with suppress(SpardaError):
            kernels[kind] = _kernel(kind, cost, costs.machine, measured, shape)
    made = replace(
        fitted,
        kernels=kernels,
        beside={kind: beside(rows, kind) for kind, rows in fitted.beside.items()},
        in_order=beside(fitted.in_order, "attention"),
        # What attention loses to the choosing beside it, both of rule 1.
        lanes=tuple((batch * pairs, ns) for batch, ns in fitted.lanes),
    )
    return FittedCosts(costs.machine, made)


def _kernel(kind: str, cost: KernelCost, machine: Machine, old: ModelShape, new: ModelShape) -> KernelCost:
    paired = kind in BY_PAIRS
    # As many pairs in either model, so that a table's point keeps its meaning.
    then, now = (new.kv_heads, old.kv_heads) if paired else (1, 1)

    def line(batch: float, ns: tuple[float, ...], moved: tuple[float, ...]) -> list[tuple[float, float]]:
        found = []
        for second, t, b in zip(cost.seconds, ns, moved, strict=True):
            scale = 1 if paired else int(batch)
            ratio = _bytes(kind, new, scale * now, cost.second, second) / _bytes(
                kind, old, scale * then, cost.second, second
            )
            if kind in LINEARS:
                turns = linear_ns(kind, scale, new, machine) - linear_ns(kind, scale, old, machine)
                found.append((max(t * min(1.0, ratio), t + turns), b * ratio))
            else:
                by_bytes = min(t, b / machine.hbm_gb_s)
                found.append((t + by_bytes * (ratio - 1), b * ratio))
        return found

    rows = [line(*at) for at in zip(cost.batches, cost.ns, cost.hbm_bytes, strict=True)]
    return replace(
        cost,
        batches=tuple(b * now / then for b in cost.batches),
        ns=tuple(tuple(t for t, _ in row) for row in rows),
        hbm_bytes=tuple(tuple(b for _, b in row) for row in rows),
    )


@lru_cache(maxsize=4096)
def _bytes(kind: str, shape: ModelShape, batch: int, axis: str, second: float) -> int:
    """HBM bytes of one operation of the kind, as a plan that holds it has them."""
    context = int(second) if axis == "context_tokens" else 131072
    top_k = int(second) if axis == "top_k" else _USUAL.top_k
    config = replace(_USUAL, policy=HOLDS.get(kind, _USUAL.policy), top_k=top_k)
    plan = make_plan(replace(shape, max_context=_ANY_LENGTH), SparseSpec(), Workload(batch, context), config)
    return next(op.work.hbm_bytes for op in plan if op.kind == kind)


def on_shape(base: Profile, shape: ModelShape, notes: tuple[str, ...] = ()) -> Profile:
    """``base`` decoding a model of another shape than was measured: a what-if, its band that of the rules.

    ``notes``: what a plan of that model leaves out. The batches that count as measured are those with as many
    (sequence, KV head) pairs as were measured.
    """
    measured = model_named(base.model)
    if shape == measured:
        return base
    costs = reshaped(base.costs, measured, shape)
    about = "; ".join([f"model {shape.name}, measured {measured.name}", *notes])
    made = as_what_if(base, base.name, costs, about, base.judged.by_shape)
    low, high = base.envelope.get("batch", (1.0, 1.0))
    most = max(1.0, min(high, high * measured.kv_heads / shape.kv_heads))
    return replace(made, model=shape.name, envelope={**base.envelope, "batch": (low, most)})
