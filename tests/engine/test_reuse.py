"""Reuse traces: slots that forget the oldest miss what the stated distances say; as much turns over as is stated."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise

import pytest

pytest.importorskip("torch", reason="traces are tensors")

from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.reuse import reuse_trace
from sparda.engine.shapes import MODELS, SparseSpec
from sparda.engine.trace import GROWTH_BLOCKS, SelectionTrace

SHAPE, SPEC = MODELS["minicpm4.1-8b"], SparseSpec()
CONTEXT, TOP_K = 131072, 96
FREE = TOP_K - SPEC.forced
TAIL = 3.0


def trace_of(turnover: float, *, context: int = CONTEXT, top_k: int = TOP_K, seed: int = 0, **more: float) -> object:
    return reuse_trace(
        SHAPE,
        SPEC,
        Workload(2, context),
        Config(top_k=top_k),
        blocks=SPEC.blocks(context) + GROWTH_BLOCKS,
        device="cpu",
        turnover=turnover,
        seed=seed,
        **more,  # type: ignore[arg-type]
    )


@functools.cache
def made(turnover: float) -> SelectionTrace:
    trace = trace_of(turnover)
    assert isinstance(trace, SelectionTrace)
    return trace


def heads(trace: SelectionTrace) -> Iterator[list[set[int]]]:
    """The blocks that each step names, head by head."""
    for head in trace.scores.flatten(1, 2).unbind(1):
        yield [set(row.nonzero().flatten().tolist()) for row in head]


def missed(named: list[set[int]], slots: int) -> float:
    """Mean share of the free picks fetched by slots that forget the least recently chosen first.

    They begin with the lowest blocks, as a reset of the KV tiers leaves them.
    """
    last = dict.fromkeys(range(SPEC.init_blocks, SPEC.init_blocks + slots), -1)
    misses = 0
    for step, chosen in enumerate(named):
        misses += len(chosen - last.keys())
        last.update(dict.fromkeys(chosen, step))
        for block in sorted(last, key=lambda b: (last[b], -b))[: len(last) - slots]:
            del last[block]
    return misses / len(named) / FREE


@pytest.mark.parametrize("turnover", [0.06, 0.186])
@pytest.mark.parametrize("times", [1, 1.25, 1.5, 2, 4])
def test_slots_for_x_times_the_free_picks_miss_the_turnover_over_x_to_the_tail(turnover: float, times: float) -> None:
    shares = [missed(named, int(times * FREE)) for named in heads(made(turnover))]
    expected = turnover * times**-TAIL
    mean = sum(shares) / len(shares)
    assert mean == pytest.approx(expected, abs=0.02)
    assert mean == pytest.approx(expected, rel=0.25, abs=0.001), "and closer than that where little misses"


@pytest.mark.parametrize("turnover", [0.06, 0.186])
def test_every_step_replaces_the_stated_share_of_the_free_picks(turnover: float) -> None:
    for named in heads(made(turnover)):
        assert {len(now) for now in named} == {FREE}
        entering = [len(now - before) for before, now in pairwise(named)]
        assert abs(sum(entering) - turnover * FREE * len(entering)) <= 1
        assert max(entering) - min(entering) <= 1


def test_a_trace_states_its_turnover_and_no_misses() -> None:
    trace = made(0.06)
    assert (trace.miss_rate, trace.turnover, trace.period) == (None, 0.06, 256)


def test_neither_forced_nor_local_blocks_nor_those_they_grow_into_are_named() -> None:
    # Half the blocks that a turnover of a third reaches in a short context, up to the last that may be named.
    trace = trace_of(0.3, context=64 * (4 * FREE + 1 + SPEC.forced + GROWTH_BLOCKS))
    assert isinstance(trace, SelectionTrace)
    named = set[int]().union(*(step for head in heads(trace) for step in head))
    assert min(named) >= SPEC.init_blocks
    assert max(named) < SPEC.blocks(64 * (4 * FREE + 1 + SPEC.forced)) - SPEC.local_blocks - 1 < 4 * FREE + SPEC.forced


def test_heads_choose_apart_and_a_seed_gives_one_trace() -> None:
    trace, again, other = made(0.06), trace_of(0.06), trace_of(0.06, seed=1)
    assert isinstance(again, SelectionTrace)
    assert isinstance(other, SelectionTrace)
    last = [frozenset(named[-1]) for named in heads(trace)]
    assert len(set(last)) == len(last) == 2 * SHAPE.kv_heads
    assert bool((trace.scores == again.scores).all())
    assert not bool((trace.scores == other.scores).all())


@pytest.mark.parametrize("blocks", [128, 4 * FREE + SPEC.forced + GROWTH_BLOCKS])
def test_a_context_without_room_for_far_blocks_is_refused_naming_what_it_has(blocks: int) -> None:
    have = blocks - SPEC.forced - GROWTH_BLOCKS
    with pytest.raises(SpardaError, match=f"context of {64 * blocks} tokens has {have} blocks .* needs {4 * FREE + 1}"):
        trace_of(0.06, context=64 * blocks)


def test_a_turnover_that_would_draw_a_block_twice_is_refused_with_the_highest() -> None:
    with pytest.raises(SpardaError, match=r"replaces 31 of 62 free blocks .* at most 0\.323"):
        trace_of(0.5)


@pytest.mark.parametrize("given", [{"turnover": 0.0}, {"turnover": 0.06, "tail": 0.0}, {"turnover": 0.06, "top_k": 34}])
def test_nothing_to_replace_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(SpardaError, match="must be above 0"):
        trace_of(**given)  # type: ignore[arg-type]
