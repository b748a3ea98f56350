"""Choices in a file: a line that says what it is, a JSON header, planes of small numbers compressed one by one.

The shipped traces of SmolLM2-135M (sets of 16 blocks, 13 of them free, of which a fifth changes from step to step) take
2.0 to 2.3 bytes a set. Written whole or not at all; read back exactly.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparda.engine.dynamics.choices import Choices, TraceFacts
from sparda.engine.dynamics.choices_code import PLANES, Plane, decode, encode
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, to_plain, write_bytes

MAGIC = b"sparda choices\n"
VERSION = 1
LONGEST_HEADER = 1 << 20
# Numbers have no neighbours to match and no alignment; what helps is to learn how frequent each is.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 0, "pb": 0}]


@dataclass(frozen=True, slots=True)
class PlanePart:
    """Where a plane is found: ``numbers`` of two bytes, their low and their high bytes compressed to so many."""

    name: str
    numbers: int
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says before its planes: ``sha256`` is of all that follows the header."""

    version: int
    steps: int
    room: int
    facts: TraceFacts
    planes: tuple[PlanePart, ...]
    sha256: str


def write_choices(path: str | Path, choices: Choices) -> int:
    """Write a file, whole or not at all; returns its bytes. Raises SpardaError where it cannot be written."""
    data = pack(choices)
    write_bytes(path, data)
    return len(data)


def read_choices(path: str | Path) -> Choices:
    """The choices in a file. Raises SpardaError where it is missing, foreign, newer, cut short or damaged."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise SpardaError(f"{path}: there is no such file; check the path.") from None
    except OSError as error:
        raise SpardaError(f"{path}: cannot be read ({error.strerror}); give a file that you may read.") from None
    return unpack(data, str(path))


def pack(choices: Choices) -> bytes:
    """The bytes of a file."""
    blocks = choices.blocks.reshape(choices.steps, -1, choices.facts.top_k)
    parts, payload = [], []
    for name, plane in encode(blocks, choices.room).items():
        halves = [_compressed((plane & 255).astype(np.uint8)), _compressed((plane >> 8).astype(np.uint8))]
        parts.append(PlanePart(name, len(plane), *map(len, halves)))
        payload += halves
    body = b"".join(payload)
    digest = hashlib.sha256(body).hexdigest()
    header = Header(VERSION, choices.steps, choices.room, choices.facts, tuple(parts), digest)
    text = json.dumps(to_plain(header), separators=(",", ":")).encode()
    return MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text + body


def unpack(data: bytes, where: str) -> Choices:
    """The inverse of ``pack``; ``where`` begins every complaint."""
    header, body = _header(data, where)
    size = sum(p.low_bytes + p.high_bytes for p in header.planes)
    if len(body) < size:
        raise _cut(where, len(data) - len(body) + size, len(data))
    if len(body) > size or hashlib.sha256(body).hexdigest() != header.sha256:
        raise _damaged(where, "its contents do not match their checksum")
    try:
        planes = dict(_planes(header.planes, body))
        if tuple(planes) != PLANES:
            raise ValueError(f"planes {list(planes)}")
        f = header.facts
        blocks = decode(planes, header.steps, f.streams, f.top_k, header.room)
        return Choices(f, blocks.reshape(header.steps, len(f.layers), f.heads, f.top_k))
    except (ValueError, MemoryError, lzma.LZMAError, SpardaError) as error:
        raise _damaged(where, f"its contents make no choices ({error})") from None


def _header(data: bytes, where: str) -> tuple[Header, bytes]:
    start = len(MAGIC) + 8
    if not data.startswith(MAGIC[: len(data)]) or not data:
        raise SpardaError(f"{where}: is no file of choices; write one with `sparda trace record` or `generate`.")
    if len(data) < start:
        raise _cut(where, start, len(data))
    length, check = (int.from_bytes(data[at : at + 4], "little") for at in (start - 8, start - 4))
    text = data[start : start + length]
    if length > LONGEST_HEADER:
        raise _damaged(where, f"its header of {length} bytes is longer than any")
    if len(text) < length:
        raise _cut(where, start + length, len(data))
    if zlib.crc32(text) != check:
        raise _damaged(where, "its header does not match its checksum")
    plain = json.loads(text)
    if plain.get("version") != VERSION:
        raise SpardaError(
            f"{where}: is of version {plain.get('version')} of the format and this program reads version {VERSION}; "
            "read it with the program that wrote it, or a newer one."
        )
    return read(Header, plain, where=where), data[start + length :]


def _compressed(values: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    return lzma.compress(values.tobytes(), lzma.FORMAT_RAW, filters=FILTERS) if values.any() else b""


def _planes(parts: Sequence[PlanePart], body: bytes) -> list[tuple[str, Plane]]:
    """Each plane by name. No bytes stand for zeros alone."""
    found, at = [], 0
    for part in parts:
        halves = []
        for size in (part.low_bytes, part.high_bytes):
            raw = lzma.decompress(body[at : at + size], lzma.FORMAT_RAW, filters=FILTERS) if size else None
            halves.append(np.frombuffer(raw, np.uint8) if raw is not None else np.zeros(part.numbers, np.uint8))
            at += size
        low, high = (half.astype(np.uint16) for half in halves)
        if len(low) != part.numbers or len(high) != part.numbers:
            raise ValueError(f"plane {part.name} is not {part.numbers} numbers long")
        found.append((part.name, (low + high * 256).astype(np.uint16)))
    return found


def _cut(where: str, wanted: int, there: int) -> SpardaError:
    return SpardaError(
        f"{where}: is cut short, {there} bytes of {wanted} or more are there; copy it again, or record it anew."
    )


def _damaged(where: str, what: str) -> SpardaError:
    return SpardaError(f"{where}: is damaged, {what}; copy it again, or record it anew.")
