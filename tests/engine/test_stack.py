"""Misses by slots: one pass over the ranks says what slots of any number would, and the slots are the engine's."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.engine.dynamics.choices import Choices
from sparda.engine.dynamics.residents import Start, miss_counts, start_order
from sparda.engine.dynamics.stack import miss_curve, stack_distances
from sparda.engine.errors import SpardaError
from tests.engine.made_choices import any_choices, drifting

STARTS = st.sampled_from(["oldest", "newest"])


@given(any_choices(), st.integers(0, 1), STARTS, st.data())
def test_one_pass_counts_what_slots_of_any_number_count(
    choices: Choices, spare: int, start: Start, data: st.DataObject
) -> None:
    if not choices.free_picks().any():
        return
    skip = data.draw(st.integers(0, int(np.flatnonzero(choices.free_picks().any((1, 2)))[-1])))
    found = stack_distances(choices, skip=skip, spare=spare, start=start)
    live = found.live_steps - skip
    for slots in range(choices.facts.top_k, choices.room + 2):
        counts = miss_counts(choices, slots, skip=skip, ties="block", spare=spare, start=start)
        assert found.missed(slots).tolist() == counts.sum(0).ravel().tolist()
        assert found.totals(slots).tolist() == counts.sum((1, 2))[:live].tolist()


@given(any_choices(forced=True), STARTS, st.integers(0, 6))
def test_misses_are_those_of_the_selection_kernels_reference_ties_included(
    choices: Choices, start: Start, more: int
) -> None:
    pytest.importorskip("torch", reason="the kernels need torch")
    pytest.importorskip("triton", reason="the kernels need triton")
    slots = choices.facts.top_k + more
    assert miss_counts(choices, slots, start=start).tolist() == _played(choices, slots, start, kernel=False)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")
def test_misses_are_those_that_the_selection_kernel_lists() -> None:
    pytest.importorskip("torch", reason="the kernels need torch")
    # Much moves, so that many blocks were last chosen in the same step; and three are born meanwhile.
    choices = drifting(24, noise=1.0, block=8, top_k=6, layers=(0,), context_tokens=(100, 103))
    counts = miss_counts(choices, 8)
    assert counts.tolist() == _played(choices, 8, "oldest", kernel=True)
    assert counts.sum() > 50
    assert counts.tolist() != miss_counts(choices, 8, ties="block").tolist(), "the slots decide some ties"


def _played(choices: Choices, slots: int, start: Start, *, kernel: bool) -> list[Any]:
    """Blocks fetched, [steps, layers, heads], by the engine's selection on scores that name what was chosen."""
    import torch

    from sparda.kernels.select import select_blocks, select_reference

    f = choices.facts
    batch, kv, room, size = len(f.context_tokens), f.kv_heads, choices.room, slots + 1
    counts = np.zeros((choices.steps, len(f.layers), f.heads), dtype=np.int64)
    given = {"phase": 0, "top_k": f.top_k, "init_blocks": f.init_blocks, "local_blocks": f.local_blocks}
    more = {**given, "block": f.block, "pool_rows": 1 << 20, "pool_base": 0}

    def ints(*shape: int, fill: int = -1) -> torch.Tensor:
        return torch.full(shape, fill, dtype=torch.int32)

    for layer in range(len(f.layers)):
        inside, stamp, place = ints(batch, kv, size), ints(batch, kv, size), ints(batch, kv, room)
        for b, count in enumerate(choices.existing()[0]):
            kept = sorted(start_order(int(count), f.init_blocks, f.local_blocks, start)[:slots])
            inside[b, :, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
            stamp[b, :, : len(kept)] = 0
            place[b][:, kept] = torch.arange(len(kept), dtype=torch.int32)
        for step in range(choices.steps):
            scores = torch.zeros(batch * kv, room + 1)
            scores.scatter_(1, torch.from_numpy(choices.blocks[step, layer].astype(np.int64)) % (room + 1), 1.0)
            scores = scores[:, :room].reshape(1, batch, kv, room).contiguous()
            positions = torch.tensor(choices.positions()[step], dtype=torch.int32)
            if kernel:
                n, pairs = ints(1, fill=0), batch * kv
                src, dst, victims = ints(pairs * size), ints(pairs * size), ints(batch, kv, size)
                chosen, chosen_count = ints(batch, kv, f.top_k), ints(batch, kv)
                now = ints(1, fill=step)
                select_blocks(
                    scores, now, positions, inside, stamp, place, chosen, chosen_count, src, dst, n, victims, **more
                )  # fmt: skip
                fetched = dst[: int(n)].tolist()
            else:
                copies = select_reference(scores, step, positions, inside, stamp, place, **more)[1]
                fetched = [row for _, row in copies]
            np.add.at(counts[step, layer], [row // size for row in fetched], 1)
    return counts.tolist()


def test_ties_by_slot_and_by_block_differ_by_little() -> None:
    choices = drifting(512, noise=0.5, layers=(0, 1, 2), kv_heads=4)
    found = stack_distances(choices, skip=64)
    for slots in (8, 10, 12, 16, 24):
        share = miss_counts(choices, slots, skip=64).sum() / found.free.sum()
        assert share == pytest.approx(found.share(slots), abs=0.004)


def test_the_curve_begins_at_top_k_falls_and_ends_where_nothing_is_missed() -> None:
    choices = drifting(256)
    curve, found = miss_curve(choices, skip=64), stack_distances(choices, skip=64)
    assert curve.ratio[0] == 1.0
    assert curve.missed[-1] == 0.0
    assert curve.miss_rate(8, 12, 3) == pytest.approx(found.missed(12).sum() / (192 * 4 * 8))
    assert curve.at(1.0) == found.share(8)


def test_without_a_slot_to_spare_slots_for_top_k_miss_what_enters() -> None:
    choices = drifting(100)
    entered = [set(b.tolist()) - set(a.tolist()) for a, b in pairwise(choices.blocks[:, 0, 0])]
    born = int(choices.existing()[-1, 0] - choices.existing()[0, 0])
    missed = miss_counts(choices, 8, skip=1, spare=0)
    assert missed[:, 0, 0].sum() == sum(map(len, entered)) - born
    assert miss_counts(choices, 8, skip=1).sum() < missed.sum()


def test_misses_by_layer_and_step_add_up() -> None:
    choices = drifting(200, layers=(0, 3, 7), context_tokens=(500, 300))
    found = stack_distances(choices, skip=50)
    assert found.layer_shares(12).mean() == pytest.approx(found.share(12))
    assert found.totals(12).sum() == found.missed(12).sum()
    quantiles = found.quantiles(12)
    assert quantiles[0.5] <= quantiles[0.95] <= quantiles[0.99] <= quantiles[1.0] == found.totals(12).max()
    assert found.slots_at(1.5) == 12


def test_totals_are_of_steps_in_which_every_sequence_goes_on() -> None:
    choices = drifting(40, context_tokens=(500, 500))
    blocks = choices.blocks.copy()
    blocks[30:, :, 2:] = -1
    found = stack_distances(Choices(choices.facts, blocks), skip=10)
    assert len(found.totals(8)) == 20
    assert found.totals(8).sum() < found.missed(8).sum()


@pytest.mark.parametrize(("slots", "skip", "said"), [(7, 0, "7 slots for a top_k of 8"), (8, 20, "leave at least one")])
def test_too_few_slots_or_steps_are_refused(slots: int, skip: int, said: str) -> None:
    with pytest.raises(SpardaError, match=said):
        miss_counts(drifting(20), slots, skip=skip)


def test_a_trace_with_nothing_free_has_no_curve() -> None:
    with pytest.raises(SpardaError, match="top_k is 3 and 3 blocks are forced"):
        miss_curve(drifting(20, top_k=3))
