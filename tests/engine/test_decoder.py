"""Decode steps of a tiny model in Triton's interpreter, held to the plain reference."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field, replace

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("triton", reason="the engine's kernels need triton")

import torch
from torch import Tensor

from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.decoder import Decoder
from sparda.engine.errors import SpardaError
from sparda.engine.kinds import attention
from sparda.engine.occupancy import attention_splits
from sparda.engine.plan import Op
from sparda.engine.policies import make_plan, resident_layers
from sparda.engine.reference import ReferenceDecoder, chosen_blocks, history_of
from sparda.engine.run import layer_of
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.tiers import Tiers
from sparda.engine.trace import rotating_trace
from sparda.engine.weights import Weights, random_weights, rope_table
from sparda.kernels.launch import with_multiprocessors
from sparda.kernels.prefetch import prefetch

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter: set TRITON_INTERPRET=1"
)

SHAPE = ModelShape(
    "tiny",
    layers=3,
    d_model=96,
    heads=6,
    kv_heads=2,
    head_dim=64,
    ffn=128,
    vocab=211,
    scale_depth=1.4,
    dim_model_base=48,
)
SPEC = SparseSpec(block=16, kernel=8, stride=4, init_blocks=1, local_blocks=2)
CONTEXT = 16 * 11 + 13
STEPS = 4
"""The third step fills a block and a compressed key's window; the fourth writes into a new block and reads the key."""

CASES = [
    ("sparda", 0, 1),
    ("sparda", 1, 2),
    ("sparda", 2, 1),
    ("sparda-on-demand", 1, 2),
    ("sparse", 1, 1),
    ("sparse-resident", 1, 1),
    ("sparda-resident", 1, 2),
    ("sparda-resident", 2, 1),
    ("infinigen", 1, 2),
    ("nosa", 1, 2),
    ("shallow", 1, 2),
    ("dense", 1, 2),
]
"""(policy, lookahead, batch)"""

RESIDENT = ("dense", "sparse-resident", "sparda-resident")
OFFLOADING = [case for case in CASES if case[0] not in RESIDENT]


@dataclass
class Run:
    """What a few steps left behind."""

    logits: list[Tensor] = field(default_factory=list)
    expected: list[Tensor] = field(default_factory=list)
    sampled: list[Tensor] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    """Where a step's token differed between its slot and host memory."""
    overlooked: float = 0.0
    misses: list[int] = field(default_factory=list)


@functools.cache
def weights() -> Weights:
    return random_weights(SHAPE, "cpu", seed=1)


def config_of(policy: str, lookahead: int, **turned: float) -> Config:
    """Layer 0 scores where one layer scores for all, anew in every second step; two of twelve blocks in reserve."""
    own = {"score_layer": 0, "refresh_steps": 2, "reserve": 0.15, **turned}
    return replace(Config(policy, top_k=6, lookahead=lookahead), **own)  # type: ignore[arg-type]


def decoder_of(config: Config, batch: int) -> Decoder:
    workload = Workload(batch, CONTEXT, 0.0)
    tiers = Tiers(SHAPE, SPEC, workload, config, "cpu", capacity=CONTEXT + 32)
    tiers.seed(3, [w.eviction for w in weights().layers])
    return Decoder(make_plan(SHAPE, SPEC, workload, config), weights(), tiers)


@functools.cache
def run(policy: str, lookahead: int, batch: int, resident: int = 0) -> Run:
    """Steps of the engine and, on the engine's choice of blocks, of the reference."""
    config, done = config_of(policy, lookahead, resident_blocks=resident), Run()
    decoder = decoder_of(config, batch)
    tiers = decoder.tiers
    basis = tiers.partial.basis if tiers.partial else None
    reference = ReferenceDecoder(weights(), SPEC, config, history_of(tiers), basis=basis)
    for step in range(STEPS):
        tokens = torch.arange(batch) * 11 + 7 * step
        decoder.tokens.copy_(tokens)
        decoder.issue()
        done.expected.append(reference.step(tokens, chosen_blocks(tiers, decoder.chosen_slots, decoder.chosen_count)))
        done.logits.append(decoder.logits.clone())
        done.sampled.append(decoder.tokens.clone())
        done.unwritten += unwritten(tiers, CONTEXT + step)
    done.overlooked = reference.overlooked
    done.misses = tiers.miss_total.tolist()
    return done


def unwritten(tiers: Tiers, position: int) -> list[str]:
    """Layers, sequences and heads whose token at ``position`` is not in host memory as it is in its slot."""
    block, token = divmod(position, SPEC.block)
    found = []
    pool = tiers.pool.view(-1, 2, SPEC.block, SHAPE.head_dim)
    for layer, tier in enumerate(tiers.layers):
        if tier.pool_base < 0:
            continue
        for pair in range(tiers.heads):
            b, h = divmod(pair, SHAPE.kv_heads)
            held = tier.cache[b, h, int(tier.slot_of_block[b, h, block]), :, token]
            if not torch.equal(held, pool[tier.pool_base + pair * tiers.blocks + block, :, token]):
                found.append(f"layer {layer} sequence {b} head {h} position {position}")
    return found


@pytest.mark.parametrize(("policy", "lookahead", "batch"), CASES)
def test_a_step_gives_the_logits_of_the_reference_across_block_and_key_boundaries(
    policy: str, lookahead: int, batch: int
) -> None:
    done = run(policy, lookahead, batch)
    for logits, expected in zip(done.logits, done.expected, strict=True):
        assert float((logits.float() - expected).abs().max() / expected.abs().max()) <= 0.06


@pytest.mark.parametrize(("policy", "lookahead", "batch"), CASES)
def test_the_blocks_chosen_are_the_best_but_for_rounding(policy: str, lookahead: int, batch: int) -> None:
    assert run(policy, lookahead, batch).overlooked < 0.1


@pytest.mark.parametrize(("policy", "lookahead", "batch"), CASES)
def test_the_token_left_to_feed_next_is_the_likeliest(policy: str, lookahead: int, batch: int) -> None:
    done = run(policy, lookahead, batch)
    for sampled, logits in zip(done.sampled, done.logits, strict=True):
        assert torch.equal(sampled, logits.argmax(-1))


@pytest.mark.parametrize(("policy", "lookahead", "batch"), OFFLOADING)
def test_every_token_reaches_host_memory_past_a_full_block_too(policy: str, lookahead: int, batch: int) -> None:
    assert run(policy, lookahead, batch).unwritten == []


@pytest.mark.parametrize(("policy", "lookahead", "batch"), CASES)
def test_only_layers_in_host_memory_fetch(policy: str, lookahead: int, batch: int) -> None:
    misses = run(policy, lookahead, batch).misses
    whole = resident_layers(config_of(policy, lookahead), 3)
    assert misses[:whole] == [0] * whole
    assert all(count > 0 for count in misses[whole:])


def test_prefetching_gives_the_very_bits_of_fetching_on_demand() -> None:
    ahead, demand = run("sparda", 1, 2), run("sparda-on-demand", 1, 2)
    assert all(map(torch.equal, ahead.logits, demand.logits))
    assert ahead.misses == demand.misses


def test_two_layers_of_lookahead_give_the_very_bits_of_fetching_on_demand() -> None:
    ahead, demand = run("sparda", 2, 1), run("sparda-on-demand", 2, 1)
    assert all(map(torch.equal, ahead.logits, demand.logits))
    assert ahead.misses == demand.misses


def test_a_decoder_built_for_another_count_of_multiprocessors_is_cut_for_that_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut: list[int] = []
    monkeypatch.setattr(attention, "dense_attention", lambda *args, splits: cut.append(splits))
    for sms in (2, 4, 132):
        with with_multiprocessors(sms):
            decoder = decoder_of(Config("dense", top_k=6), 1)
            assert decoder.run.sms == sms
        decoder.bindings["dense_attention"](decoder.plan.of_kind("dense_attention")[0])
        assert cut[-1] == attention_splits(SHAPE.kv_heads, decoder.tiers.blocks, sms)
    assert cut == [1, 2, 3]


def test_what_the_host_gathers_gives_the_very_bits_of_what_the_gpu_fetches_by_itself() -> None:
    config = Config("infinigen", top_k=6)
    gathered, fetched = decoder_of(config, 2), decoder_of(config, 2)
    run, tiers = fetched.run, fetched.tiers

    def fetch(op: Op) -> None:
        layer = layer_of(op)
        count = tiers.miss_count[layer : layer + 1]
        src, dst = run.miss_src[layer], run.miss_dst[layer]
        prefetch(tiers.pool, tiers.layers[layer].rows, src, dst, count, ctas=2, warps=1, stages=1)

    nothing = dict.fromkeys(("gather", "upload"), lambda op: None)
    fetched.bindings = {**fetched.bindings, **nothing, "scatter": fetch}
    for _ in range(STEPS):
        gathered.issue()
        fetched.issue()
        assert torch.equal(gathered.logits, fetched.logits)
    assert gathered.tiers.miss_total.tolist() == tiers.miss_total.tolist()


def test_every_new_token_has_its_partial_key_in_every_layer_that_is_scored_by_them() -> None:
    decoder = decoder_of(Config("infinigen", top_k=6), 2)
    tiers = decoder.tiers
    assert tiers.partial is not None
    assert tiers.partial.rows.shape == (2, 2, 2, tiers.blocks * 16, 32)
    tiers.partial.rows[:, :, :, CONTEXT:] = torch.nan
    for _ in range(STEPS):
        decoder.issue()
    rows = tiers.partial.rows[:, :, :, CONTEXT : CONTEXT + STEPS].float()
    for layer, tier in enumerate(tiers.layers[1:]):
        for step in range(STEPS):
            block, token = divmod(CONTEXT + step, SPEC.block)
            slots = tier.slot_of_block[:, :, block].long()[..., None, None, None, None]
            keys = tier.cache.take_along_dim(slots, 2)[:, :, 0, 0, token].float()
            expected = torch.einsum("bhd,hdr->bhr", keys, tiers.partial.basis[layer])
            torch.testing.assert_close(rows[layer, :, :, step], expected, rtol=8e-3, atol=1e-2)


@pytest.mark.parametrize(("policy", "lookahead", "batch"), [("sparse", 1, 1), ("sparda", 1, 2), ("sparda", 2, 1)])
def test_fetching_from_host_memory_gives_the_very_bits_of_the_resident_cache(
    policy: str, lookahead: int, batch: int
) -> None:
    twin = run(f"{policy}-resident", lookahead, batch)
    assert all(map(torch.equal, run(policy, lookahead, batch).logits, twin.logits))


@pytest.mark.parametrize("policy", ["nosa", "shallow"])
def test_fetching_what_is_missing_gives_the_very_bits_of_slots_for_all_blocks(policy: str) -> None:
    few, all_blocks = run(policy, 1, 2), run(policy, 1, 2, resident=40)
    assert all_blocks.misses == [0, 0, 0]
    assert all(map(torch.equal, few.logits, all_blocks.logits))


def test_a_layer_that_shares_a_choice_has_the_same_blocks_for_every_head_and_layer() -> None:
    decoder = decoder_of(config_of("shallow", 1), 2)
    decoder.step()
    _, one, other = chosen_blocks(decoder.tiers, decoder.chosen_slots, decoder.chosen_count)
    assert torch.equal(one, other)
    assert torch.equal(one[:, 0], one[:, 1])
    assert not torch.equal(one[0], one[1])


@pytest.mark.parametrize(
    ("policy", "says"),
    [("nosa", "layer 2 of tiny has no eviction head"), ("shallow", "tiny was loaded without a block scorer")],
)
def test_weights_that_a_policy_needs_and_the_model_lacks_are_named(policy: str, says: str) -> None:
    *first, last = weights().layers
    poorer = replace(weights(), layers=(*first, replace(last, eviction=None)), scorer=None)
    config, workload = config_of(policy, 1), Workload(1, CONTEXT, 0.0)
    tiers = Tiers(SHAPE, SPEC, workload, config, "cpu", capacity=CONTEXT + 32)
    with pytest.raises(SpardaError, match=says):
        Decoder(make_plan(SHAPE, SPEC, workload, config), poorer, tiers)


@pytest.mark.parametrize(
    ("policy", "lookahead"), [(p, a) for p in POLICIES for a in (0, 1, 2) if p != "infinigen" or a == 1]
)
def test_every_kind_of_operation_is_bound(policy: str, lookahead: int) -> None:
    decoder = decoder_of(config_of(policy, lookahead), 1)
    assert {op.kind for op in decoder.plan} <= decoder.bindings.keys()


def test_a_trace_chooses_in_place_of_the_scores_and_all_else_goes_on() -> None:
    spec, context = SparseSpec(block=16, kernel=8, stride=4, init_blocks=1, local_blocks=1), 16 * 20 + 5
    config, workload = Config(top_k=5), Workload(1, context, 0.0)
    tiers = Tiers(SHAPE, spec, workload, config, "cpu", capacity=context + 16)
    tiers.seed(3)
    trace = rotating_trace(SHAPE, spec, workload, config, blocks=tiers.blocks, device="cpu")
    decoder = Decoder(make_plan(SHAPE, spec, workload, config), weights(), tiers, trace)
    decoder.step()
    forced = torch.zeros(1, 2, 21, dtype=torch.bool)
    forced[..., [0, 19, 20]] = True
    for chosen in chosen_blocks(tiers, decoder.chosen_slots, decoder.chosen_count):
        assert torch.equal(chosen, forced | (trace.scores[0, ..., :21] > 0))


def dense_logits(history: list[tuple[Tensor, Tensor]], token: int) -> Tensor:
    """Logits after ``token``, attending to the whole history: in double precision, without blocks or rounding."""
    w = weights()
    position = history[0][0].shape[2]
    cos, sin = (t[-1].double() for t in rope_table(SHAPE, position + 1, "cpu"))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape, weight.double(), SHAPE.norm_eps)

    def rope(x: Tensor) -> Tensor:
        a, b = x.view(-1, SHAPE.head_dim).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = w.embed[token].double()
    for layer, (old_k, old_v) in zip(w.layers, history, strict=True):
        sizes = [SHAPE.q_width, SHAPE.kv_width, SHAPE.kv_width]
        q, k, v = (layer.fused.double() @ norm(x, layer.norm))[: sum(sizes)].split(sizes)
        keys = torch.cat([old_k[0].double(), rope(k)[:, None]], 1).repeat_interleave(SHAPE.group, 0)
        values = torch.cat([old_v[0].double(), v.view(-1, 1, SHAPE.head_dim)], 1).repeat_interleave(SHAPE.group, 0)
        out = torch.nn.functional.scaled_dot_product_attention(rope(q)[:, None], keys, values)
        x = x + layer.output.double() @ out.flatten()
        gate, up = (layer.gate_up.double() @ norm(x, layer.ffn_norm)).chunk(2)
        x = x + layer.down.double() @ (torch.nn.functional.silu(gate) * up)
    return w.head.double() @ norm(x, w.final_norm)


def test_the_dense_policy_is_dense_attention() -> None:
    decoder = decoder_of(config_of("dense", 1), 1)
    history = history_of(decoder.tiers)
    dense = dense_logits(history, 5)
    decoder.tokens.fill_(5)
    decoder.step()
    assert float((decoder.logits[0].double() - dense).abs().max() / dense.abs().max()) <= 0.03
    assert decoder.tiers.miss_total.tolist() == [0, 0, 0]


@pytest.mark.parametrize("policy", ["sparda", "sparse"])
@pytest.mark.parametrize("top_k", [12, 40])
def test_the_reference_that_may_choose_every_block_is_dense_attention(policy: str, top_k: int) -> None:
    history = history_of(decoder_of(Config("sparse-resident", top_k=6), 1).tiers)
    dense = dense_logits(history, 5)
    logits = ReferenceDecoder(weights(), SPEC, Config(policy, top_k=top_k), list(history)).step(torch.tensor([5]))
    assert float((logits[0].double() - dense).abs().max() / dense.abs().max()) <= 0.03


def test_the_reference_that_may_choose_few_blocks_is_not_dense_attention() -> None:
    history = history_of(decoder_of(Config("sparse-resident", top_k=6), 1).tiers)
    dense = dense_logits(history, 5)
    logits = ReferenceDecoder(weights(), SPEC, Config(top_k=6), list(history)).step(torch.tensor([5]))
    assert float((logits[0].double() - dense).abs().max() / dense.abs().max()) > 0.06
