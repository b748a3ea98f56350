"""Turns of thread blocks: counted by hand, and never faster than the memory."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.calibrate.waves import LINEARS, attention_turns, linear_ns
from sparda.engine.occupancy import attention_splits, free_beside_attention
from sparda.engine.shapes import MODELS
from sparda.sim.costs import Machine

MODEL = MODELS["minicpm4.1-8b"]
HBM, PER_SM = 4000.0, 80.0
MACHINE = Machine("none", "NVIDIA None", 132, HBM, 50.0, 52.0, 1 << 37, 1 << 38, 55.0, PER_SM)
MIB = float(1 << 20)


def gateup(sms: int, batch: int = 16, per_sm: float = PER_SM) -> float:
    return linear_ns("gateup", batch, MODEL, replace(MACHINE, sms=sms, sm_read_gb_s=per_sm))


# Gate and up of MiniCPM4.1-8B: 16384 rows each in tiles of 64, so 256 tiles of 2 x 64 x 4096 x 2 bytes = 1 MiB. At
# batch 16 a pipeline holds 3 stages of (2 x 64 + 16) rows x 128 columns x 2 bytes = 108 KiB: two fit in 227 KiB.


def test_at_132_multiprocessors_all_tiles_of_gateup_have_a_place_at_once() -> None:
    assert gateup(132) == pytest.approx(256 * MIB / HBM)


def test_at_116_multiprocessors_a_tenth_of_gateup_waits_and_then_reads_at_a_multiprocessors_pace() -> None:
    assert 24 / HBM < 1 / PER_SM
    assert gateup(116) == pytest.approx(232 * MIB / HBM + MIB / PER_SM)


def test_at_68_multiprocessors_the_last_turn_of_gateup_is_nearly_full_and_memory_sets_the_pace() -> None:
    assert 120 / HBM > 2 / PER_SM
    assert gateup(68) == pytest.approx(256 * MIB / HBM)


def test_fewer_multiprocessors_may_be_faster_where_the_turns_come_out_even() -> None:
    assert gateup(68) < gateup(116)


def test_where_a_multiprocessors_pace_is_not_known_memory_sets_it() -> None:
    assert gateup(116, per_sm=0.0) == pytest.approx(256 * MIB / HBM)


@given(st.sampled_from(LINEARS), st.integers(1, 128), st.integers(1, 300), st.floats(1.0, 500.0))
def test_no_turns_are_faster_than_memory_and_only_the_last_is_slower(
    kind: str, batch: int, sms: int, per_sm: float
) -> None:
    machine = replace(MACHINE, sms=sms, sm_read_gb_s=per_sm)
    by_memory = linear_ns(kind, batch, MODEL, replace(machine, sm_read_gb_s=0.0))
    weights = {
        "qkv": MODEL.qkvf_width * MODEL.d_model,
        "oproj": MODEL.d_model * MODEL.q_width,
        "gateup": 2 * MODEL.ffn * MODEL.d_model,
        "down": MODEL.d_model * MODEL.ffn,
        "lm_head": MODEL.vocab * MODEL.d_model,
    }[kind]
    # A tile that is part-filled counts as full.
    assert weights * 2 / HBM <= by_memory * (1 + 1e-12) <= 1.01 * weights * 2 / HBM
    took = linear_ns(kind, batch, MODEL, machine)
    assert took >= by_memory * (1 - 1e-12)
    # At most seven pipelines of the least tile fit in a multiprocessor: so many tiles may come one after the other.
    largest = 2 * 64 * max(MODEL.d_model, MODEL.ffn) * 2
    assert took <= by_memory + 7 * largest / per_sm


@given(st.sampled_from(LINEARS), st.integers(1, 64), st.integers(1, 300))
def test_faster_multiprocessors_or_memory_never_slow_a_linear(kind: str, batch: int, sms: int) -> None:
    machine = replace(MACHINE, sms=sms)
    before = linear_ns(kind, batch, MODEL, machine)
    assert linear_ns(kind, batch, MODEL, replace(machine, sm_read_gb_s=2 * PER_SM)) <= before
    assert linear_ns(kind, batch, MODEL, replace(machine, hbm_gb_s=2 * HBM)) <= before


@pytest.mark.parametrize(
    ("batch", "top_k", "sms", "turns"),
    [
        # 2 heads: 24 thread blocks of 4 blocks each, since fewer are not worth one.
        (1, 96, 132, 4),
        # 32 heads by 4 thread blocks of 24 blocks each fill 128 of 132.
        (16, 96, 132, 24),
        # By 3 of 32 on 116.
        (16, 96, 116, 32),
        # By 2 of 48 on 68.
        (16, 96, 68, 48),
        # 128 heads have a thread block each and go through all 96; on 116 multiprocessors in two turns.
        (64, 96, 132, 96),
        (64, 96, 116, 192),
    ],
)
def test_turns_of_attention_counted_by_hand(batch: int, top_k: int, sms: int, turns: int) -> None:
    assert attention_turns(batch, top_k, MODEL, sms) == turns


@given(st.integers(1, 128), st.integers(1, 300), st.integers(1, 300))
def test_attention_reads_every_block_and_more_multiprocessors_never_make_it_longer(
    batch: int, top_k: int, sms: int
) -> None:
    turns, heads = attention_turns(batch, top_k, MODEL, sms), batch * MODEL.kv_heads
    busy = min(sms, heads * attention_splits(heads, top_k, sms))
    assert turns * busy >= heads * top_k, "the busiest does its share or more"
    assert attention_turns(batch, top_k, MODEL, sms + 1) <= turns


@given(st.integers(1, 64), st.integers(1, 200), st.integers(1, 300))
def test_what_an_attention_leaves_free_is_what_its_one_turn_does_not_take(batch: int, top_k: int, sms: int) -> None:
    heads = batch * MODEL.kv_heads
    blocks, free = heads * attention_splits(heads, top_k, sms), free_beside_attention(heads, top_k, sms)
    assert free == max(0, sms - blocks)
    assert (ceil(blocks / sms) > 1) <= (free == 0)


def test_a_multiprocessor_with_less_shared_memory_has_fewer_of_a_linears_blocks_at_a_time() -> None:
    # Two pipelines of 108 KiB in 228 KiB, one in 164: of 256 tiles on 250 multiprocessors six then wait for a turn.
    large, small = (replace(MACHINE, sms=250, shared_kib_per_sm=kib) for kib in (228, 164))
    assert linear_ns("gateup", 16, MODEL, large) == pytest.approx(256 * MIB / HBM)
    assert linear_ns("gateup", 16, MODEL, small) == pytest.approx(250 * MIB / HBM + MIB / PER_SM)
