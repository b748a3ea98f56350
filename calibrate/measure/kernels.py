"""Every kernel of the plan, over its shapes: what it adds behind the kernel that precedes it in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

import torch

from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.measure.parts import Case
from sparda.calibrate.measure.timing import METHOD, replay_us, warm_and_captured
from sparda.calibrate.store import Value
from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.lanes import forked, launch
from sparda.engine.plan import MAIN, Op, Plan
from sparda.engine.shapes import ModelShape

BEHIND = f"{METHOD}: each operation behind the one before it in a step, less that one alone"
REPEATS = 12
LEAST_OPS = 8
"""Operations to time at the least: of some kinds a step has one, which alone in a graph is less than the graph."""

LEAST_US = 0.01
"""What an operation is taken to add at the least, where noise says nothing or less."""

BATCHES = (1, 2, 4, 8, 16, 32, 48, 64)

BY_BATCH = (
    "norm",
    "qkv",
    "append",
    "oproj",
    "ffn_norm",
    "gateup",
    "down",
    "final_norm",
    "lm_head",
    "writeback",
    "embed",
    "sample",
)
"""Kinds whose work depends on the batch alone; last those that move every sequence on by a token."""

ALSO_BY_BATCH = {"nosa": ("bias",), "infinigen": ("partial_query", "partial_keys", "report")}
"""The same of other policies, by the policy that has them."""

BY_CONTEXT = {"sparda": ("score", "select"), "sparse": ("headscore",)}
"""Kinds whose work grows with the context too, by the policy that has them."""

ALSO_BY_CONTEXT = {"nosa": ("shortlist",), "infinigen": ("partial_score",), "shallow": ("shallow_score",)}
"""The same of policies that no search turns: fewer points."""

BY_TOP_K = {"sparda": ("attention",), "nosa": ("biased_attention",)}

CONTEXTS = (16384, 32768, 65536, 131072)
FEWER_CONTEXTS = (8192, 32768, 131072)
TOP_KS = (64, 96, 128)
CONTEXT_BATCHES = (1, 4, 16, 32, 64)
FEWER_BATCHES = (1, 4, 16, 64)

THIN = 4
"""Layers of the model that attends to whole contexts: of all layers, long contexts of many sequences fit no GPU."""


def chain(decoder: Decoder, kind: str) -> tuple[Callable[[], None], list[Op]]:
    """A body that issues every operation of ``kind`` in the decoder's plan, and those operations.

    Layers follow each other, so weights and KV come from memory and not from the L2 cache, as in a step.
    """
    ops = decoder.plan.of_kind(kind)
    return body_of(decoder, ops, kind), ops


def behind(decoder: Decoder, kind: str) -> tuple[Callable[[], None], Callable[[], None], list[Op]]:
    """Two bodies, and the operations by which they differ: every operation of ``kind`` behind the one that precedes it
    in a step, and those that precede alone.

    The difference in time is what the operation adds to a step: it finds in the L2 cache what its predecessor leaves
    there, and starts while that one ends if it does so in a step.
    """
    plan = decoder.plan
    ops = plan.of_kind(kind)
    ops *= max(1, LEAST_OPS // len(ops))
    before = [_previous(plan, op) for op in ops]
    pairs = [op for pair in zip(before, ops, strict=True) for op in pair]
    return body_of(decoder, pairs, kind), body_of(decoder, before, kind), ops


def _previous(plan: Plan, op: Op) -> Op:
    """The operation that ends last before ``op`` starts: the one before it on its stream, or the one it awaits."""
    if op.stream != MAIN and op.after:
        return plan.ops[op.after[-1]]
    same = [o for o in plan if o.stream == op.stream]
    return same[same.index(op) - 1]


def body_of(decoder: Decoder, ops: list[Op], kind: str = "") -> Callable[[], None]:
    """A body that issues ``ops`` in order, on one stream, each apart from the one before it where it is in a step.

    ``kind`` "select" also moves the step on.
    """
    alone, bindings = forked(decoder.plan), decoder.bindings

    def body() -> None:
        for op in ops:
            launch(op, bindings, alone)
        if kind == "select":
            # Without a new step the second replay would find every chosen block resident, and the miss lists of
            # many replays would pile up. Two tiny kernels for all layers' selects.
            decoder.tiers.step.add_(1)
            decoder.tiers.miss_count.zero_()

    return body


GRAPHS = ("graph", "serial")


def _setups() -> Iterator[tuple[Workload, Config, tuple[str, ...], str]]:
    """Each step that is set up, the kinds that are timed in it, and the axis besides the batch."""
    for batch in BATCHES:
        yield Workload(batch, 32768, 0.06), Config(), BY_BATCH, ""
    for context in CONTEXTS:
        for batch in CONTEXT_BATCHES:
            workload = Workload(batch, context, 0.06)
            for policy, kinds in BY_CONTEXT.items():
                yield workload, Config(policy=policy), kinds, "context_tokens"
    for top_k in TOP_KS:
        for batch in BATCHES:
            yield Workload(batch, 32768, 0.06), Config(top_k=top_k), BY_TOP_K["sparda"], "top_k"
    yield from _other_policies()


def _other_policies() -> Iterator[tuple[Workload, Config, tuple[str, ...], str]]:
    for batch in FEWER_BATCHES:
        for policy, kinds in ALSO_BY_BATCH.items():
            yield Workload(batch, 32768, 0.03), Config(policy=policy), kinds, ""
        for top_k in TOP_KS:
            yield Workload(batch, 32768, 0.03), Config(policy="nosa", top_k=top_k), BY_TOP_K["nosa"], "top_k"
        for context in FEWER_CONTEXTS:
            for policy, kinds in ALSO_BY_CONTEXT.items():
                yield Workload(batch, context, 0.03), Config(policy=policy), kinds, "context_tokens"


def _whole_contexts() -> Iterator[tuple[Workload, Config, tuple[str, ...], str]]:
    for batch in FEWER_BATCHES:
        for context in FEWER_CONTEXTS:
            yield Workload(batch, context, 0.0), Config(policy="dense"), ("dense_attention",), "context_tokens"


def _of(
    layers: int, workload: Workload, config: Config, kinds: tuple[str, ...], second: str, *, thin: bool = False
) -> list[Case]:
    """The cases of one step that is set up, of a model of so many layers."""
    case: dict[str, Value] = {"batch": workload.batch}
    if second:
        case[second] = workload.context_tokens if second == "context_tokens" else config.top_k
    # A model of few layers scores in one of them all the same.
    config = replace(config, score_layer=min(config.score_layer, layers - 2))
    return [Case("kernel", kind, case, workload, config, THIN if thin else None) for kind in kinds]


def _graph_case(name: str) -> Case:
    return Case("kernel", name, {"batch": 1})


def cases(shape: ModelShape) -> Iterator[Case]:
    """Every row of this part."""
    for setup in _setups():
        yield from _of(shape.layers, *setup)
    yield from map(_graph_case, GRAPHS)
    for setup in _whole_contexts():
        yield from _of(THIN, *setup, thin=True)


def measure_kernels(bench: Bench) -> None:
    """Rows of kind ``kernel``: microseconds that an operation adds behind the one that precedes it in a step."""
    for setup in _setups():
        _measure(bench, _of(bench.shape.layers, *setup))
    _graph_costs(bench)
    whole = [_of(THIN, *setup, thin=True) for setup in _whole_contexts()]
    if any(not bench.measured(c.kind, c.op, c.conditions) for of_step in whole for c in of_step):
        thin = bench.thin(THIN)
        for of_step in whole:
            _measure(thin, of_step)


def _measure(bench: Bench, of_step: list[Case]) -> None:
    """What is missing of the cases of one step."""
    missing = [c for c in of_step if not bench.measured(c.kind, c.op, c.conditions)]
    if not missing or not bench.due(missing[0]):
        return
    workload, config = missing[0].workload, missing[0].config
    assert workload is not None
    assert config is not None
    decoder = bench.decoder(workload, config)
    decoder.issue()
    for case in missing:
        if case.op == "shallow_score":
            samples, ops = _refreshing(decoder, config.refresh_steps)
        else:
            samples, ops = _added(decoder, case.op)
        work = ops[-1].work
        values = {"flops": float(work.flops), "hbm_bytes": float(work.hbm_bytes)}
        bench.keep(bench.row("kernel", case.op, case.conditions, samples, BEHIND, values))


def _added(decoder: Decoder, kind: str) -> tuple[tuple[float, ...], list[Op]]:
    """Microseconds that an operation of ``kind`` adds, one sample a replay; the operations."""
    pairs, before, ops = behind(decoder, kind)
    without = median(replay_us(warm_and_captured(before), REPEATS))
    both = replay_us(warm_and_captured(pairs), REPEATS)
    return tuple(max(LEAST_US, (us - without) / len(ops)) for us in both), ops


def _refreshing(decoder: Decoder, every: int) -> tuple[tuple[float, ...], list[Op]]:
    """The same of a score that is renewed ``every`` steps: the mean over so many."""
    found = []
    for step in (0, 1):
        decoder.tiers.step.fill_(step)
        samples, ops = _added(decoder, "shallow_score")
        found.append(samples)
    renewed, kept = found
    return tuple((r + (every - 1) * k) / every for r, k in zip(renewed, kept, strict=True)), ops


def _graph_costs(bench: Bench) -> None:
    """Tiny kernels in a graph, one alone and a hundred in a row: what a graph costs beyond its kernels."""
    x = torch.zeros(32, device=bench.device)

    def single() -> None:
        x.add_(1.0)

    def serial() -> None:
        for _ in range(100):
            x.add_(1.0)

    for name, body, per in zip(GRAPHS, (single, serial), (1, 100), strict=True):
        case = _graph_case(name)
        if bench.due(case):
            samples = replay_us(warm_and_captured(body), 20, per=per)
            bench.keep(bench.row("kernel", name, case.conditions, samples, METHOD))
