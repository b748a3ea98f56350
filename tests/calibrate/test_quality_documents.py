"""Token files: what a text becomes, what is read back, and which files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda.calibrate.measure.quality import documents as module
from sparda.calibrate.measure.quality.corpus import Text
from sparda.calibrate.measure.quality.documents import (
    Document,
    Documents,
    encode,
    read,
    tokenize,
    vocabulary_sha256,
    windows,
    write,
)
from sparda.engine.errors import SpardaError
from tests.calibrate.small_tokenizer import small_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    pytest.importorskip("tokenizers", reason="text is tokenized with the tokenizers package")
    return small_tokenizer()


def text_file(folder: Path, text: str, *, name: str = "book", role: str = "train") -> Text:
    path = folder / f"{name}.txt"
    path.write_text(text, encoding="utf-8", newline="")
    return Text(name, role, "novel", path, len(text), True)


def some(*lengths: int, dtype: type = np.uint16) -> Documents:
    rng = np.random.default_rng(0)
    found = [Document(f"d{i}", "train", "code", rng.integers(0, 999, n).astype(dtype)) for i, n in enumerate(lengths)]
    return Documents(tuple(found), "abc")


def test_ids_decode_to_the_text_and_are_as_narrow_as_the_vocabulary_allows(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    text = "The cat sat.\n\nIt sat on 12 mats: café.\n"
    (document,) = tokenize([text_file(tmp_path, text)], tokenizer).documents
    assert document.ids.dtype == np.uint16
    assert tokenizer.decode(document.ids.tolist()) == text
    assert (document.name, document.role, document.kind) == ("book", "train", "novel")


# What matters at a cut is what stands around a line end, so most of the text is that.
LINES = st.lists(st.sampled_from(["a cat", " sat", "\n", "\n\n", "\t", ".", "12", "the", "\n  ", "é"]), max_size=60)


@given(parts=LINES, characters=st.integers(1, 40))
def test_a_text_in_pieces_has_the_ids_of_the_whole(parts: list[str], characters: int) -> None:
    pytest.importorskip("tokenizers", reason="text is tokenized with the tokenizers package")
    text, whole = "".join(parts), small_tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_CHARACTERS", characters)
        patch.setattr(module, "BATCH", 2)
        assert encode(text, whole).tolist() == whole.encode(text, add_special_tokens=False).ids


def test_a_long_text_does_go_in_pieces(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 10)
    assert len(list(module._pieces("a cat sat\n" * 20))) > 5


def test_a_limit_is_kept_for_its_role_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    files = [text_file(tmp_path, "a cat sat on a mat\n", name=role, role=role) for role in ("train", "eval")]
    train, short = tokenize(files, tokenizer, {"eval": 3}).documents
    assert len(short) == 3
    assert len(train) > 3
    assert short.ids.tolist() == train.ids[:3].tolist()


def test_two_tokenizers_are_told_apart_by_their_vocabularies(tokenizer: Tokenizer) -> None:
    assert vocabulary_sha256(tokenizer) == vocabulary_sha256(small_tokenizer())
    other = small_tokenizer()
    other.add_tokens(["zebra"])
    assert vocabulary_sha256(tokenizer) != vocabulary_sha256(other)


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = text_file(tmp_path, "")
    file.path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(SpardaError, match=r"book\.txt: is no UTF-8 text \(byte 0"):
        tokenize([file], tokenizer)


@given(
    lengths=st.lists(st.integers(0, 50), max_size=5),
    dtype=st.sampled_from([np.uint16, np.uint32]),
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], dtype: type
) -> None:
    path = tmp_path_factory.mktemp("tokens") / "tokens.npz"
    documents = some(*lengths, dtype=dtype)
    write(path, documents)
    found = read(path)
    assert found.tokenizer_sha256 == "abc"
    for before, after in zip(documents.documents, found.documents, strict=True):
        assert (before.name, before.role, before.kind) == (after.name, after.role, after.kind)
        assert before.ids.tolist() == after.ids.tolist()
    assert [p.name for p in path.parent.iterdir()] == ["tokens.npz"]


def test_a_token_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npz"
    write(path, some(30, 20))
    data = path.read_bytes()
    for length in (0, 10, len(data) // 2):
        path.write_bytes(data[:length])
        with pytest.raises(SpardaError, match=r"tokens\.npz: (damaged|cannot be read)"):
            read(path)


def test_a_token_file_whose_ids_are_not_those_it_was_written_with_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npz"
    write(path, some(30, 20))
    with np.load(path) as file:
        header, ids = json.loads(bytes(file["header"])), file["ids"].copy()
    ids[3] ^= 1
    module.write_arrays(path, header, {"ids": ids})
    with pytest.raises(SpardaError, match="'d0' does not have the hash"):
        read(path)
    ids[3] ^= 1
    module.write_arrays(path, header, {"ids": np.append(ids, ids[:1])})
    with pytest.raises(SpardaError, match="51 ids, where its documents have 50"):
        read(path)
    module.write_arrays(path, header | {"schema": 0}, {"ids": ids})
    with pytest.raises(SpardaError, match="schema 0, and 1 is read"):
        read(path)
    module.write_arrays(path, header, {"other": ids})
    with pytest.raises(SpardaError, match="damaged or not a file of this kind"):
        read(path)


def test_a_token_file_that_is_not_there_or_has_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpardaError, match="cannot be read"):
        read(tmp_path / "none.npz")
    with pytest.raises(SpardaError, match="cannot be written"):
        write(tmp_path / "none" / "tokens.npz", some(3))


def test_windows_follow_each_other_and_leave_the_rest_out() -> None:
    (document,) = some(11).documents
    found = list(windows(document, 4))
    assert [w.tolist() for w in found] == [document.ids[:4].tolist(), document.ids[4:8].tolist()]
    assert list(windows(document, 12)) == []
    with pytest.raises(SpardaError, match="windows of 0 tokens"):
        list(windows(document, 0))


def test_a_document_is_found_by_its_name_or_the_names_are_told() -> None:
    assert len(some(3, 4).named("d1")) == 4
    with pytest.raises(SpardaError, match="no document 'x'; there are d0, d1"):
        some(3, 4).named("x")


def test_the_command_writes_a_token_file(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [text_file(tmp_path, "a cat sat\n" * 9, name=role, role=role) for role in ("train", "eval")]
    monkeypatch.setattr(module, "collect", lambda folder: texts)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "tokens.npz"
    command = [str(tmp_path), str(tmp_path / "tokenizer.json"), str(out), "--eval-tokens", "5", "--json"]
    assert module.main(command) == 0
    rows = json.loads(capsys.readouterr().out)["documents"]
    assert [(r["name"], r["tokens"]) for r in rows] == [("train", len(read(out).named("train"))), ("eval", 5)]
    assert module.main([*command[:4], "0"]) == 2
    assert "--eval-tokens 0" in capsys.readouterr().err
