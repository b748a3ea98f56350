"""The parts of a step that every policy has: embedding, norms, linears, rope and append, head, sampling."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparda.engine.lanes import Binding
from sparda.engine.plan import Op
from sparda.engine.run import Run, layer_of
from sparda.kernels.advance import advance
from sparda.kernels.append import append_token
from sparda.kernels.norm import add_norm, embed_tokens, silu_mul

KINDS = (
    "embed", "norm", "qkv", "append", "oproj", "ffn_norm", "gateup", "silu", "down", "final_norm", "lm_head", "sample",
)  # fmt: skip


def bind(run: Run) -> Mapping[str, Binding]:
    """Bindings, with the buffers that only they use."""
    s, w, t, batch = run.plan.shape, run.weights, run.tiers, run.plan.workload.batch
    spec = run.plan.spec
    fused = [run.values(batch, p.shape[0]) for p in run.projections]
    gate_up, act = run.values(batch, 2 * s.ffn), run.values(batch, s.ffn)

    def norm(delta: Tensor | None, weight: Tensor) -> None:
        add_norm(run.x, delta, weight, run.h, eps=s.norm_eps)

    def append(op: Op) -> None:
        layer = layer_of(op)
        tier = t.layers[layer]
        append_token(
            fused[layer],
            run.cos,
            run.sin,
            t.positions,
            tier.slot_of_block,
            tier.cache,
            tier.keys,
            run.queries[layer],
            heads=s.heads,
            kv_heads=s.kv_heads,
            kernel=spec.kernel,
            stride=spec.stride,
        )

    def sample(op: Op) -> None:
        torch.argmax(run.logits, dim=-1, out=run.tokens)
        advance(t.positions, t.step, t.miss_count, t.miss_total)

    return {
        "embed": lambda op: embed_tokens(w.embed, run.tokens, run.x),
        "norm": lambda op: norm(run.delta if op.layer else None, w.layers[layer_of(op)].norm),
        "qkv": lambda op: _linear(run.h, run.projections[layer_of(op)], fused[layer_of(op)]),
        "append": append,
        "oproj": lambda op: _linear(run.attended.flatten(1), w.layers[layer_of(op)].output, run.delta),
        "ffn_norm": lambda op: norm(run.delta, w.layers[layer_of(op)].ffn_norm),
        "gateup": lambda op: _linear(run.h, w.layers[layer_of(op)].gate_up, gate_up),
        "silu": lambda op: silu_mul(gate_up, act),
        "down": lambda op: _linear(act, w.layers[layer_of(op)].down, run.delta),
        "final_norm": lambda op: norm(run.delta, w.final_norm),
        "lm_head": lambda op: _linear(run.h, w.head, run.logits),
        "sample": sample,
    }


def _linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.mm(x, weight.t(), out=out)
