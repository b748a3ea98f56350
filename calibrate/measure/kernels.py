"""Every kernel of the plan alone, over its shapes: all of a step's operations of one kind, back to back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.measure.timing import METHOD, replay_us, warm_and_captured
from sparda.calibrate.store import Value
from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.plan import Op

REPEATS = 12
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64)

BY_BATCH = (
    "embed",
    "norm",
    "qkv",
    "append",
    "oproj",
    "ffn_norm",
    "gateup",
    "down",
    "final_norm",
    "lm_head",
    "sample",
    "writeback",
)
"""Kinds whose work depends on the batch alone."""

BY_CONTEXT = {"sparda": ("score", "select"), "sparse": ("headscore",)}
"""Kinds whose work grows with the context too, by the policy that has them."""

BY_TOP_K = ("attention",)

CONTEXTS = (16384, 32768, 65536, 131072)
TOP_KS = (64, 96, 128)
CONTEXT_BATCHES = (1, 4, 16, 32, 64)


def chain(decoder: Decoder, kind: str) -> tuple[Callable[[], None], list[Op]]:
    """A body that issues every operation of ``kind`` in the decoder's plan, and those operations.

    Layers follow each other, so weights and KV come from memory and not from the L2 cache, as in a step.
    """
    ops = decoder.plan.of_kind(kind)
    binding = decoder.bindings[kind]

    def body() -> None:
        for op in ops:
            binding(op)
        if kind == "select":
            # Without a new step the second replay would find every chosen block resident, and the miss lists of
            # many replays would pile up. Two tiny kernels for all layers' selects.
            decoder.tiers.step.add_(1)
            decoder.tiers.miss_count.zero_()

    return body, ops


def _cases() -> Iterator[tuple[Workload, Config, tuple[str, ...], str]]:
    for batch in BATCHES:
        yield Workload(batch, 32768, 0.06), Config(), BY_BATCH, ""
    for context in CONTEXTS:
        for batch in CONTEXT_BATCHES:
            workload = Workload(batch, context, 0.06)
            for policy, kinds in BY_CONTEXT.items():
                yield workload, Config(policy=policy), kinds, "context_tokens"
    for top_k in TOP_KS:
        for batch in BATCHES:
            yield Workload(batch, 32768, 0.06), Config(top_k=top_k), BY_TOP_K, "top_k"


def measure_kernels(bench: Bench) -> None:
    """Rows of kind ``kernel``: microseconds per operation, launch gap inside a CUDA graph included."""
    for workload, config, kinds, second in _cases():
        case: dict[str, Value] = {"batch": workload.batch}
        if second:
            case[second] = workload.context_tokens if second == "context_tokens" else config.top_k
        missing = [k for k in kinds if not bench.measured("kernel", k, case)]
        if not missing:
            continue
        bench.clock.check()
        decoder = bench.decoder(workload, config)
        decoder.issue()
        for kind in missing:
            body, ops = chain(decoder, kind)
            samples = replay_us(warm_and_captured(body), REPEATS, per=len(ops))
            work = ops[-1].work
            values = {"flops": float(work.flops), "hbm_bytes": float(work.hbm_bytes)}
            bench.keep(bench.row("kernel", kind, case, samples, METHOD, values))
    _graph_costs(bench)


def _graph_costs(bench: Bench) -> None:
    """Tiny kernels in a graph, one alone and a hundred in a row: what a graph costs beyond its kernels."""
    x = torch.zeros(32, device=bench.device)

    def single() -> None:
        x.add_(1.0)

    def serial() -> None:
        for _ in range(100):
            x.add_(1.0)

    for name, body, per in (("graph", single, 1), ("serial", serial, 100)):
        if not bench.measured("kernel", name, {"batch": 1}):
            samples = replay_us(warm_and_captured(body), 20, per=per)
            bench.keep(bench.row("kernel", name, {"batch": 1}, samples, METHOD))
