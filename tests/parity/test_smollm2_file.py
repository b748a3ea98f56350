"""The committed reference is what the comparison on a GPU needs it to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparda.calibrate.parity import Reference, read_reference

FILE = Path(__file__).parent / "smollm2-greedy.json"
VOCAB, CONTEXT = 49152, 8192
BLOCK, TOP_K = 64, 48
"""Of the comparison at a real budget: see tests/gpu/test_smollm2.py."""

LEAST_MARGIN = 0.002
"""Logits. Sums of fp32 in another order move a logit by about a twentieth of it; a closer race could go either way."""


@pytest.fixture(scope="module")
def reference() -> Reference:
    return read_reference(FILE)


def test_it_says_which_file_was_decoded_by_which_programs(reference: Reference) -> None:
    assert reference.file.endswith(".gguf")
    assert len(reference.sha256) == 64
    assert set(reference.versions) == {"python", "torch", "transformers", "gguf", "tokenizers"}
    assert (reference.vocab, reference.max_context) == (VOCAB, CONTEXT)


def test_every_prompt_names_its_source_and_has_128_greedy_tokens(reference: Reference) -> None:
    assert all(p.source for p in reference.prompts)
    assert {len(p.continuation) for p in reference.prompts} == {128}


def test_all_tokens_are_of_the_vocabulary(reference: Reference) -> None:
    used = {t for p in reference.prompts for t in (*p.tokens, *p.continuation)}
    assert min(used) >= 0
    assert max(used) < VOCAB


def test_prompts_reach_from_a_line_to_the_end_of_the_context(reference: Reference) -> None:
    lengths = sorted(len(p.tokens) for p in reference.prompts)
    assert len(lengths) == len(set(lengths)) >= 6
    assert lengths[0] <= 25
    assert 8000 <= lengths[-1] + 128 <= CONTEXT
    assert reference.capacity == lengths[-1] + 128
    assert sum(n > TOP_K * BLOCK for n in lengths) >= 2


def test_no_token_was_chosen_by_less_than_fp32_can_tell(reference: Reference) -> None:
    assert min(m for p in reference.prompts for m in p.margins) >= LEAST_MARGIN


def test_it_is_small_enough_for_a_repository() -> None:
    assert FILE.stat().st_size < 300_000
