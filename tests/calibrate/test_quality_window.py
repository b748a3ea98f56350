"""A window that is run at once sees and does what a decoder does token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="measuring quality needs torch")
pytest.importorskip("triton", reason="the reference decoder imports the kernels")

import torch
from torch import Tensor

from sparda.calibrate.measure.quality import view as views
from sparda.calibrate.measure.quality.blocks import Grid
from sparda.calibrate.measure.quality.materials import Materials
from sparda.calibrate.measure.quality.selectors import chooser
from sparda.calibrate.measure.quality.view import Chooser, View
from sparda.calibrate.measure.quality.window import Prefix, read_prefix, run_window
from sparda.calibrate.quality import Choice
from sparda.engine import reference_scores
from sparda.engine.config import Config
from sparda.engine.errors import SpardaError
from sparda.engine.forecast_file import forecast_of
from sparda.engine.pooling import pooled
from sparda.engine.prefill import prefill
from sparda.engine.reference import ReferenceDecoder
from sparda.engine.shapes import SparseSpec
from sparda.engine.weights import random_weights
from tests.calibrate.quality_models import SHAPE, SPEC, TOKENS, WINDOW, ids, materials, prefix, weights

START = TOKENS - WINDOW

POLICIES = {
    "sparse": Choice("sparse", 6),
    "sparda": Choice("forecast", 6, 1, 1),
    "sparda 2": Choice("forecast", 6, 2, 1),
    "infinigen": Choice("infinigen", 6, 1),
    "shallow": Choice("shallow", 6),
}


def everything(view: View) -> Tensor:
    return torch.ones(SHAPE.kv_heads, view.grid.count, view.grid.blocks, dtype=torch.bool)


def noting(choose: Chooser, seen: list[Tensor]) -> Chooser:
    """The same chooser; what it chooses goes into ``seen`` too."""

    def watched(view: View) -> Tensor | None:
        found = choose(view)
        seen.append(everything(view) if found is None else found)
        return found

    return watched


def decoded(
    policy: str, choice: Choice, chosen: list[Tensor], m: Materials | None = None, read: Prefix | None = None
) -> tuple[Tensor, float]:
    """Losses of the reference decoder given the window's choices, and by how much these were worse than its own."""
    m, read, name = m or materials(), read or prefix(), policy.split()[0]
    config = Config(
        policy=name, top_k=choice.top_k, lookahead=max(1, choice.lookahead), score_layer=1, refresh_steps=4, reserve=0.0
    )
    history = [(k[None].float(), v[None].float()) for k, v in zip(read.keys, read.values, strict=True)]
    decoder = ReferenceDecoder(m.weights, SPEC, config, history)
    decoder.basis = read.basis[1:] if name == "infinigen" else None
    text, nats = ids(), []
    for i in range(WINDOW - 1):
        blocks = (START + i) // SPEC.block + 1
        with torch.inference_mode():
            logits = decoder.step(text[START + i, None], [c[None, :, i, :blocks] for c in chosen])
        nats.append(torch.nn.functional.cross_entropy(logits, text[START + i + 1, None]))
    return torch.stack(nats), decoder.overlooked


@pytest.mark.parametrize("policy", POLICIES)
def test_a_window_chooses_and_predicts_what_the_reference_decoder_does_token_by_token(policy: str) -> None:
    choice, seen = POLICIES[policy], list[Tensor]()
    found = run_window(weights(), SPEC, prefix(), ids()[START:], noting(chooser(choice, materials()), seen))
    nats, overlooked = decoded(policy, choice, seen)
    assert overlooked < 1e-4
    torch.testing.assert_close(found.nats, nats, rtol=2e-4, atol=2e-4)
    assert all(bool((c.sum(-1) == choice.top_k).all()) for c in seen[2:])


def test_a_window_that_attends_to_all_blocks_is_the_dense_model() -> None:
    whole = prefill(weights(), ids())
    keys: list[Tensor] = []

    def choose(view: View) -> Tensor:
        keys.append(view.keys)
        return everything(view)

    found = run_window(weights(), SPEC, prefix(), ids()[START:], choose)
    without = run_window(weights(), SPEC, prefix(), ids()[START:], lambda view: None)
    torch.testing.assert_close(torch.stack(keys), whole.keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.nats, without.nats, rtol=1e-4, atol=1e-4)
    last = prefill(weights(), ids()[:-1]).logits
    expected = torch.nn.functional.cross_entropy(last[None], ids()[-1:])
    torch.testing.assert_close(found.nats[-1], expected, rtol=1e-4, atol=1e-4)
    assert bool(found.likeliest[-1]) == (int(last.argmax()) == int(ids()[-1]))


def test_a_window_in_small_pieces_is_the_window_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Choice("oracle", 5)
    at_once = run_window(weights(), SPEC, prefix(), ids()[START:], chooser(choice, materials()))
    monkeypatch.setitem(views.ELEMENTS, "cpu", 2000)
    in_pieces = run_window(weights(), SPEC, prefix(), ids()[START:], chooser(choice, materials()))
    torch.testing.assert_close(in_pieces.nats, at_once.nats, rtol=1e-4, atol=1e-4)


def test_a_window_of_a_model_in_bf16_predicts_what_the_reference_decoder_does() -> None:
    w = random_weights(replace(SHAPE, value_bytes=2), "cpu", seed=3)
    read, choice = read_prefix(w, ids()[:START]), POLICIES["sparda"]
    seen = list[Tensor]()
    found = run_window(
        w, SPEC, read, ids()[START:], noting(chooser(choice, Materials(w, {(1, 1): forecast_of(w)})), seen)
    )
    nats, _ = decoded("sparda", choice, seen, Materials(w), read)
    torch.testing.assert_close(found.nats, nats, rtol=0, atol=0.1)
    assert float((found.nats - nats).abs().mean()) < 0.02


def test_forgetting_what_lies_far_back_changes_the_loss() -> None:
    dense = run_window(weights(), SPEC, prefix(), ids()[START:], lambda view: None)
    few = run_window(weights(), SPEC, prefix(), ids()[START:], chooser(Choice("forced", 4), materials()))
    assert float((dense.nats - few.nats).abs().max()) > 0.01


def test_a_text_above_the_models_context_is_refused() -> None:
    long = torch.zeros(SHAPE.max_context, dtype=torch.int64)
    with pytest.raises(SpardaError, match="takes 1 to"):
        run_window(weights(), SPEC, prefix(), long, lambda view: None)


def test_a_window_that_begins_early_in_a_text_still_has_blocks_to_choose() -> None:
    short: Prefix = prefix().upto(1)
    found = run_window(weights(), SPEC, short, ids()[1:30], chooser(Choice("sparse", 4), materials()))
    assert bool(found.nats.isfinite().all())


@pytest.mark.parametrize("start", [3, 64, 113])
@pytest.mark.parametrize("per_token", [False, True])
def test_pooling_all_queries_at_once_is_the_references_pooling_of_each(start: int, per_token: bool) -> None:
    grid = Grid(SPEC, start, 21, torch.device("cpu"))
    count = grid.tokens if per_token else SPEC.compressed(grid.tokens)
    per = SPEC.block if per_token else SPEC.keys_per_block
    scores = torch.randn(2, 21, count, generator=torch.Generator().manual_seed(1))
    seen = grid.visible(count, per_token=per_token)
    found = pooled(scores.masked_fill(~seen, -torch.inf), grid.blocks, per)
    for i in range(21):
        t = start + i
        blocks, known = t // SPEC.block + 1, t if per_token else SPEC.compressed(t)
        assert int(seen[i].sum()) == known
        expected = reference_scores.pooled(scores[None, :, i, :known], blocks, per)[0]
        assert torch.equal(found[:, i, :blocks], expected)
        assert bool(found[:, i, blocks:].eq(-torch.inf).all() if known < per * blocks else True)


@pytest.mark.parametrize("spec", [SPEC, SparseSpec(8, 4, 2, 2, 3), SparseSpec(16, 4, 2, 0, 0)])
def test_forced_blocks_are_those_of_the_reference(spec: SparseSpec) -> None:
    grid = Grid(spec, 0, 60, torch.device("cpu"))
    scores = torch.zeros(1, 60, grid.blocks)
    found = grid.with_forced(scores)
    for t in range(60):
        blocks = t // spec.block + 1
        expected = reference_scores.forced(scores[None, :, t, :blocks], spec)[0]
        assert torch.equal(found[:, t, :blocks], expected)
        assert bool((found[:, t, blocks:] == -torch.inf).all())


def test_of_blocks_that_score_alike_the_lowest_are_chosen() -> None:
    grid = Grid(SPEC, 100, 1, torch.device("cpu"))
    chosen = grid.chosen(grid.with_forced(torch.zeros(1, 1, grid.blocks)), 5)
    assert chosen[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 11, 12]
