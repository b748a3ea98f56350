"""Character vectors out of an R package's lazy-load database (``Rdata.rdb`` beside ``Rdata.rdx``), without R.

Of R's serialisation (R Internals, section 1.8) only what such a package of texts holds is read: XDR, versions 2 and 3.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

from sparda.engine.errors import SpardaError

_SYMBOL, _PAIRS, _CHARS, _LOGICAL, _INTEGERS, _REALS, _STRINGS, _LIST = 1, 2, 9, 10, 13, 14, 16, 19
_NIL, _REFERENCE = 254, 255
_ATTRIBUTES, _TAG = 0x200, 0x400


def character_vector(rdb: Path, name: str) -> list[str]:
    """The variable ``name`` of a lazy-load database; a missing string is empty.

    Raises SpardaError where the files are missing or damaged, and for a variable that is not a character vector.
    """
    try:
        index = _Reader(gzip.decompress(rdb.with_suffix(".rdx").read_bytes())).value()
        if not isinstance(index, dict):
            raise ValueError("its index is no named list")
        start, length = index["variables"][name]
        # The uncompressed length comes first, as four bytes.
        value = _Reader(zlib.decompress(rdb.read_bytes()[start + 4 : start + length])).value()
    except OSError as error:
        raise SpardaError(f"{rdb}: cannot be read ({error.strerror or error}); install the package anew.") from None
    except (KeyError, TypeError):
        raise SpardaError(f"{rdb}: holds no variable {name!r}; check the name.") from None
    except (ValueError, EOFError, struct.error, zlib.error) as error:
        raise SpardaError(f"{rdb}: not a database of texts that can be read ({error}).") from None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise SpardaError(f"{rdb}: variable {name!r} is not a character vector; name one that is.")
    return value


class _Reader:
    """One serialised object. A list with names becomes a dictionary, any other vector a list."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.symbols: list[str] = []
        if data[:2] != b"X\n":
            raise ValueError("not in XDR form")
        self.at = 2
        version, _, _ = self._integers(3)
        if version == 3:
            self._bytes(self._integer())
        elif version != 2:
            raise ValueError(f"serialisation version {version}")

    def value(self) -> object:
        flags = self._integer()
        kind = flags & 0xFF
        if kind == _NIL:
            return None
        if kind == _REFERENCE:
            return self.symbols[(flags >> 8) - 1]
        if kind == _SYMBOL:
            self.symbols.append(str(self.value()))
            return self.symbols[-1]
        if kind == _PAIRS:
            return self._pairs(flags)
        if kind == _CHARS:
            length = self._integer()
            return "" if length < 0 else self._bytes(length).decode("latin-1" if flags & 0x4000 else "utf-8")
        found = self._vector(kind)
        names = self._attributes().get("names") if flags & _ATTRIBUTES else None
        return dict(zip(names, found, strict=True)) if isinstance(names, list) else found

    def _vector(self, kind: int) -> list[object]:
        length = self._integer()
        if kind in (_INTEGERS, _LOGICAL):
            return list(self._integers(length))
        if kind == _REALS:
            return list(struct.unpack(f">{length}d", self._bytes(8 * length)))
        if kind in (_STRINGS, _LIST):
            return [self.value() for _ in range(length)]
        raise ValueError(f"an object of type {kind}")

    def _attributes(self) -> dict[str, object]:
        found = self.value()
        return found if isinstance(found, dict) else {}

    def _pairs(self, flags: int) -> dict[str, object]:
        """A pair list, to its end."""
        found: dict[str, object] = {}
        while flags & 0xFF == _PAIRS:
            if flags & _ATTRIBUTES:
                self.value()
            tag = str(self.value()) if flags & _TAG else ""
            found[tag] = self.value()
            flags = self._integer()
        return found

    def _integer(self) -> int:
        return self._integers(1)[0]

    def _integers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f">{count}i", self._bytes(4 * count))

    def _bytes(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise EOFError("ends in the middle")
        self.at, start = end, self.at
        return self.data[start:end]
