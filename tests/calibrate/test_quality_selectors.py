"""What each selector chooses by, and that none sees what comes after."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="measuring quality needs torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparda.calibrate.measure.quality.materials import Materials
from sparda.calibrate.measure.quality.selectors import Selector, chooser, make_selector
from sparda.calibrate.measure.quality.view import View
from sparda.calibrate.measure.quality.window import run_window
from sparda.calibrate.quality import SELECTORS, Choice
from sparda.engine.errors import SpardaError
from sparda.engine.reference_scores import scorer_scores as reference_scorer
from sparda.engine.weights import proxy_rows
from tests.calibrate.quality_models import (
    AHEAD,
    SHAPE,
    SPEC,
    TOKENS,
    WINDOW,
    ids,
    materials,
    prefix,
    weights,
    wide_forecast,
)

START = TOKENS - WINDOW
CHOICES = [Choice(name, 6, *AHEAD.get(name, (0, 0))) for name in SELECTORS] + [Choice("forecast", 6, 1, 2)]


def chosen(choice: Choice, text: Tensor | None = None, m: Materials | None = None) -> list[Tensor]:
    """What a window chose in each layer; all blocks that exist where it chose none."""
    found: list[Tensor] = []
    choose = chooser(choice, m or materials())

    def watched(view: View) -> Tensor | None:
        blocks = choose(view)
        found.append(view.grid.existing.expand(SHAPE.kv_heads, -1, -1) if blocks is None else blocks)
        return blocks

    run_window(weights(), SPEC, prefix(), ids()[START:] if text is None else text, watched)
    return found


def dense_scores(*selectors: Selector) -> list[list[Tensor]]:
    """Scores by layer of selectors that look on while the window attends to everything."""
    found: list[list[Tensor]] = []
    run_window(weights(), SPEC, prefix(), ids()[START:], lambda view: found.append([s.scores(view) for s in selectors]))
    return found


def views() -> list[View]:
    found: list[View] = []

    def keep(view: View) -> None:
        found.append(replace(view, inputs=dict(view.inputs)))

    run_window(weights(), SPEC, prefix(), ids()[START:], keep)
    return found


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: c.label)
def test_forced_blocks_are_always_chosen_and_as_many_as_top_k_asks_for(choice: Choice) -> None:
    for layer, blocks in enumerate(chosen(choice)):
        own = (START + torch.arange(WINDOW)) // SPEC.block
        for back in (own, own - 1, torch.zeros_like(own)):
            assert bool(blocks.gather(-1, back.expand(SHAPE.kv_heads, -1)[..., None]).all())
        count = {"forced": SPEC.forced}.get(choice.selector, choice.top_k)
        if choice.selector != "shallow" or layer > 1:
            assert bool((blocks.sum(-1) == count).all())


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: c.label)
@settings(max_examples=4, deadline=None)
@given(cut=st.integers(1, WINDOW - 1), token=st.integers(0, SHAPE.vocab - 1))
def test_a_later_token_changes_no_earlier_choice(choice: Choice, cut: int, token: int) -> None:
    text = ids()[START:].clone()
    before = chosen(choice, text)
    text[cut:] = (text[cut:] + 1 + token) % SHAPE.vocab
    for old, new in zip(before, chosen(choice, text), strict=True):
        assert torch.equal(old[:, :cut], new[:, :cut])


def test_the_step_before_chose_what_previous_chooses_but_for_forced_blocks() -> None:
    m, top_k = materials(), 6
    for (own, before), view in zip(
        dense_scores(make_selector(Choice("sparse", top_k), m), make_selector(Choice("previous", top_k), m)),
        views(),
        strict=True,
    ):
        now = view.grid.chosen(view.grid.with_forced(own), top_k)
        again = view.grid.chosen(view.grid.with_forced(before), top_k)
        taken = again[:, 1:] & ~now[:, :-1]
        assert bool((taken <= view.grid.forced[1:]).all())
        same = (view.grid.forced[1:] == view.grid.forced[:-1]).all(-1)
        assert torch.equal(again[:, 1:][:, same], now[:, :-1][:, same])


def test_a_forecast_looks_through_its_rows_at_the_layer_lookahead_before() -> None:
    m, forecast = materials(), materials().forecasts[2, 1]
    seen = views()
    for (scores,), view in zip(dense_scores(make_selector(Choice("forecast", 6, 2, 1), m)), seen, strict=True):
        ahead = view.layer >= 2
        rows = forecast.rows["forecast" if ahead else "current"][view.layer - 2 if ahead else view.layer]
        source = seen[view.layer - 2 if ahead else view.layer]
        query = source.turned(source.layer, rows)
        assert torch.equal(scores, view.block_scores(query[:, None]))


def test_an_untrained_forecast_of_one_head_is_the_guess_of_the_mean_query() -> None:
    seen = views()
    for (scores,), view in zip(
        dense_scores(make_selector(Choice("untrained", 6, 1, 1), materials())), seen, strict=True
    ):
        source = seen[max(0, view.layer - 1)]
        query = source.turned(source.layer, proxy_rows(weights(), view.layer))
        assert torch.equal(scores, view.block_scores(query[:, None]))


def test_several_heads_are_several_opinions() -> None:
    m = replace(materials(), forecasts={(1, 1): wide_forecast(1), (1, 2): wide_forecast(2)}, rows={})
    one, two = chosen(Choice("forecast", 6, 1, 1), m=m), chosen(Choice("forecast", 6, 1, 2), m=m)
    assert any(not torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_proxy_that_guesses_from_the_layer_itself_is_sparse() -> None:
    m = materials()
    choice = Choice("proxy", 6, 1)
    proxy = make_selector(choice, m)
    for view in views()[1:]:
        mine = replace(view, inputs={view.layer - 1: view.inputs[view.layer]})
        torch.testing.assert_close(proxy.scores(mine), view.sparse)


def test_infinigen_along_all_directions_of_a_key_scores_its_tokens() -> None:
    whole = torch.eye(SHAPE.head_dim).expand(SHAPE.layers, SHAPE.kv_heads, -1, -1)
    selector = make_selector(Choice("infinigen", 6, 1), replace(materials(), basis=whole))
    seen = views()
    for (scores,), view in list(zip(dense_scores(selector), seen, strict=True))[1:]:
        query = seen[view.layer - 1].turned(view.layer - 1, proxy_rows(weights(), view.layer))
        products = query @ view.keys.mT * SHAPE.head_dim**-0.5
        i, m = 20, 5
        expected = products[:, i, m * SPEC.block - 1 : (m + 1) * SPEC.block].amax(-1)
        torch.testing.assert_close(scores[:, i, m], expected)


def test_layers_that_share_reuse_the_last_that_chose_for_itself() -> None:
    own, shared = Choice("sparse", 6), Choice("shared", 6, 1)
    first = dense_scores(make_selector(own, materials()), make_selector(shared, materials()))
    for layer, (sparse, reused) in enumerate(first):
        assert torch.equal(reused, first[layer - layer % 2][0])
        assert layer % 2 or torch.equal(reused, sparse)


def test_an_early_layer_chooses_for_all_later_ones() -> None:
    found = dense_scores(
        make_selector(Choice("sparse", 6), materials()), make_selector(Choice("early", 6), materials())
    )
    for layer, (_, early) in enumerate(found):
        assert torch.equal(early, found[min(layer, 1)][0])


def test_the_shallow_scorer_scores_as_the_reference_does_every_few_steps() -> None:
    scorer = weights().scorer
    assert scorer is not None
    view, (scores,) = views()[1], dense_scores(make_selector(Choice("shallow", 6), materials()))[2]
    for i in (0, 3, 9, 36):
        due = i // 4 * 4
        t = START + due
        blocks = t // SPEC.block + 1
        expected = reference_scorer(
            scorer, view.inputs[1][due, None], view.q[None, :, due], view.compressed[None, :, : SPEC.compressed(t)],
            blocks, SHAPE, SPEC,
        )  # fmt: skip
        torch.testing.assert_close(scores[:, i, :blocks], expected.expand(SHAPE.kv_heads, -1), rtol=1e-4, atol=1e-4)
        assert bool((scores[:, i, blocks:] == -torch.inf).all())


def test_the_mass_of_all_blocks_is_one_and_none_lies_after_the_query() -> None:
    for view in views():
        torch.testing.assert_close(view.mass.sum(-1), torch.ones(SHAPE.kv_heads, WINDOW))
        assert float(view.mass.masked_fill(view.grid.existing, 0).sum()) == 0.0


def test_random_blocks_are_the_same_for_a_seed_and_others_for_another() -> None:
    first, again = chosen(Choice("random", 6)), chosen(Choice("random", 6))
    other = chosen(Choice("random", 6), m=replace(materials(), seed=1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])


def test_recency_takes_the_newest_blocks() -> None:
    blocks = chosen(Choice("recency", 6))[0]
    for i in range(WINDOW):
        own = (START + i) // SPEC.block
        assert blocks[0, i].nonzero().flatten().tolist() == [0, *range(own - 4, own + 1)]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (Choice("forecast", 6, 3, 1), "needs a Forecast trained for this lookahead"),
        (Choice("shallow", 6), "needs a trained scorer"),
        (Choice("distance", 6), "other documents' choices"),
        (Choice("proxy", 6), "a lookahead of at least 1"),
    ],
)
def test_a_selector_without_what_it_is_made_of_is_refused(choice: Choice, words: str) -> None:
    with pytest.raises(SpardaError, match=words):
        make_selector(choice, Materials(weights()))
