"""Texts of the quality axis: what is written, what of a package is kept, and what is said when it cannot be had."""

from __future__ import annotations

import gzip
import json
import shutil
import struct
import subprocess
import tomllib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparda.calibrate.measure.quality import corpus
from sparda.calibrate.measure.quality.corpus import Manifest, Source, collect, extract, read_manifest
from sparda.calibrate.measure.quality.extract import plain, text_of, tidy
from sparda.calibrate.measure.quality.rdata import character_vector
from sparda.engine.errors import SpardaError


def source(**changed: Any) -> Source:
    given = {"name": "a-book", "role": "train", "kind": "novel", "package": "books", "paths": ("share/*.txt",)}
    return Source(**(given | changed))


def package(**files: str) -> Callable[[str, Path], None]:
    """A fetch that unpacks ``share/NAME.txt`` for each file, whatever the package."""

    def fetch(name: str, into: Path) -> None:
        (into / "share").mkdir()
        for file, text in files.items():
            (into / "share" / f"{file}.txt").write_text(text, encoding="utf-8")

    return fetch


def test_texts_are_written_by_role_and_their_files_joined_in_sorted_order(tmp_path: Path) -> None:
    manifest = Manifest((source(), source(name="other", role="eval", paths=("share/b.txt",))))
    texts = collect(tmp_path, manifest, package(b="second\n", a="first\n"))
    assert (tmp_path / "train/a-book.txt").read_text() == "first\n\nsecond\n"
    assert (tmp_path / "eval/other.txt").read_text() == "second\n"
    assert [(t.name, t.text_bytes, t.written) for t in texts] == [("a-book", 14, True), ("other", 7, True)]


def test_a_text_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    manifest = Manifest((source(),))
    collect(tmp_path, manifest, package(a="first\n"))

    def refuse(name: str, into: Path) -> None:
        raise AssertionError(f"{name} was fetched")

    assert [t.written for t in collect(tmp_path, manifest, refuse)] == [False]


def test_what_can_be_had_is_written_before_the_rest_is_complained_of(tmp_path: Path) -> None:
    given = package(a="first\n")

    def fetch(name: str, into: Path) -> None:
        if name == "gone":
            raise SpardaError("package gone was not fetched.")
        given(name, into)

    manifest = Manifest((source(name="lost", package="gone"), source(), source(name="bare", paths=("share/*.html",))))
    with pytest.raises(SpardaError, match=r"2 of the texts.*package gone was not fetched.*no file share/\*\.html"):
        collect(tmp_path, manifest, fetch)
    assert [f.name for f in tmp_path.rglob("*") if f.is_file()] == ["a-book.txt"]


def test_a_text_is_kept_between_its_marks_and_cut_after_a_whole_line(tmp_path: Path) -> None:
    package(a="front\nSTART one\ntwo\nthree\nEND\nlicence\n")("books", tmp_path)
    assert extract(source(begin="START", end="END"), tmp_path) == "START one\ntwo\nthree\n"
    assert extract(source(begin="START", limit_bytes=15), tmp_path) == "START one\ntwo\n"
    with pytest.raises(SpardaError, match="'NOWHERE' is not in the text"):
        extract(source(begin="NOWHERE"), tmp_path)


def test_a_file_is_taken_once_and_an_excluded_one_not_at_all(tmp_path: Path) -> None:
    package(a="a\n", b="b\n", c="c\n")("books", tmp_path)
    chosen = source(paths=("share/b.txt", "share/*.txt"), exclude=("*/c.txt",))
    assert extract(chosen, tmp_path) == "b\n\na\n"


def test_pages_become_the_text_that_a_reader_sees() -> None:
    page = (
        "<html><head><title>No</title></head><body><div class='nav top'><p>Next</p></div><script>x()</script>"
        "<h1>One &amp; two</h1><p>A <b>bold</b>\n   word.</p><pre>  if x:\n    y</pre><ul><li>first<li>second</ul>"
        "<table><tr><td>a</td><td>b</td></tr></table></body></html>"
    )
    text = tidy(plain(page, {"nav"}))
    assert text == "One & two\n\nA bold word.\n\n  if x:\n    y\n\nfirst\nsecond\n\n a b\n"


def test_what_is_left_out_of_a_page_ends_where_its_element_ends() -> None:
    assert plain("<div id='x'>no<div>no</div>no</div>yes", {"x"}) == "yes"
    assert plain("<br class='x'>yes", {"x"}).strip() == "yes"


def test_info_loses_its_node_lines_and_the_headings_of_menus(tmp_path: Path) -> None:
    (tmp_path / "a.info.gz").write_bytes(
        gzip.compress(
            b"\x1f\nFile: a.info,  Node: Top\n\n1 Top\n=====\n\nText.\n\n* Menu:\n\n* One::   first\n"
            b"                one\n\n\x1f\nFile: a.info,  Node: One\n\n1.1 One\n*******\n\nMore.\n"
        )
    )
    text = text_of(tmp_path / "a.info.gz", "info")
    assert "File:" not in text
    assert "Menu" not in text
    assert "Text." in text
    assert "1.1 One\n*******\n\nMore.\n" in text


def test_bytes_that_are_not_utf_8_are_read_as_latin_1(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("caf\xe9\r\n\r\n\r\n\r\n\r\nend  ".encode("latin-1"))
    assert text_of(tmp_path / "a.txt", "text") == "café\n\n\nend  \n"


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(b"not gzip")
    with pytest.raises(SpardaError, match=r"a\.txt\.gz: cannot be read"):
        text_of(tmp_path / "a.txt.gz", "text")


def integers(*values: int) -> bytes:
    return struct.pack(f">{len(values)}i", *values)


def chars(text: str | None) -> bytes:
    return integers(9, -1) if text is None else integers(0x40009, len(text.encode())) + text.encode()


def strings(*texts: str | None) -> bytes:
    return integers(16, len(texts)) + b"".join(map(chars, texts))


def named(*names: str) -> bytes:
    """The attribute pair list of a named list."""
    return integers(0x402, 1) + chars("names") + strings(*names) + integers(254)


def database(folder: Path, *lines: str | None) -> Path:
    """``Rdata.rdb`` with one character vector named ``emma`` and its index, as R writes them."""
    head = b"X\n" + integers(3, 0x40201, 0x30500, 5) + b"UTF-8"
    value = head + strings(*lines)
    stored = struct.pack(">i", len(value)) + zlib.compress(value)
    where = integers(13, 2, 0, len(stored))
    variables = integers(0x213, 1) + where + named("emma")
    index = head + integers(0x213, 1) + variables + named("variables")
    (folder / "Rdata.rdx").write_bytes(gzip.compress(index))
    (folder / "Rdata.rdb").write_bytes(stored)
    return folder / "Rdata.rdb"


def test_a_character_vector_is_read_out_of_an_r_database(tmp_path: Path) -> None:
    rdb = database(tmp_path, "EMMA", None, "Emma Woodhouse, café")
    assert character_vector(rdb, "emma") == ["EMMA", "", "Emma Woodhouse, café"]
    assert text_of(rdb, "rdb", variable="emma") == "EMMA\n\nEmma Woodhouse, café\n"
    with pytest.raises(SpardaError, match="no variable 'lucy'"):
        character_vector(rdb, "lucy")


def test_a_damaged_r_database_is_named(tmp_path: Path) -> None:
    rdb = database(tmp_path, "EMMA")
    rdb.write_bytes(rdb.read_bytes()[:20])
    with pytest.raises(SpardaError, match=r"Rdata\.rdb: not a database of texts"):
        character_vector(rdb, "emma")
    rdb.with_suffix(".rdx").unlink()
    with pytest.raises(SpardaError, match="cannot be read"):
        character_vector(rdb, "emma")


def test_a_machine_without_apt_get_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(SpardaError, match="apt-get is not installed"):
        collect(tmp_path, Manifest((source(),)))


def test_what_apt_get_said_last_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 100, "", "W: old\nE: Unable to locate package books\n")

    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SpardaError, match=r"package books was not fetched \(Unable to locate package books\)"):
        collect(tmp_path, Manifest((source(),)))


def test_the_command_prints_one_object_or_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "read_manifest", lambda: Manifest((source(),)))
    monkeypatch.setattr(corpus, "debian", lambda: package(a="first\n"))
    assert corpus.main([str(tmp_path), "--json"]) == 0
    (text,) = json.loads(capsys.readouterr().out)["texts"]
    assert (text["name"], text["bytes"]) == ("a-book", 6)
    assert corpus.main([]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [({"name": "A Book"}, "lower-case"), ({"paths": ()}, "no paths")],
)
def test_a_document_that_cannot_be_is_refused(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpardaError, match=complaint):
        source(**changed)


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(SpardaError, match="'a-book' is there twice"):
        Manifest((source(), source()))


def test_the_shipped_manifest_has_what_an_evaluation_needs() -> None:
    documents = read_manifest().document
    evals = [d for d in documents if d.role == "eval"]
    kinds = ("novel", "manual", "code", "essay")
    assert {k: sum(d.kind == k for d in evals) for k in kinds} == dict.fromkeys(kinds, 2)
    trained = {(d.package, p) for d in documents if d.role == "train" for p in d.paths}
    assert not [d.name for d in evals if any((d.package, p) in trained for p in d.paths)]
    assert "document" in tomllib.loads(corpus.MANIFEST.read_text(encoding="utf-8"))
