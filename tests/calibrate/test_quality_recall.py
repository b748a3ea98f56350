"""What shares say about a choice, and how the choice of ``sparse`` moves from step to step."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="measuring quality needs torch")

import numpy as np
import torch

from sparda.calibrate.measure.quality.dynamics import (
    choices_of,
    distance_counts,
    distance_shares,
    dynamics_row,
    head_agreement,
    mean_curve,
    sparse_sets,
)
from sparda.calibrate.measure.quality.recall import SHARES, Tally, recall_row, tallies
from sparda.calibrate.measure.quality.selectors import chooser
from sparda.calibrate.measure.quality.view import View
from sparda.calibrate.measure.quality.window import run_window
from sparda.calibrate.quality import SELECTORS, Choice
from sparda.engine.dynamics.curve import MissCurve
from sparda.engine.errors import SpardaError
from tests.calibrate.quality_models import AHEAD, SHAPE, SPEC, TOKENS, WINDOW, ids, materials, prefix, weights

START = TOKENS - WINDOW


def measured(*choices: Choice, seed: int = 0) -> list[Tally]:
    return tallies(weights(), SPEC, prefix(seed), ids(seed)[START:], choices, materials(seed))


def chosen_by_sparse(top_k: int) -> list[torch.Tensor]:
    """By layer, on a text that is read densely."""
    choose, found = chooser(Choice("sparse", top_k), materials()), list[torch.Tensor]()

    def keep(view: View) -> None:
        blocks = choose(view)
        assert blocks is not None
        found.append(blocks)

    run_window(weights(), SPEC, prefix(), ids()[START:], keep)
    return found


def all_choices(top_k: int) -> list[Choice]:
    return [Choice(name, top_k, *AHEAD.get(name, (0, 0))) for name in SELECTORS]


def test_sparse_catches_all_of_what_sparse_chooses() -> None:
    for top_k in (4, 6, 12):
        row = recall_row(measured(Choice("sparse", top_k)))
        assert row.recall == row.far == row.absent == row.layers.low == row.documents.high == 1.0
        assert 0.0 < row.mass_free < row.mass < 1.0


def test_the_oracle_catches_all_of_itself() -> None:
    row = recall_row(measured(Choice("oracle", 6)))
    assert row.recall_oracle == 1.0
    assert row.recall < 1.0


@pytest.mark.parametrize("top_k", [4, 7, 12])
def test_no_choice_catches_more_attention_than_the_oracle(top_k: int) -> None:
    oracle, *others = measured(Choice("oracle", top_k), *(c for c in all_choices(top_k) if c.selector != "oracle"))
    by_layer = dict(zip(oracle.layers, oracle.caught["mass"], strict=True))
    for other in others:
        for layer, mass in zip(other.layers, other.caught["mass"], strict=True):
            assert mass <= by_layer[layer] * (1 + 1e-5)


def test_a_larger_top_k_catches_no_less_attention() -> None:
    few, more, most = (recall_row([t]) for t in measured(*(Choice("proxy", k, 1) for k in (5, 8, 19))))
    assert few.mass < more.mass < most.mass
    assert most.mass == pytest.approx(1.0)
    assert most.mass_free == pytest.approx(1.0)


def test_all_choices_at_once_are_measured_as_each_alone() -> None:
    choices = [*all_choices(6), *all_choices(9)]
    for choice, together in zip(choices, measured(*choices), strict=True):
        (alone,) = measured(choice)
        assert together.layers == alone.layers
        for name in SHARES:
            assert together.caught[name] == pytest.approx(alone.caught[name])
            assert together.of[name] == pytest.approx(alone.of[name])


def test_layers_in_which_another_chooses_are_not_counted() -> None:
    layers = {t.choice.selector: t.layers for t in measured(*all_choices(6))}
    assert layers["sparse"] == (0, 1, 2, 3)
    assert layers["forecast"] == layers["proxy"] == layers["infinigen"] == (1, 2, 3)
    assert layers["shared"] == (1, 3)
    assert layers["early"] == layers["shallow"] == (2, 3)


def test_shares_are_what_counting_one_query_after_another_gives() -> None:
    top_k, caught, of = 6, 0.0, 0.0
    absent, missed = 0, 0
    own, guess = Choice("sparse", top_k), Choice("proxy", top_k, 1)
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    choose, guessed = chooser(own, materials()), chooser(guess, materials())

    def keep(view: View) -> None:
        a, b = choose(view), guessed(view)
        assert a is not None
        assert b is not None
        found.append((a, b, view.mass, view.grid.forced))

    run_window(weights(), SPEC, prefix(), ids()[START:], keep)
    for sparse, other, mass, forced in found[1:]:
        for head in range(SHAPE.kv_heads):
            for i in range(1, WINDOW):
                free = {m for m in sparse[head, i].nonzero().flatten().tolist() if not forced[i, m]}
                new = free - set(sparse[head, i - 1].nonzero().flatten().tolist())
                taken = set(other[head, i].nonzero().flatten().tolist())
                absent += len(new)
                missed += len(new - taken)
                of += float(mass[head, i].masked_fill(forced[i], 0).sum())
                caught += sum(float(mass[head, i, m]) for m in taken if not forced[i, m])
    row = recall_row(measured(guess))
    assert row.absent == pytest.approx(1 - missed / absent)
    assert row.mass_free == pytest.approx(caught / of, rel=1e-4)


def test_attention_is_over_the_same_layers_for_all_choices() -> None:
    early, sparse = Choice("early", 6), Choice("sparse", 6)
    own, other = measured(early, sparse)
    assert own.layers != other.layers
    row = recall_row([own], [other])
    chosen = dict(zip(own.layers, own.caught["mass"], strict=True))
    caught = [chosen.get(layer, v) for layer, v in zip(other.layers, other.caught["mass"], strict=True)]
    assert row.mass == pytest.approx(sum(caught) / sum(other.of["mass"]))
    assert row.by_document["mass"] == pytest.approx((row.mass,))
    # Of a layer that sparse chooses in all its blocks would count as caught.
    assert row.recall == recall_row([own]).recall < 1
    assert recall_row([other], [other]) == recall_row([other])


def test_spreads_are_over_layers_and_over_documents() -> None:
    choice = Choice("recency", 6)
    both = [measured(choice, seed=s)[0] for s in (0, 1)]
    row = recall_row(both)
    single = [recall_row([t]).recall for t in both]
    assert row.documents.low == min(single)
    assert row.documents.high == max(single)
    assert row.recall == pytest.approx(row.documents.mean) == pytest.approx(row.layers.mean)
    assert row.layers.low <= row.layers.median <= row.layers.high


def test_a_top_k_that_leaves_nothing_to_choose_is_refused() -> None:
    with pytest.raises(SpardaError, match="3 blocks are always chosen"):
        measured(Choice("sparse", 3))


def test_recorded_sets_are_what_sparse_chooses_at_each_top_k() -> None:
    sets = sparse_sets(weights(), SPEC, prefix(), ids()[START:], 9)
    assert sets.shape == (WINDOW, SHAPE.layers, SHAPE.kv_heads, 9)
    for top_k in (5, 9):
        blocks = choices_of(sets, START, SPEC, top_k, "tiny").blocks
        for layer, chosen in enumerate(chosen_by_sparse(top_k)):
            for head in range(SHAPE.kv_heads):
                for i in range(0, WINDOW, 5):
                    assert blocks[i, layer, head].tolist() == chosen[head, i].nonzero().flatten().tolist()


def test_sets_of_a_short_text_end_in_none() -> None:
    sets = sparse_sets(weights(), SPEC, prefix().upto(4), ids()[4:30], 6)
    choices = choices_of(sets, 4, SPEC, 6, "tiny")
    assert choices.blocks[0, 0, 0].tolist() == [0, -1, -1, -1, -1, -1]
    assert choices.blocks[-1, 0, 0].tolist() == [0, 1, 2, 3, -1, -1]


def test_distances_are_counted_where_they_were_free_to_choose() -> None:
    sets = sparse_sets(weights(), SPEC, prefix(), ids()[START:], 9)
    counts, possible = distance_counts(sets, START, SPEC, 6)
    assert counts.sum() == WINDOW * SHAPE.layers * SHAPE.kv_heads * (6 - SPEC.forced)
    assert not counts[..., :2].any()
    assert possible[:2].tolist() == [0, 0]
    assert possible[2] == WINDOW
    own = (START + np.arange(WINDOW)) // SPEC.block
    by_hand = sum(int((own[i] - sets[i, 2, 1, :6] == 5).any()) for i in range(WINDOW))
    assert counts[2, 1, 5] == by_hand
    share = distance_shares([(counts, possible), (counts, possible)])
    assert float(share[2, 1, 5]) == pytest.approx(by_hand / possible[5])


def test_dynamics_of_two_documents_are_means_of_both() -> None:
    choices = {
        f"text{s}": choices_of(sparse_sets(weights(), SPEC, prefix(s), ids(s)[START:], 6), START, SPEC, 6, "tiny")
        for s in (0, 1)
    }
    both = dynamics_row(choices, skip=5)
    first, second = (dynamics_row({name: c}, skip=5) for name, c in choices.items())
    assert both.reuse.mean == pytest.approx((first.reuse.mean + second.reuse.mean) / 2)
    assert both.by_lag["1"] == pytest.approx(both.reuse.mean)
    assert both.documents["1"].high == max(first.at_top_k["1"].mean, second.at_top_k["1"].mean)
    assert both.forced == 3
    assert both.top_k == 6
    assert list(both.at_top_k) == ["1", "1.5", "2", "3", "4"]
    misses = [s.mean for s in both.at_top_k.values()]
    assert misses == sorted(misses, reverse=True)
    assert misses[0] > 0
    assert both.curve.at(1.0) == pytest.approx(misses[0])
    assert both.per_step["1"][0] <= both.per_step["1"][-1]


def test_heads_that_choose_alike_share_all_blocks() -> None:
    sets = np.zeros((8, 2, 3, 5), np.int16)
    sets[..., :] = [0, 18, 17, 4, 6]
    alike = choices_of(sets, START + 31, SPEC, 5, "tiny")
    assert head_agreement(alike) == (1.0, 1.0, 1.0)
    sets[:, :, 2, 4] = 9
    sets[:, 1, 0, 3] = 5
    union, same, following = head_agreement(choices_of(sets, START + 31, SPEC, 5, "tiny"))
    assert [union, same, following] == pytest.approx([3.5 / 2, 0.5 / 2, 5 / 6])


def test_the_mean_of_curves_lies_between_them_and_falls() -> None:
    curve = mean_curve([MissCurve((1.0, 2.0), (0.4, 0.1)), MissCurve((1.0, 3.0), (0.2, 0.0))])
    assert curve.ratio == (1.0, 2.0, 3.0)
    assert curve.missed == pytest.approx((0.3, 0.1, 0.05))
