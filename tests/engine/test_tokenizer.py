"""Tokenizers: byte-level BPE built from a GGUF file's metadata, and a folder's own file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="GGUF files are read with the gguf package")
pytest.importorskip("tokenizers", reason="text is tokenized with the tokenizers package")

import gguf
from tokenizers import Tokenizer, pre_tokenizers

from sparda.engine.errors import SpardaError
from sparda.engine.tokenizer import end_tokens, tokenizer_of

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["l l", "h e", "ll o", "he llo", "Ġ hello", "1 2", "12 3", "Ġ Ġ"]
TOKENS = ["<|end|>", "<|start|>", *BYTES, *(m.replace(" ", "") for m in MERGES), "Ġworld"]
TYPES = [3, 3, *[1] * (len(TOKENS) - 2)]
TEXTS = ["hello hello", "naïve 你好 🙂 ½²", "def f(x):\n\treturn 12**3  # ok\r\n\n", "  a   b ", "", "I'll don't 1234"]


def write(path: Path, pre: str | None = "gpt-2", model: str = "gpt2", **more: Any) -> Path:
    w = gguf.GGUFWriter(path, "llama")
    w.add_tokenizer_model(model)
    if pre:
        w.add_tokenizer_pre(pre)
    w.add_token_list(TOKENS)
    w.add_token_types(TYPES)
    w.add_token_merges(MERGES)
    w.add_bos_token_id(1)
    w.add_eos_token_id(0)
    for key, value in more.items():
        w.add_bool(f"tokenizer.ggml.{key}", value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return list(tokenizer.encode(text).tokens)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", None])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_its_tokens(tmp_path: Path, pre: str | None, text: str) -> None:
    tokenizer = tokenizer_of(write(tmp_path / "t.gguf", pre))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_merges_are_applied_and_ids_are_places_in_the_list(tmp_path: Path) -> None:
    found = tokenizer_of(write(tmp_path / "t.gguf")).encode("hello hello")
    assert found.tokens == ["hello", "Ġhello"]
    assert found.ids == [TOKENS.index("hello"), TOKENS.index("Ġhello")]


def test_digits_stay_together_in_gpt_2_and_alone_in_smollm(tmp_path: Path) -> None:
    together, alone = (tokenizer_of(write(tmp_path / f"{pre}.gguf", pre)) for pre in ("gpt-2", "smollm"))
    assert pieces(together, "123") == ["123"]
    assert pieces(alone, "123") == ["1", "2", "3"]


def test_llama_3_cuts_numbers_in_threes_and_takes_a_whole_word_unmerged(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write(tmp_path / "t.gguf", "llama-bpe", add_bos_token=False))
    assert pieces(tokenizer, "1234") == ["123", "4"]
    # No merge leads to this token; only a word looked up as it is finds it.
    assert pieces(tokenizer, " world") == ["Ġworld"]
    assert pieces(tokenizer_of(write(tmp_path / "g.gguf")), " world") != ["Ġworld"]


def test_control_tokens_in_a_text_are_single_tokens_and_left_out_of_decoded_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write(tmp_path / "t.gguf"))
    ids = tokenizer.encode("<|start|>hello<|end|>").ids
    assert ids == [1, TOKENS.index("hello"), 0]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.get_vocab_size() == len(TOKENS)


@pytest.mark.parametrize(
    ("pre", "flag", "first"), [("gpt-2", True, [1]), ("gpt-2", False, []), ("llama-bpe", None, [1])]
)
def test_a_text_begins_with_the_first_token_where_the_file_says_so(
    tmp_path: Path, pre: str, flag: bool | None, first: list[int]
) -> None:
    more: dict[str, Any] = {} if flag is None else {"add_bos_token": flag}
    tokenizer = tokenizer_of(write(tmp_path / "t.gguf", pre, **more))
    assert tokenizer.encode("hello").ids == [*first, TOKENS.index("hello")]


@pytest.mark.parametrize(("pre", "model"), [("tekken", "gpt2"), ("gpt-2", "llama")])
def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path, pre: str, model: str) -> None:
    with pytest.raises(SpardaError, match=f"its tokenizer is '{model}' with pre-tokenizer '{pre}'"):
        tokenizer_of(write(tmp_path / "t.gguf", pre, model))


def test_a_folders_own_tokenizer_is_read(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write(tmp_path / "t.gguf"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert tokenizer_of(path).encode("hello 12").ids == tokenizer.encode("hello 12").ids


def test_a_missing_and_a_damaged_tokenizer_are_told(tmp_path: Path) -> None:
    with pytest.raises(SpardaError, match=r"tokenizer\.json: there is no such file"):
        tokenizer_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SpardaError, match="not a tokenizer that can be read"):
        tokenizer_of(tmp_path)


def test_tokens_that_end_a_text_are_those_that_the_model_states(tmp_path: Path) -> None:
    assert end_tokens(write(tmp_path / "t.gguf")) == (0,)
    assert end_tokens(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert end_tokens(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert end_tokens(tmp_path) == (2, 5)


@pytest.mark.parametrize(("package", "extra"), [("gguf", "gguf"), ("tokenizers", "tokenizer")])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: Any, package: str, extra: str
) -> None:
    file = write(tmp_path / "t.gguf")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SpardaError, match=rf"pip install 'sparda\[{extra}\]'"):
        tokenizer_of(file)
