"""Bytes on the GPU and in host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.memory import Memory, memory_of
from sparda.engine.shapes import MODELS, SparseSpec

SHAPE = MODELS["minicpm4.1-8b"]
SPEC = SparseSpec()
GIB = 1 << 30


def bytes_of(config: Config, workload: Workload | None = None) -> Memory:
    return memory_of(SHAPE, SPEC, workload or Workload(), config)


def test_the_weights_of_minicpm_are_about_16_4_gigabytes_and_the_forecast() -> None:
    forecast = SHAPE.layers * SHAPE.kv_width * SHAPE.d_model * 2
    assert (SHAPE.weight_bytes - forecast) / 1e9 == pytest.approx(16.4, abs=0.1)
    assert forecast / SHAPE.weight_bytes < 0.01


def test_a_128k_sequence_has_four_gibibytes_of_keys_and_values() -> None:
    blocks = SPEC.blocks(131072)
    assert SHAPE.layers * SHAPE.kv_heads * blocks * SHAPE.block_bytes(SPEC) == 4 * GIB
    memory = bytes_of(Config(policy="sparse-resident"), Workload(batch=1))
    assert memory.resident_bytes == pytest.approx(4 * GIB, rel=0.001)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_resident_policies_alone_pin_nothing(policy: str) -> None:
    assert (bytes_of(Config(policy=policy)).pinned_bytes == 0) == (policy == "dense" or policy.endswith("-resident"))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_use_but_the_weights_grows_with_the_batch(policy: str) -> None:
    small, large = (bytes_of(Config(policy=policy), Workload(batch=b)) for b in (4, 8))
    assert large.weights_bytes == small.weights_bytes
    assert large.resident_bytes == 2 * small.resident_bytes
    assert large.compressed_bytes == 2 * small.compressed_bytes
    assert large.pinned_bytes == 2 * small.pinned_bytes
    assert large.workspace_bytes > small.workspace_bytes
    assert large.gpu_bytes > small.gpu_bytes


@pytest.mark.parametrize("policy", POLICIES)
def test_a_longer_context_takes_more(policy: str) -> None:
    short, long = (bytes_of(Config(policy=policy), Workload(context_tokens=t)) for t in (65536, 131072))
    assert long.gpu_bytes > short.gpu_bytes
    assert long.pinned_bytes >= short.pinned_bytes


@pytest.mark.parametrize("policy", ["sparda", "sparda-on-demand", "sparse"])
def test_offloading_takes_less_of_the_gpu_and_more_resident_blocks_take_more(policy: str) -> None:
    few, many = (bytes_of(Config(policy=policy, resident_blocks=n)).gpu_bytes for n in (96, 256))
    whole = bytes_of(Config(policy="sparse-resident")).gpu_bytes
    assert few < many < whole


def test_more_slots_than_blocks_take_no_more_than_the_whole_cache() -> None:
    whole = bytes_of(Config(policy="sparse-resident"))
    assert bytes_of(Config(policy="sparse", resident_blocks=100_000)).resident_bytes == whole.resident_bytes


def test_every_layer_of_lookahead_moves_a_layer_from_the_host_to_the_gpu() -> None:
    for ahead in (1, 2, 3):
        near, far = (bytes_of(Config(lookahead=d)) for d in (ahead, ahead + 1))
        assert far.resident_bytes > near.resident_bytes
        assert far.pinned_bytes < near.pinned_bytes


def test_partial_keys_are_an_eighth_of_the_keys_and_values_that_are_offloaded() -> None:
    memory = bytes_of(Config("infinigen"), Workload(batch=1, context_tokens=65536))
    assert memory.side_bytes == pytest.approx(256 * (1 << 20) * 31 / 32, rel=0.002)
    assert bytes_of(Config("sparse")).side_bytes == 0


@pytest.mark.parametrize(
    ("gathers", "fetches"),
    [(Config("infinigen"), Config("sparse")), (Config("shallow", transfer="gather"), Config("shallow"))],
)
def test_gathering_on_the_host_takes_two_buffers_of_all_that_a_layer_may_choose_on_either_side(
    gathers: Config, fetches: Config
) -> None:
    staging = 2 * 16 * SHAPE.kv_heads * 96 * SHAPE.block_bytes(SPEC)
    assert bytes_of(gathers).pinned_bytes - bytes_of(fetches).pinned_bytes == staging
    assert bytes_of(gathers).workspace_bytes - bytes_of(fetches).workspace_bytes == staging


@pytest.mark.parametrize("transfer", ["blocks", "batch"])
def test_copies_straight_into_slots_take_no_staging(transfer: str) -> None:
    assert bytes_of(Config(transfer=transfer)) == bytes_of(Config())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_parts_add_up(policy: str) -> None:
    memory = bytes_of(Config(policy))
    parts = memory.weights_bytes + memory.resident_bytes + memory.compressed_bytes + memory.workspace_bytes
    parts += memory.side_bytes
    assert memory.gpu_bytes == parts
    assert replace(memory, pinned_bytes=0).gpu_bytes == parts


def test_biases_and_the_weights_that_make_them_are_counted() -> None:
    plain, nosa = bytes_of(Config("sparse")), bytes_of(Config("nosa"))
    tokens = 64 * (SPEC.blocks(131072) + 1)
    assert nosa.side_bytes == 4 * 32 * 32 * (tokens + SPEC.compressed(tokens))
    assert nosa.weights_bytes - plain.weights_bytes == 4 * 32 * 2 * 257
    assert nosa.resident_bytes == plain.resident_bytes


def test_the_scorer_is_counted_and_the_layers_before_it_are_on_the_gpu() -> None:
    plain, early, late = (bytes_of(c) for c in (Config("sparse"), Config("shallow"), Config("shallow", score_layer=7)))
    assert early.weights_bytes - plain.weights_bytes == 256 * ((4096 + 256) * 2 + 12)
    assert early.compressed_bytes == plain.compressed_bytes
    assert late.pinned_bytes * 25 == early.pinned_bytes * 24
    assert late.resident_bytes > early.resident_bytes > plain.resident_bytes
