"""Choices: what they may be, and what follows from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparda.engine.dynamics.choices import Choices
from sparda.engine.dynamics.overlap import overlap, reuse, spread
from sparda.engine.errors import SpardaError
from tests.engine.made_choices import drifting, facts_of


def of(rows: list[list[int]], **given: Any) -> Choices:
    """One stream: its blocks step by step."""
    facts = facts_of(**{"layers": (0,), "kv_heads": 1, "top_k": len(rows[0]), "context_tokens": (100,), **given})
    return Choices(facts, np.array(rows, dtype=np.int16)[:, None, None])


@pytest.mark.parametrize(
    "row", [[3, 2, 6], [2, 2, 6], [-1, 2, 6], [2, -1, 6], [-2, 2, 6], [0, 2, 7], [0, 6, -2]], ids=str
)
def test_blocks_that_do_not_ascend_or_do_not_exist_yet_are_refused(row: list[int]) -> None:
    of([[0, 2, 6], [0, 6, -1]])
    with pytest.raises(SpardaError, match=r"step 1, layer 0, head 0 are .* they must ascend"):
        of([[0, 2, 6], row])


def test_blocks_of_another_shape_or_type_than_the_facts_say_are_refused() -> None:
    good = of([[0, 2, 6]])
    for blocks in (good.blocks.astype(np.int32), good.blocks[:, :, :, :2], good.blocks[:0], good.blocks[0]):
        with pytest.raises(SpardaError, match=r"the facts of the trace ask for int16 \[steps, layers, heads, top_k\]"):
            Choices(good.facts, blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [({"top_k": 0}, "top_k of a selection trace is 0"), ({"context_tokens": ()}, "give at least one of each"),
     ({"context_tokens": (-1,)}, "contexts of 0 tokens"), ({"layers": ()}, "layers \\[\\]"),
     ({"positions_per_step": 0}, "positions_per_step")],
)  # fmt: skip
def test_facts_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpardaError, match=said):
        facts_of(**given)


def test_a_block_begins_to_exist_with_its_first_token_and_is_forced_while_it_is_near() -> None:
    # Position 111 is the last of block 6; the next step opens block 7 and lets block 5 go.
    choices = of([[0, 3, 5, 6], [0, 3, 6, 7]], context_tokens=(111,))
    assert choices.existing()[:, 0].tolist() == [7, 8]
    assert choices.forced()[:, 0, 0].tolist() == [[True, False, True, True], [True, False, True, True]]
    assert choices.free_picks().ravel().tolist() == [1, 1]
    assert choices.room == 9


def test_a_sequence_ends_where_nothing_more_is_chosen() -> None:
    choices = drifting(6, context_tokens=(300, 500), kv_heads=2)
    blocks = choices.blocks.copy()
    blocks[4:, :, 2:] = -1
    assert Choices(choices.facts, blocks).lengths().tolist() == [6, 4]


def test_overlap_is_the_share_of_free_picks_that_an_earlier_step_had_picked() -> None:
    rows = [[0, 1, 2, 5, 6], [0, 1, 3, 5, 6], [0, 2, 3, 5, 6], [0, 1, 2, 5, 6]]
    found = overlap(of(rows), (1, 2, 3, 4))
    assert {lag: value.tolist() for lag, value in found.items()} == {1: [0.5], 2: [0.5], 3: [1.0]}
    assert reuse(of(rows), skip=2).tolist() == [0.5]
    with pytest.raises(SpardaError, match="two at least"):
        reuse(of(rows), skip=3)
    with pytest.raises(SpardaError, match="no block of this trace is freely chosen"):
        overlap(of([[0, 5, 6], [0, 5, 6]]))


def test_overlap_does_not_count_what_was_forced_before() -> None:
    # Block 5 leaves the local window and is then freely picked.
    rows = [[0, 3, 5, 6], [0, 5, 6, 7]]
    assert overlap(of(rows, context_tokens=(111,)), (1,))[1].tolist() == [0.0]


def test_a_spread_is_by_layer() -> None:
    found = spread(np.array([0.1, 0.5, 0.3, 0.2]), 0.4)
    assert (found.mean, found.low, found.median, found.high) == (0.4, 0.1, 0.25, 0.5)
