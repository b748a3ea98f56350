"""Generated traces: the misses, their spread and their bursts are those of the trace that was fitted."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.engine.dynamics.choices import Choices
from sparda.engine.dynamics.fit import fit
from sparda.engine.dynamics.generator import generate, max_gap
from sparda.engine.dynamics.generator_params import GeneratorParams, merged, read_params, write_params
from sparda.engine.dynamics.stack import stack_distances
from sparda.engine.errors import SpardaError
from tests.engine.made_choices import drifting

STEPS, SKIP = 768, 192
KNOWN: dict[str, dict[str, Any]] = {
    "like a small model": {"keep": 0.999, "noise": 0.15},
    "noisy": {"keep": 0.995, "noise": 0.6},
    "bursts": {"keep": 0.998, "noise": 0.2, "burst": 20.0},
    "few blocks": {"context_tokens": (1700,), "noise": 0.2},
    "many picks": {"top_k": 32, "noise": 0.2},
}


@functools.cache
def recorded(name: str) -> Choices:
    layers = tuple(range(4))
    given = {"block": 64, "top_k": 16, "layers": layers, "kv_heads": 3, "context_tokens": (6144,), **KNOWN[name]}
    return drifting(STEPS, **given)


@functools.cache
def fitted(name: str) -> GeneratorParams:
    return fit(recorded(name), skip=SKIP)


@functools.cache
def generated(name: str) -> Choices:
    return generate(fitted(name), steps=STEPS, layers=4, kv_heads=3, seed=5)


@pytest.mark.parametrize("name", KNOWN)
def test_a_generated_trace_misses_what_the_recorded_one_misses(name: str) -> None:
    assert max_gap(recorded(name), generated(name), skip=SKIP) < 0.01, "a half of what is asked for"


@pytest.mark.parametrize("name", KNOWN)
def test_steps_and_layers_differ_as_much_as_the_recorded_ones(name: str) -> None:
    first, second = (stack_distances(c, skip=SKIP) for c in (recorded(name), generated(name)))
    for times in (1.0, 1.5):
        slots = first.slots_at(times)
        wanted, found = first.quantiles(slots), second.quantiles(slots)
        for q in (0.5, 0.95, 0.99):
            assert found[q] == pytest.approx(wanted[q], rel=0.25, abs=5), (times, q)
        assert second.layer_shares(slots) == pytest.approx(first.layer_shares(slots), rel=0.25, abs=0.01)


def test_without_bursts_of_steps_the_fit_finds_none() -> None:
    params = GeneratorParams(
        "plain", 64, 1, 1, 16, 6144, (1.0, 2.0, 4.0, 8.0), ((0.2, 0.05, 0.01, 0.0),), dispersion=0.1
    )
    found = fit(generate(params, steps=600, layers=3, kv_heads=8, seed=1))
    assert found.persistence == pytest.approx(0, abs=0.1)
    assert found.dispersion == pytest.approx(0.1, abs=0.04)
    assert found.head_spread == pytest.approx(0, abs=0.05)
    assert [row[0] for row in found.bursts] == pytest.approx([1.0] * 6, abs=0.25)
    assert [row[0] for row in found.layers] == pytest.approx([0.2] * 3, abs=0.02)


def test_a_fit_finds_the_parameters_that_a_trace_was_drawn_from() -> None:
    given = GeneratorParams(
        "known", 64, 1, 1, 16, 6144, (1.0, 2.0, 4.0, 8.0), ((0.1, 0.03, 0.01, 0.0), (0.3, 0.05, 0.01, 0.0)),
        bursts=((0.5,) * 4, (3.0,) * 4), weights=(0.8, 0.2), persistence=0.5, head_spread=0.3, stays=0.5,
        leave=(2.0, 1.0, 0.5, 0.5),
    )  # fmt: skip
    found = fit(generate(given, steps=900, layers=2, kv_heads=12, seed=2))
    assert [row[0] for row in found.layers] == pytest.approx([0.1, 0.3], rel=0.15)
    assert [row[found.ratio.index(1 + 12 / 13)] for row in found.layers] == pytest.approx([0.035, 0.056], rel=0.2)
    assert found.bursts[0][0] == pytest.approx(0.5, abs=0.15)
    assert found.bursts[-1][0] == pytest.approx(3.0, rel=0.2)
    assert found.head_spread == pytest.approx(0.3, abs=0.1)
    assert found.stays == pytest.approx(0.5, abs=0.2)
    assert found.leave[0] > 1.5 * found.leave[-1] > 0


def test_the_seed_decides_a_trace() -> None:
    def drawn(seed: int) -> list[int]:
        small = generate(fitted("noisy"), steps=20, layers=2, kv_heads=1, sequences=2, seed=seed)
        found: list[int] = small.blocks.ravel().tolist()
        return found

    assert drawn(1) == drawn(1) != drawn(2)


@given(
    steps=st.integers(1, 40),
    layers=st.integers(1, 3),
    heads=st.integers(1, 2),
    sequences=st.integers(1, 2),
    top_k=st.integers(4, 40),
    context=st.integers(0, 2000),
    block=st.sampled_from([1, 16, 64]),
    turnover=st.sampled_from([0.0, 0.3, 1.0]),
    stays=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_every_context_however_short_gets_as_many_blocks_as_there_are(
    steps: int, layers: int, heads: int, sequences: int, top_k: int, context: int, block: int, turnover: float,
    stays: float,
) -> None:  # fmt: skip
    params = GeneratorParams("any", block, 1, 1, top_k, context, (1.0, 3.0), ((turnover, turnover / 2),), stays=stays)
    found = generate(params, steps=steps, layers=layers, kv_heads=heads, sequences=sequences)
    assert found.blocks.shape == (steps, layers, heads * sequences, top_k)
    count = np.minimum(found.per_stream(found.existing()), top_k)
    assert ((found.blocks >= 0).sum(-1) == count).all()
    forced = np.minimum(found.per_stream(found.existing()), 3)
    assert (found.forced().sum(-1) == forced).all(), "forced blocks are always chosen"


def test_another_size_keeps_the_shares() -> None:
    params = fitted("like a small model")
    given = {"top_k": 96, "init_blocks": 1, "local_blocks": 32, "context_tokens": 64 * 1000}
    larger = generate(params, steps=300, layers=8, kv_heads=2, sequences=2, **given)
    # The slot to spare is worth more to 13 free picks than to 62.
    found, own = stack_distances(larger, skip=60, spare=0), stack_distances(generated("like a small model"), spare=0)
    for ratio in (1.0, 1.5, 2.0):
        assert found.curve().at(ratio) == pytest.approx(own.curve().at(ratio), abs=0.01)
    # Eight layers take those of four, two each.
    pairs = found.layer_shares(96).reshape(4, 2)
    assert np.abs(pairs[:, 0] - pairs[:, 1]).max() < 0.02


def test_nothing_replaced_is_nothing_missed() -> None:
    params = replace(fitted("noisy"), layers=((0.0,) * len(fitted("noisy").ratio),), stays=0.0)
    found = generate(params, steps=30, layers=2, kv_heads=2, context_tokens=64 * 100)
    assert not np.diff(found.blocks, axis=0).any()


def test_parameters_come_back_from_a_file(tmp_path: Path) -> None:
    write_params(tmp_path / "p.json", fitted("bursts"))
    assert read_params(tmp_path / "p.json") == fitted("bursts")


def test_the_fit_of_two_traces_lies_between_theirs() -> None:
    both = merged([fitted("like a small model"), fitted("noisy")])
    for own, low, high in zip(both.layers, fitted("like a small model").layers, fitted("noisy").layers, strict=True):
        assert min(low[0], high[0]) <= own[0] <= max(low[0], high[0])
    same = merged([fitted("noisy"), fitted("noisy")])
    assert same.layers == fitted("noisy").layers
    with pytest.raises(SpardaError, match="traces whose top_k are 16, 32 have no fit in common"):
        merged([fitted("noisy"), fitted("many picks")])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ratio": (1.5, 2.0)}, "ascending from 1"),
        ({"layers": ((0.1, 0.2),)}, "shares that do not fall"),
        ({"layers": ()}, "shares that do not fall"),
        ({"bursts": ((1.0,),)}, "2 factors a row"),
        ({"weights": (0.5, 0.5)}, "bursts of a generator are 0 rows with 2 weights"),
        ({"leave": (0.0,)}, "not all of them 0"),
        ({"dispersion": 1.5}, "dispersion of a generator is 1.5"),
        ({"head_spread": 5.0}, "head_spread of a generator is 5.0"),
    ],
)
def test_parameters_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    known: dict[str, Any] = {"ratio": (1.0, 2.0), "layers": ((0.2, 0.1),)}
    with pytest.raises(SpardaError, match=said):
        GeneratorParams("none", 64, 1, 1, 16, 6144, **{**known, **given})


def test_what_cannot_be_generated_or_fitted_is_refused() -> None:
    with pytest.raises(SpardaError, match="a top_k of 3 has no free pick beside 3 forced blocks"):
        generate(fitted("noisy"), steps=1, layers=1, kv_heads=1, top_k=3)
    with pytest.raises(SpardaError, match="0 steps are to be generated"):
        generate(fitted("noisy"), steps=0, layers=1, kv_heads=1)
    with pytest.raises(SpardaError, match="a fit wants at least 32"):
        fit(drifting(40), skip=20)
