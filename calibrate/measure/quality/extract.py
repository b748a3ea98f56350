"""Plain text out of the files of a package: text, source code, HTML, Info and R data, compressed or not."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Collection
from html.parser import HTMLParser
from pathlib import Path

from sparda.calibrate.measure.quality.rdata import character_vector
from sparda.engine.errors import SpardaError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BLOCKS = _words(
    "address article blockquote body br center dd div dl dt fieldset figure footer form h1 h2 h3 h4 h5 h6 header hr li "
    "main ol p pre section table tr ul"
)
_APART = _words("blockquote dl h1 h2 h3 h4 h5 h6 ol p pre table ul")
"""Blocks with an empty line before and after them."""

_UNSEEN = _words("script style head nav template")
_VOID = _words("area base br col embed hr img input link meta source track wbr")
_INFO_NODE = re.compile(r"^\x1f\nFile: [^\n]*\n", re.MULTILINE)
_INFO_MENU = re.compile(r"^\* Menu:\n", re.MULTILINE)
"""The heading of a menu; its entries say what follows, and stay."""


def read_bytes(path: Path) -> bytes:
    """The file's bytes, unpacked where its name ends in ``.gz``. Raises SpardaError where it cannot be read."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise SpardaError(f"{path}: cannot be read ({error}); fetch its package anew.") from None


def text_of(path: Path, form: str, *, drop: Collection[str] = (), variable: str = "") -> str:
    """The text of one file. ``form``: ``text``, ``html``, ``info``, or ``rdb`` (then ``variable`` says which).

    ``drop`` are classes and ids of HTML elements to leave out: navigation, contents. Bytes that are not UTF-8 are read
    as Latin-1. Raises SpardaError where the file cannot be read.
    """
    if form == "rdb":
        return tidy("\n".join(character_vector(path, variable)))
    data = read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    if form == "html":
        text = plain(text, drop)
    elif form == "info":
        text = _INFO_MENU.sub("", _INFO_NODE.sub("\n", text)).replace("\x1f", "")
    return tidy(text)


def tidy(text: str) -> str:
    """One kind of line end, no blanks before it, at most two empty lines on end, one line end at the end."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n").replace("\xa0", " ")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def plain(html: str, drop: Collection[str] = ()) -> str:
    """The text a reader of the page sees, a block per line and an empty line between paragraphs."""
    reader = _Page(frozenset(drop))
    reader.feed(html)
    reader.close()
    return "".join(reader.parts)


class _Page(HTMLParser):
    def __init__(self, drop: frozenset[str]) -> None:
        super().__init__(convert_charrefs=True)
        self.drop, self.parts = drop, [""]
        self.verbatim = 0
        self.left_out = ""
        self.depth = 0
        """How many elements named ``left_out`` are open, the one that is left out among them."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.left_out:
            self.depth += tag == self.left_out
            return
        if tag not in _VOID and (tag in _UNSEEN or self._dropped(attrs)):
            self.left_out, self.depth = tag, 1
            return
        self.verbatim += tag == "pre"
        self._break(tag)
        if tag in ("td", "th"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if self.left_out:
            self.depth -= tag == self.left_out
            if not self.depth:
                self.left_out = ""
            return
        self.verbatim -= tag == "pre" and self.verbatim > 0
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if self.left_out:
            return
        if not self.verbatim:
            data = re.sub(r"\s+", " ", data)
            if self.parts[-1].endswith(("\n", " ")) or self.parts == [""]:
                data = data.lstrip()
        if data:
            self.parts.append(data)

    def _dropped(self, attrs: list[tuple[str, str | None]]) -> bool:
        named = {word for key, value in attrs if key in ("class", "id") and value for word in value.split()}
        return bool(named & self.drop)

    def _break(self, tag: str) -> None:
        if tag in _BLOCKS and self.parts[-1]:
            before = self.parts[-1].rstrip(" ")
            self.parts[-1] = before or "\n"
            wanted = 2 if tag in _APART else 1
            self.parts.append("\n" * max(0, wanted - _line_ends(self.parts)))
            if not self.parts[-1]:
                self.parts.pop()


def _line_ends(parts: list[str]) -> int:
    """Line ends on end at the end, counted up to two."""
    tail = "".join(parts[-3:])
    return min(2, len(tail) - len(tail.rstrip("\n")))
