"""What a prompt leaves behind, and that decoding goes on from there as if the whole text had been read at once."""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("triton", reason="the engine's kernels need triton")

import torch
from torch import Tensor

from sparda.engine.config import Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.errors import SpardaError
from sparda.engine.policies import make_plan
from sparda.engine.prefill import Prefilled, prefill, prefill_bytes
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.tiers import Tiers
from sparda.engine.weights import Weights, random_weights, rope_table

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter: set TRITON_INTERPRET=1"
)

SHAPE = ModelShape(
    "tiny", layers=3, d_model=96, heads=6, kv_heads=2, head_dim=64, ffn=128, vocab=211, scale_depth=1.4,
    dim_model_base=48, rope_amplitude=1.1, value_bytes=4,
)  # fmt: skip
SPEC = SparseSpec(block=16, kernel=8, stride=4, init_blocks=1, local_blocks=2)
TOKENS = torch.randint(0, 211, (75,), generator=torch.Generator().manual_seed(4))


@functools.cache
def weights(value_bytes: int = 4) -> Weights:
    return random_weights(replace(SHAPE, value_bytes=value_bytes), "cpu", seed=1)


def plain(tokens: Tensor, w: Weights) -> tuple[list[Tensor], list[Tensor], Tensor, list[Tensor]]:
    """Keys, values per layer [H, S, D], the last logits, queries per layer [Hq, S, D].

    The whole S x S attention in double precision.
    """
    s, length = w.shape, len(tokens)
    cos, sin = (t.double() for t in rope_table(s, length, "cpu"))
    later = torch.ones(length, length, dtype=torch.bool).triu(1)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (s.d_model,), weight.double(), s.norm_eps)

    def rope(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x, keys, values, queries = w.embed[tokens].double(), [], [], []
    for layer in w.layers:
        rows = norm(x, layer.norm) @ layer.fused[: s.q_width + 2 * s.kv_width].double().T
        q, k, v = rows.view(length, -1, s.head_dim).transpose(0, 1).split([s.heads, s.kv_heads, s.kv_heads])
        keys.append(rope(k))
        values.append(v)
        queries.append(rope(q))
        out = torch.empty(length, s.heads, s.head_dim, dtype=torch.float64)
        for head in range(s.heads):
            logits = queries[-1][head] @ keys[-1][head // s.group].T / s.head_dim**0.5
            out[:, head] = logits.masked_fill(later, -torch.inf).softmax(-1) @ v[head // s.group]
        x = x + out.flatten(1) @ layer.output.double().T
        gate, up = (norm(x, layer.ffn_norm) @ layer.gate_up.double().T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer.down.double().T
    return keys, values, norm(x[-1], w.final_norm) @ w.head.double().T, queries


def same(got: Prefilled, want: tuple[list[Tensor], list[Tensor], Tensor, list[Tensor]], tolerance: float) -> bool:
    """Queries are compared where they were kept, as many as were."""
    pairs = [(got.keys, torch.stack(want[0])), (got.values, torch.stack(want[1])), (got.logits, want[2])]
    if got.queries is not None:
        pairs.append((got.queries, torch.stack(want[3])[:, :, : got.queries.shape[2]]))
    return all(g.shape == w.shape and float((g.double() - w).norm() / w.norm()) <= tolerance for g, w in pairs)


@pytest.mark.parametrize("length", [1, 2, 31, 75])
def test_a_prompt_is_read_as_by_dense_attention_in_double_precision(length: int) -> None:
    assert same(prefill(weights(), TOKENS[:length]), plain(TOKENS[:length], weights()), 1e-5)


def test_values_of_two_bytes_are_rounded_and_no_more() -> None:
    found = prefill(weights(2), TOKENS)
    assert {found.keys.dtype, found.values.dtype, found.logits.dtype} == {torch.bfloat16}
    assert same(found, plain(TOKENS, weights(2)), 0.02)


@pytest.mark.parametrize("chunk", [1, 16, 37, 74, 75, 200])
def test_the_size_of_a_chunk_leaves_no_trace(chunk: int) -> None:
    assert same(prefill(weights(), TOKENS, chunk=chunk), plain(TOKENS, weights()), 1e-5)


@pytest.mark.parametrize("chunk", [1, 16, 37, 75, 200])
@pytest.mark.parametrize(("sample", "kept"), [(1, 1), (16, 16), (40, 40), (75, 75), (2048, 75)])
def test_the_queries_of_the_first_tokens_are_kept_as_they_are_rotated(sample: int, kept: int, chunk: int) -> None:
    found = prefill(weights(), TOKENS, chunk=chunk, sample=sample)
    assert found.queries is not None
    assert found.queries.shape == (3, 6, kept, 64)
    assert same(found, plain(TOKENS, weights()), 1e-5)


def test_no_queries_are_kept_unless_asked_for() -> None:
    assert prefill(weights(), TOKENS).queries is None


def test_no_token_sees_those_after_it() -> None:
    changed = TOKENS.clone()
    changed[40:] = 3
    before, after = (prefill(weights(), t, chunk=16) for t in (TOKENS, changed))
    assert torch.equal(before.keys[:, :, :40], after.keys[:, :, :40])
    assert not torch.equal(before.keys[:, :, 41:], after.keys[:, :, 41:])


@pytest.mark.parametrize("length", [0, 131073])
def test_a_prompt_that_is_empty_or_longer_than_the_model_reads_is_refused(length: int) -> None:
    with pytest.raises(SpardaError, match=f"a prompt of {length} tokens; tiny takes 1 to 131072"):
        prefill(weights(), torch.zeros(length, dtype=torch.int64))


def test_keys_and_values_of_the_prompt_take_the_most_memory() -> None:
    found = prefill(weights(), TOKENS)
    kept = 4 * (found.keys.numel() + found.values.numel())
    assert kept < prefill_bytes(SHAPE, 75, chunk=1) < kept + 4 * 4096
    assert prefill_bytes(SHAPE, 150, chunk=1) - prefill_bytes(SHAPE, 75, chunk=1) == kept
    sampled = prefill(weights(), TOKENS, sample=90).queries
    assert sampled is not None
    assert prefill_bytes(SHAPE, 75, chunk=1, sample=90) - prefill_bytes(SHAPE, 75, chunk=1) == 4 * sampled.numel()


@interpreted
@pytest.mark.parametrize(("policy", "top_k"), [("dense", 4), ("sparda", 7), ("sparse", 7), ("sparda-resident", 7)])
@pytest.mark.parametrize("length", [6, 30])
def test_decoding_goes_on_as_if_the_whole_text_had_been_the_prompt(policy: str, top_k: int, length: int) -> None:
    """Every block is chosen: 7 of them hold the capacity. The steps cross a block's end and a key's window."""
    w, config, workload = weights(2), Config(policy, top_k=top_k), Workload(1, 100, 0.0)
    tiers = Tiers(w.shape, SPEC, workload, config, "cpu", capacity=100)
    decoder = Decoder(make_plan(w.shape, SPEC, workload, config), w, tiers)
    tiers.admit(0, prefill(w, TOKENS[:length]))
    for end in range(length, length + 3):
        decoder.tokens.fill_(int(TOKENS[end]))
        decoder.step()
        whole = prefill(w, TOKENS[: end + 1]).logits.float()
        assert float((decoder.logits[0].float() - whole).abs().max() / whole.abs().max()) <= 0.06
    assert tiers.positions.tolist() == [length + 3]
