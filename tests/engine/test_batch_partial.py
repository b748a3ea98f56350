"""InfiniGen on a model's own prompts: the first prompt gives the directions of the partial keys, and they serve."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("triton", reason="the engine's kernels need triton")

import torch
from torch import Tensor

from sparda.engine import batch as batch_module
from sparda.engine import room
from sparda.engine.batch import Batch
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.memory import memory_of
from sparda.engine.partial import SAMPLE, PartialKeys, random_basis
from sparda.engine.prefill import prefill, prefill_bytes
from sparda.engine.reference import chosen_blocks
from sparda.engine.reference_scores import best_blocks, forced, pooled
from sparda.engine.shapes import MODELS, ModelShape, SparseSpec
from sparda.engine.weights import Weights, random_weights

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter: set TRITON_INTERPRET=1"
)

SHAPE = ModelShape("tiny", layers=3, d_model=64, heads=4, kv_heads=2, head_dim=128, ffn=64, vocab=211, value_bytes=4)
WHOLE = replace(SHAPE, head_dim=32)
"""A head as short as a partial key."""

SPEC = SparseSpec(block=16, kernel=8, stride=4, init_blocks=1, local_blocks=1)
LONG, SHORT = (torch.randint(0, 211, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (150, 5))
"""Ten blocks, of which four are chosen; and less than a block."""


@functools.cache
def weights(shape: ModelShape = SHAPE) -> Weights:
    return random_weights(shape, "cpu", seed=1)


def batch_of(w: Weights, policy: str = "infinigen") -> Batch:
    return Batch(w, Config(policy, top_k=4), rows=2, capacity=192, spec=SPEC)


def partial_of(batch: Batch) -> PartialKeys:
    assert batch.tiers.partial is not None
    return batch.tiers.partial


def with_planes(w: Weights, planes: int) -> Weights:
    """Queries and keys that lie in a few of the planes that positions turn, and so stay there when they are turned."""
    s, half = w.shape, w.shape.head_dim // 2
    seen = torch.zeros(s.head_dim)
    seen[:planes] = seen[half : half + planes] = 1.0
    rows = torch.ones(w.layers[0].fused.shape[0])
    rows[: s.q_width + s.kv_width] = seen.repeat(s.heads + s.kv_heads) * (half / planes) ** 0.5
    return replace(w, layers=tuple(replace(layer, fused=layer.fused * rows[:, None]) for layer in w.layers))


def mass(queries: Tensor, keys: Tensor, basis: Tensor) -> float:
    """Softmax mass of the exact scores on the eighth of the tokens that the partial scores put first.

    queries [H, N, D], means of their groups; keys [H, N, D]; basis [H, D, R].
    """
    exact = (queries @ keys.mT * keys.shape[-1] ** -0.5).softmax(-1)
    best = ((queries @ basis) @ (keys @ basis).mT).topk(keys.shape[1] // 8, dim=-1).indices
    return float(exact.gather(-1, best).sum(-1).mean())


def test_with_every_direction_the_blocks_are_those_of_the_exact_scores_of_the_guess() -> None:
    w = weights(WHOLE)
    assert w.shape.partial_dims == w.shape.head_dim
    batch = batch_of(w)
    batch.admit(LONG, 5)
    first = int(batch.decoder.tokens[0])
    batch.step()
    chosen = chosen_blocks(batch.tiers, batch.decoder.chosen_slots[:, :1], batch.decoder.chosen_count[:, :1])
    keys = prefill(w, torch.tensor([*LONG, first])).keys
    for layer in (1, 2):
        # What was guessed in the layer before, against every token before the new one.
        guess = batch.decoder.run.selection_query(layer)[:1]
        scores = torch.einsum("bhd,htd->bht", guess, keys[layer, :, :150])
        assert torch.equal(chosen[layer], best_blocks(forced(pooled(scores, 10, SPEC.block), SPEC), 4))


@pytest.mark.parametrize("prompt", [LONG, SHORT, SHORT[:1]], ids=["long", "short", "one token"])
def test_the_first_prompt_gives_orthonormal_directions_that_are_not_the_random_ones(prompt: list[int]) -> None:
    batch = batch_of(weights())
    partial = partial_of(batch)
    blind, address = random_basis(SHAPE, 2, "cpu"), partial.basis.data_ptr()
    assert torch.equal(partial.basis, blind)
    batch.admit(prompt, 4)
    torch.testing.assert_close(partial.basis.mT @ partial.basis, torch.eye(32).expand(2, 2, -1, -1), rtol=0, atol=1e-5)
    # How much of the random directions is among them: all of it, were they the same in another order.
    shared = (blind.mT @ partial.basis).square().sum((2, 3)) / 32
    assert float(shared.max()) < 0.7
    assert partial.basis.data_ptr() == address


def test_the_stored_keys_of_a_prompt_lie_along_its_own_directions() -> None:
    batch = batch_of(weights())
    row = batch.admit(LONG, 4)
    keys = prefill(weights(), torch.tensor(LONG)).keys[1:]
    expected = torch.einsum("lhtd,lhdr->lhtr", keys, partial_of(batch).basis)
    torch.testing.assert_close(partial_of(batch).rows[:, row, :, :150], expected, rtol=1e-4, atol=1e-4)


def test_a_quarter_of_the_directions_finds_more_of_the_scores_than_random_ones_where_keys_lie_in_few() -> None:
    w = with_planes(weights(), 24)
    batch = batch_of(w)
    batch.admit(LONG, 4)
    found = prefill(w, torch.tensor(LONG), sample=150)
    assert found.queries is not None
    blind = random_basis(SHAPE, 2, "cpu")
    for layer in (1, 2):
        queries, keys = found.queries[layer].unflatten(0, (2, 2)).mean(1), found.keys[layer]
        learnt = mass(queries, keys, partial_of(batch).basis[layer - 1])
        assert learnt > 1.2 * mass(queries, keys, blind[layer - 1])


def test_later_prompts_and_steps_leave_the_directions_alone() -> None:
    batch = batch_of(weights())
    batch.admit(SHORT, 3)
    before = partial_of(batch).basis.clone()
    batch.generate([LONG], 2)
    assert torch.equal(partial_of(batch).basis, before)


def test_a_prompt_that_ends_with_its_first_token_leaves_the_directions_to_the_next() -> None:
    batch = batch_of(weights())
    batch.admit(LONG, 1)
    assert torch.equal(partial_of(batch).basis, random_basis(SHAPE, 2, "cpu"))
    batch.admit(SHORT, 2)
    assert not torch.equal(partial_of(batch).basis, random_basis(SHAPE, 2, "cpu"))


@pytest.mark.parametrize(("policy", "asked"), [("infinigen", [SAMPLE, 0, 0]), ("sparda", [0, 0, 0])])
def test_queries_are_sampled_once_and_only_where_partial_keys_are_kept(
    monkeypatch: pytest.MonkeyPatch, policy: str, asked: list[int]
) -> None:
    samples: list[int] = []

    def noted(w: Weights, tokens: Tensor, **given: Any) -> Any:
        samples.append(given["sample"])
        return prefill(w, tokens, **given)

    monkeypatch.setattr(batch_module, "prefill", noted)
    batch_of(weights(), policy).generate([SHORT, LONG, SHORT], 2)
    assert samples == asked


def test_partial_keys_and_sampled_queries_are_counted_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, spec, workload, config = MODELS["minicpm4.1-8b"], SparseSpec(), Workload(4, 65536, 0.0), Config("infinigen")
    memory = memory_of(shape, spec, workload, config)
    needed = memory.gpu_bytes - memory.weights_bytes + prefill_bytes(shape, 65536, sample=SAMPLE)
    assert memory.side_bytes > 0
    monkeypatch.setattr(room, "host_free_bytes", lambda: None)
    monkeypatch.setattr(room, "gpu_free_bytes", lambda _device: needed)
    room.check_room(shape, spec, workload, config, torch.device("cuda"))
    monkeypatch.setattr(room, "gpu_free_bytes", lambda _device: needed - 1)
    with pytest.raises(SpardaError, match="GiB of GPU memory"):
        room.check_room(shape, spec, workload, config, torch.device("cuda"))
