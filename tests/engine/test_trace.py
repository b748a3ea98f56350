"""Selection traces: the stated misses, whatever the slots remember, and blocks that stay where they may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="traces are tensors")

from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.trace import GROWTH_BLOCKS, LAYER_PHASE, SelectionTrace, rotating_trace

if TYPE_CHECKING:
    from torch import Tensor

SHAPE = ModelShape("tiny", layers=3, d_model=96, heads=6, kv_heads=2, head_dim=64, ffn=128, vocab=211)
SPEC = SparseSpec(block=16, kernel=8, stride=4, init_blocks=1, local_blocks=2)
BLOCKS = 240
CONTEXT = 16 * BLOCKS - 3
"""The current block is the last one, and opens another after three tokens."""


def trace_of(
    miss_rate: float,
    *,
    top_k: int = 12,
    resident: int = 0,
    batch: int = 1,
    context: int = CONTEXT,
    spec: SparseSpec = SPEC,
    seed: int = 0,
) -> SelectionTrace:
    config = Config(top_k=top_k, resident_blocks=resident)
    return rotating_trace(
        SHAPE,
        spec,
        Workload(batch, context, miss_rate),
        config,
        blocks=spec.blocks(context) + GROWTH_BLOCKS + 2,
        device="cpu",
        seed=seed,
    )


def rate_of(trace: SelectionTrace) -> float:
    assert trace.miss_rate is not None
    return trace.miss_rate


def picks(trace: SelectionTrace, head: int = 0) -> list[set[int]]:
    """The blocks that each step of the trace names for one head."""
    rows: Tensor = trace.scores.flatten(1, 2)[:, head]
    return [set(row.nonzero().flatten().tolist()) for row in rows]


def misses_of_lru(named: list[set[int]], slots: int, steps: int) -> list[int]:
    """Blocks fetched in each step by slots that forget the least recently chosen block first."""
    last_chosen: dict[int, int] = {}
    missed = []
    for step in range(steps):
        position = CONTEXT + step
        current = position // SPEC.block
        chosen = named[step % len(named)] | set(range(SPEC.init_blocks))
        chosen |= set(range(current - SPEC.local_blocks, current + 1))
        opened = {current + 1} if (position + 1) % SPEC.block == 0 else set()
        absent = (chosen | opened) - last_chosen.keys()
        missed.append(sum(block * SPEC.block < position for block in absent))
        last_chosen.update(dict.fromkeys(chosen | opened, step))
        for _ in range(len(last_chosen) - slots):
            del last_chosen[min(last_chosen, key=lambda block: (last_chosen[block], block))]
    return missed


@pytest.mark.parametrize("miss_rate", [0.02, 0.06, 0.25, 0.5])
def test_as_many_blocks_enter_as_the_trace_states_over_a_period_for_every_head(miss_rate: float) -> None:
    trace = trace_of(miss_rate, batch=2)
    for head in range(4):
        named = picks(trace, head)
        entering = [len(now - before) for before, now in zip([named[-1], *named[:-1]], named, strict=True)]
        assert sum(entering) == round(rate_of(trace) * 12 * trace.period)
        assert max(entering) - min(entering) <= 1
        assert {len(now) for now in named} == {12 - SPEC.forced}


@pytest.mark.parametrize("miss_rate", [0.02, 0.06, 0.25, 0.5])
def test_the_stated_rate_is_the_asked_one_to_a_block_a_period(miss_rate: float) -> None:
    trace = trace_of(miss_rate)
    assert abs(rate_of(trace) - miss_rate) * 12 * trace.period <= 0.5


@settings(deadline=None, max_examples=20)
@given(
    miss_rate=st.floats(0.06, 0.6), top_k=st.integers(10, 20), spare=st.integers(0, 12), seed=st.integers(0, 1 << 30)
)
def test_slots_that_forget_the_oldest_miss_exactly_the_stated_share(
    miss_rate: float, top_k: int, spare: int, seed: int
) -> None:
    trace = trace_of(min(miss_rate, (top_k - SPEC.forced) / top_k), top_k=top_k, resident=top_k + spare, seed=seed)
    warm = 64
    missed = misses_of_lru(picks(trace), top_k + spare + 1, warm + trace.period)[warm:]
    assert sum(missed) == round(rate_of(trace) * top_k * trace.period)
    assert max(missed) - min(missed) <= 1


@settings(deadline=None, max_examples=20)
@given(st.just(0.0) | st.floats(0.02, 0.6), st.integers(0, 1 << 30))
def test_neither_forced_nor_local_blocks_nor_those_they_grow_into_are_named(miss_rate: float, seed: int) -> None:
    named = set[int]().union(*picks(trace_of(miss_rate, seed=seed)))
    assert min(named) >= SPEC.init_blocks
    assert max(named) < BLOCKS - 1 - SPEC.local_blocks - GROWTH_BLOCKS


def test_without_misses_the_trace_is_one_choice() -> None:
    trace = trace_of(0.0, batch=2)
    assert (trace.period, trace.miss_rate) == (1, 0.0)
    assert [len(picks(trace, head)[0]) for head in range(4)] == [12 - SPEC.forced] * 4
    assert [trace.phase(layer) for layer in range(3)] == [0, 0, 0]
    assert sum(misses_of_lru(picks(trace), 13, 64)[1:]) == 0


def test_heads_choose_apart_and_a_seed_gives_one_trace() -> None:
    trace = trace_of(0.06, batch=2)
    assert len({frozenset(picks(trace, head)[0]) for head in range(4)}) == 4
    assert bool((trace.scores == trace_of(0.06, batch=2).scores).all())
    assert not bool((trace.scores == trace_of(0.06, batch=2, seed=1).scores).all())


def test_a_layer_is_some_steps_ahead_of_the_one_before_and_wraps_at_the_period() -> None:
    trace = trace_of(0.06)
    assert [trace.phase(layer) for layer in range(3)] == [0, LAYER_PHASE, 2 * LAYER_PHASE]
    assert trace.phase(trace.period) == 0


def test_more_misses_than_free_picks_are_refused_with_the_highest_rate() -> None:
    with pytest.raises(SpardaError, match=r"miss_rate 0\.7 of top_k 12 is 8\.4 blocks, but only 8 .* at most 0\.667"):
        trace_of(0.7)


@pytest.mark.parametrize("miss_rate", [0.0, 0.06])
@pytest.mark.parametrize("blocks", [4, 13, 14, 15, 21])
def test_a_context_of_too_few_blocks_is_refused_naming_it(blocks: int, miss_rate: float) -> None:
    with pytest.raises(SpardaError, match=f"context of {16 * blocks} tokens is too short .* rate {miss_rate} at top_k"):
        trace_of(miss_rate, context=16 * blocks)


def test_more_resident_blocks_need_a_longer_context() -> None:
    with pytest.raises(SpardaError, match="top_k 12 and 300 resident blocks"):
        trace_of(0.06, resident=300)


def test_a_rate_so_small_that_its_period_would_be_endless_is_refused() -> None:
    with pytest.raises(SpardaError, match=r"miss rate 0\.0001"):
        trace_of(0.0001)
