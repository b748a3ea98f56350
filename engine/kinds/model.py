"""The parts of a step that every policy has: embedding, norms, linears, rope and append, head, sampling."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sparda.engine.lanes import Binding
from sparda.engine.plan import Op
from sparda.engine.run import Run, layer_of
from sparda.kernels.advance import advance
from sparda.kernels.append import append_token
from sparda.kernels.linear import linear, linear_parts, splits_of, swiglu
from sparda.kernels.norm import add_norm, embed_tokens
from sparda.kernels.sample import greedy, greedy_chunks

KINDS = (
    "embed", "norm", "qkv", "append", "oproj", "ffn_norm", "gateup", "down", "final_norm", "lm_head", "sample",
)  # fmt: skip


def bind(run: Run) -> Mapping[str, Binding]:
    """Bindings, with the buffers that only they use."""
    s, w, t, batch = run.plan.shape, run.weights, run.tiers, run.plan.workload.batch
    spec = run.plan.spec
    act = run.values(batch, s.ffn)

    def parts(rows: int, columns: int) -> Tensor:
        return run.floats(splits_of(rows, columns, run.sms), batch, rows)

    fused = {rows: parts(rows, s.d_model) for rows in {int(p.shape[0]) for p in run.projections}}
    attended, moved = parts(s.d_model, s.q_width), parts(s.d_model, s.ffn)

    def norm(added: Tensor | None, weight: Tensor) -> None:
        add_norm(run.x, added, weight, run.h, eps=s.norm_eps)

    def project(op: Op) -> None:
        weight = run.projections[layer_of(op)]
        linear_parts(run.h, weight, fused[int(weight.shape[0])])

    best = run.floats(batch, greedy_chunks(s.vocab), 2)

    def append(op: Op) -> None:
        layer = layer_of(op)
        tier = t.layers[layer]
        append_token(
            fused[int(run.projections[layer].shape[0])],
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
        greedy(run.logits, run.tokens, best)
        advance(t.positions, t.step, t.miss_count, t.miss_total)

    return {
        "embed": lambda op: embed_tokens(w.embed, run.tokens, run.x),
        "norm": lambda op: norm(moved if op.layer else None, w.layers[layer_of(op)].norm),
        "qkv": project,
        "append": append,
        "oproj": lambda op: linear_parts(run.attended.flatten(1), w.layers[layer_of(op)].output, attended),
        "ffn_norm": lambda op: norm(attended, w.layers[layer_of(op)].ffn_norm),
        "gateup": lambda op: swiglu(run.h, w.layers[layer_of(op)].gate_up, act),
        "down": lambda op: linear_parts(act, w.layers[layer_of(op)].down, moved),
        "final_norm": lambda op: norm(moved, w.final_norm),
        "lm_head": lambda op: linear(run.h, w.head, run.logits),
        "sample": sample,
    }
