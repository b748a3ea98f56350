"""Token files: texts as token ids, so that a machine without a tokenizer can train and measure on them."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparda.calibrate.measure.quality.command import Parser
from sparda.calibrate.measure.quality.corpus import Text, collect
from sparda.engine.errors import SpardaError
from sparda.engine.loader import write_bytes
from sparda.engine.tokenizer import tokenizer_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SCHEMA = 1
CHUNK_CHARACTERS = 50_000
"""A text goes through the tokenizer in pieces of about this length."""

BATCH = 64
"""Pieces at a time: they are tokenized in parallel, and their ids kept in place of what the tokenizer returns."""

Ids = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A text as token ids [tokens], uint16 where every id of its vocabulary fits and uint32 elsewhere."""

    name: str
    role: str
    kind: str
    ids: Ids

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Documents of one tokenizer, which ``tokenizer_sha256`` names: the hash of its vocabulary."""

    documents: tuple[Document, ...]
    tokenizer_sha256: str

    def of_role(self, role: str) -> tuple[Document, ...]:
        return tuple(d for d in self.documents if d.role == role)

    def named(self, name: str) -> Document:
        """The document of that name. Raises SpardaError where there is none."""
        for document in self.documents:
            if document.name == name:
                return document
        raise SpardaError(f"there is no document {name!r}; there are {', '.join(d.name for d in self.documents)}.")


def tokenize(texts: Sequence[Text], tokenizer: Tokenizer, limits: Mapping[str, int] | None = None) -> Documents:
    """Every text's token ids, no start token before them; ``limits``: at most so many tokens of a document, by role.

    Raises SpardaError for a file that cannot be read.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    dtype = np.uint16 if max(vocabulary.values()) < 1 << 16 else np.uint32
    documents = []
    for text in texts:
        limit = (limits or {}).get(text.role)
        documents.append(Document(text.name, text.role, text.kind, encode(_read(text.path), tokenizer, dtype, limit)))
    return Documents(tuple(documents), vocabulary_sha256(tokenizer))


def encode(text: str, tokenizer: Tokenizer, dtype: Any = np.uint32, limit: int | None = None) -> Ids:
    """The token ids of a text of any length, the first ``limit`` of them."""
    found, count, pieces = [], 0, list(_pieces(text))
    for start in range(0, len(pieces), BATCH):
        for encoding in tokenizer.encode_batch(pieces[start : start + BATCH], add_special_tokens=False):
            found.append(np.asarray(encoding.ids, dtype))
            count += len(found[-1])
        if limit is not None and count >= limit:
            break
    ids: Ids = np.concatenate(found)[:limit] if found else np.empty(0, dtype)
    return ids


def vocabulary_sha256(tokenizer: Tokenizer) -> str:
    """A hash that two tokenizers share where every id means the same to both."""
    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def windows(document: Document, length: int) -> Iterator[Ids]:
    """Consecutive windows of exactly ``length`` tokens; what is left at the end is not used."""
    if length < 1:
        raise SpardaError(f"windows of {length} tokens; give at least 1.")
    for start in range(0, len(document) - length + 1, length):
        yield document.ids[start : start + length]


def write(path: Path, documents: Documents) -> None:
    """Write a token file: a compressed ``.npz`` of all ids, one after another, and a JSON header."""
    header = {
        "schema": SCHEMA,
        "tokenizer_sha256": documents.tokenizer_sha256,
        "documents": [
            {"name": d.name, "role": d.role, "kind": d.kind, "tokens": len(d), "sha256": ids_sha256(d.ids)}
            for d in documents.documents
        ],
    }
    ids = [d.ids for d in documents.documents]
    write_arrays(path, header, {"ids": np.concatenate(ids) if ids else np.empty(0, np.uint16)})


def read(path: Path) -> Documents:
    """The documents of a token file. Raises SpardaError for a file that is missing, damaged or of another kind."""
    header, arrays = read_arrays(path, ("ids",), SCHEMA)
    ids, at, found = arrays["ids"], 0, []
    try:
        if ids.dtype not in (np.dtype(np.uint16), np.dtype(np.uint32)) or ids.ndim != 1:
            raise ValueError("its ids are not a row of uint16 or uint32")
        for entry in header["documents"]:
            part = ids[at : at + entry["tokens"]]
            at += entry["tokens"]
            if ids_sha256(part) != entry["sha256"]:
                raise ValueError(f"document {entry['name']!r} does not have the hash that it was written with")
            found.append(Document(entry["name"], entry["role"], entry["kind"], part))
        if at != len(ids):
            raise ValueError(f"{len(ids)} ids, where its documents have {at}")
        return Documents(tuple(found), str(header["tokenizer_sha256"]))
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, error) from None


def write_arrays(path: Path, header: Mapping[str, object], arrays: Mapping[str, NDArray[Any]]) -> None:
    """A compressed ``.npz`` with a JSON header beside its arrays, written whole or not at all."""
    buffer = io.BytesIO()
    # Any: numpy's types would have an array be its newer argument allow_pickle.
    every: dict[str, Any] = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays}
    np.savez_compressed(buffer, **every)
    write_bytes(path, buffer.getvalue())


def read_arrays(path: Path, names: Sequence[str], schema: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What ``write_arrays`` wrote. Raises SpardaError for a file that is missing, damaged or of another schema."""
    try:
        with path.open("rb") as raw:
            # What numpy says of a file that is no archive is advice to load it unsafely.
            if not zipfile.is_zipfile(raw):
                raise ValueError("it is no .npz archive")
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(bytes(file["header"]))
            found = header.get("schema")
            arrays = {name: file[name] for name in names} if found == schema else {}
    except OSError as error:
        raise SpardaError(f"{path}: cannot be read ({error.strerror or error}); check the path.") from None
    except (KeyError, ValueError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise damaged(path, error) from None
    if found != schema:
        raise SpardaError(f"{path}: is of schema {found}, and {schema} is read; write it anew.")
    return header, arrays


def damaged(path: Path, error: Exception) -> SpardaError:
    """What to raise for a file that holds something else than it should."""
    return SpardaError(f"{path}: damaged or not a file of this kind ({error}); write it anew.")


def _pieces(text: str) -> Iterator[str]:
    """The text cut after a lone line end with no blank on either side: no token reaches across such a place."""
    start = 0
    while start < len(text):
        end = start + CHUNK_CHARACTERS
        while True:
            end = text.find("\n", end)
            if end < 0 or end + 1 >= len(text):
                yield text[start:]
                return
            if not text[end - 1].isspace() and not text[end + 1].isspace():
                break
            end += 1
        yield text[start : end + 1]
        start = end + 1


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpardaError(f"{path}: is no UTF-8 text (byte {error.start}: {error.reason}); convert it.") from None
    except OSError as error:
        raise SpardaError(f"{path}: cannot be read ({error.strerror}); check the path.") from None


def ids_sha256(ids: Ids) -> str:
    """A hash of ids that is the same on every machine."""
    return hashlib.sha256(np.ascontiguousarray(ids, ids.dtype.newbyteorder("<")).tobytes()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: ``TEXTS TOKENIZER FILE``; returns its exit code."""
    parser = Parser("documents", __doc__)
    parser.add_argument("texts", type=Path, help="the folder of the texts; those not there are collected")
    parser.add_argument("tokenizer", type=Path, help="the model's folder, its tokenizer.json, or a GGUF file")
    parser.add_argument("file", type=Path, help="the token file to write")
    parser.add_argument("--eval-tokens", type=int, default=40_000, help="at most so many of each eval document (40000)")
    try:
        given = parser.parse_args(arguments)
        if given.eval_tokens < 1:
            raise SpardaError(f"--eval-tokens {given.eval_tokens}; give at least 1.")
        documents = tokenize(collect(given.texts), tokenizer_of(given.tokenizer), {"eval": given.eval_tokens})
        write(given.file, documents)
    except SpardaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = [{"name": d.name, "role": d.role, "kind": d.kind, "tokens": len(d)} for d in documents.documents]
    if given.json:
        print(json.dumps({"tokenizer_sha256": documents.tokenizer_sha256, "documents": rows}, indent=2))
        return 0
    for d in documents.documents:
        print(f"{d.role:5}  {d.kind:6}  {len(d):>9,} tokens  {d.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
