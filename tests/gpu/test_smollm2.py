"""A small real model, SmolLM2-135M, on a GPU: its tokens are those of transformers, whatever policy decodes them.

Needs the model's GGUF file: see ``smollm2``. Each test prints one JSON line of what it compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the engine's kernels need triton: pip install 'sparda[engine]'")
pytest.importorskip("gguf", reason="the model is a GGUF file: pip install 'sparda[gguf]'")

from sparda.calibrate.measure.parity import EVERY_BLOCK, Decoded, decode, decode_reference
from sparda.calibrate.parity import Agreement, Prompt, Reference, compare, read_reference, smollm2
from sparda.engine.batch import Batch
from sparda.engine.config import Config
from sparda.engine.errors import SpardaError
from sparda.engine.gguf_file import load_gguf
from sparda.engine.weights import Weights, with_proxy_forecast

FILE = Path(__file__).parent.parent / "parity" / "smollm2-greedy.json"
TOP_K, BLOCK = 48, 64
"""A real budget: prompts of more tokens than this leave blocks out."""

ROUNDING = 0.5
"""Logits. bf16 may choose another token than fp32 where the two best are closer than this, and nowhere else.

The best logits of this model are about 40, where neighbouring bf16 numbers lie a quarter apart: it is two of those.
"""

TWINS = {"sparse": "sparse-resident", "sparda": "sparda-resident", "sparda-on-demand": "sparda-resident"}

Tell = Callable[[Sequence[Agreement]], None]
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return read_reference(FILE)


@pytest.fixture(scope="module")
def gguf(reference: Reference) -> Path:
    try:
        path = smollm2()
    except SpardaError as missing:
        pytest.skip(str(missing))
    reference.check_file(path)
    return path


@pytest.fixture(scope="module")
def fp32(gguf: Path) -> Weights:
    return load_gguf(gguf, device="cuda", value_bytes=4)


@pytest.fixture(scope="module")
def dense(fp32: Weights, reference: Reference) -> Tokens:
    return tokens_of(decode_reference(fp32, Config("dense"), reference))


@pytest.fixture(scope="module")
def long(reference: Reference) -> list[Prompt]:
    """Prompts that a real budget leaves blocks out of, and a short one that has all its blocks chosen."""
    return [*(p for p in reference.prompts if len(p.tokens) > TOP_K * BLOCK), reference.prompts[0]]


@pytest.fixture(scope="module")
def twins(fp32: Weights, long: list[Prompt]) -> Callable[[str, int], Tokens]:
    """Tokens of a resident policy at the real budget, by name and lookahead, each decoded once."""
    known: dict[tuple[str, int], Tokens] = {}

    def tokens(policy: str, lookahead: int) -> Tokens:
        if (policy, lookahead) not in known:
            known[policy, lookahead] = at_real_budget(fp32, policy, lookahead, long)[0]
        return known[policy, lookahead]

    return tokens


@pytest.fixture
def tell(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> Tell:
    """Print what a test compared, and leave it in the test report."""

    def say(agreed: Sequence[Agreement]) -> None:
        summary: Mapping[str, object] = {
            "test": request.node.name,
            "prompts": len(agreed),
            "compared": sum(a.compared for a in agreed),
            "mismatches": sum(a.mismatches for a in agreed),
            "first_mismatches": [a.first for a in agreed],
        }
        record_property("parity", json.dumps(summary))
        with capsys.disabled():
            print("\n" + json.dumps(summary))

    return say


def tokens_of(found: Sequence[Decoded]) -> Tokens:
    return [d.tokens for d in found]


def forecasting(weights: Weights, policy: str, lookahead: int = 1) -> Weights:
    return with_proxy_forecast(weights, lookahead) if policy.startswith("sparda") else weights


def at_real_budget(weights: Weights, policy: str, lookahead: int, prompts: list[Prompt]) -> tuple[Tokens, float]:
    """The prompts' new tokens, and how many blocks were fetched per layer and step."""
    config = Config(policy, top_k=TOP_K, lookahead=lookahead)
    capacity = max(len(p.tokens) + len(p.continuation) for p in prompts)
    batch = Batch(forecasting(weights, policy, lookahead), config, rows=2, capacity=capacity)
    found = decode(batch, [p.tokens for p in prompts], len(prompts[0].continuation))
    return tokens_of(found), batch.tiers.misses_per_layer()


def compare_all(found: Tokens, expected: Sequence[Sequence[int]]) -> list[Agreement]:
    return [compare(a, b) for a, b in zip(found, expected, strict=True)]


def departures(agreed: Sequence[Agreement], prompts: Sequence[Prompt]) -> list[str]:
    """Where tokens depart from those expected, and by how much the reference's token led there."""
    return [
        f"prompt of {len(p.tokens)} tokens ({p.source}) departs at new token {a.first}, margin {p.margins[a.first]}"
        for a, p in zip(agreed, prompts, strict=True)
        if a.mismatches
    ]


def test_full_attention_decodes_the_tokens_of_transformers(dense: Tokens, reference: Reference, tell: Tell) -> None:
    agreed = compare_all(dense, [p.continuation for p in reference.prompts])
    tell(agreed)
    assert departures(agreed, reference.prompts) == []


@pytest.mark.parametrize("policy", ["sparse", "sparda"])
def test_with_every_block_chosen_the_tokens_are_those_of_full_attention(
    fp32: Weights, dense: Tokens, reference: Reference, tell: Tell, policy: str
) -> None:
    weights = forecasting(fp32, policy)
    found = tokens_of(decode_reference(weights, Config(policy, top_k=EVERY_BLOCK), reference))
    agreed = compare_all(found, dense)
    tell(agreed)
    assert departures(agreed, reference.prompts) == []


@pytest.mark.parametrize(
    ("policy", "lookahead"), [("sparse", 1), ("sparda", 1), ("sparda", 2), ("sparda-on-demand", 1)]
)
def test_at_a_real_budget_host_memory_gives_the_tokens_of_the_cache_that_is_wholly_on_the_gpu(
    fp32: Weights,
    long: list[Prompt],
    twins: Callable[[str, int], Tokens],
    tell: Tell,
    policy: str,
    lookahead: int,
) -> None:
    found, misses = at_real_budget(fp32, policy, lookahead, long)
    agreed = compare_all(found, twins(TWINS[policy], lookahead))
    tell(agreed)
    assert departures(agreed, long) == []
    assert misses > 0


def test_bf16_departs_from_fp32_only_where_two_tokens_are_close(gguf: Path, reference: Reference, tell: Tell) -> None:
    weights = load_gguf(gguf, device="cuda", value_bytes=2)
    found = tokens_of(decode_reference(weights, Config("dense"), reference))
    agreed = compare_all(found, [p.continuation for p in reference.prompts])
    tell(agreed)
    led = [p.margins[a.first] for a, p in zip(agreed, reference.prompts, strict=True) if a.mismatches]
    assert max(led, default=0.0) < ROUNDING, departures(agreed, reference.prompts)
