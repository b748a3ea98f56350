"""Long real texts for training a projection and for measuring what choosing blocks costs, from Debian packages.

``corpus.toml`` says which. The texts are fetched, never shipped: ``make texts`` or ``python -m`` of this module.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparda.calibrate.measure.quality.command import Parser
from sparda.calibrate.measure.quality.extract import text_of
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, read_toml, write_text

MANIFEST = Path(__file__).with_name("corpus.toml")
ROLES = ("train", "eval")

Fetch = Callable[[str, Path], None]
"""Unpacks a package, by name, into an empty folder."""


@dataclass(frozen=True, slots=True)
class Source:
    """One document and where it comes from.

    ``paths`` are patterns inside the package, joined in the order given and sorted within each; ``**`` is any depth;
    ``exclude`` takes files out again by their path. The text is kept from ``begin`` (its first place) up to ``end``
    (its first place after that) and cut after the last whole line within ``limit_bytes``.
    """

    name: str
    role: Literal["train", "eval"]
    kind: Literal["novel", "manual", "code", "essay"]
    package: str
    paths: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    form: Literal["text", "html", "info", "rdb"] = "text"
    variable: str = ""
    drop: tuple[str, ...] = ()
    begin: str = ""
    end: str = ""
    limit_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.name or not all(c.islower() or c.isdigit() or c == "-" for c in self.name):
            raise SpardaError(f"name {self.name!r}; lower-case letters, digits and hyphens are allowed.")
        if not self.paths:
            raise SpardaError(f"document {self.name!r} has no paths; give at least one pattern.")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The documents, none named twice."""

    document: tuple[Source, ...]

    def __post_init__(self) -> None:
        names = [d.name for d in self.document]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice:
            raise SpardaError(f"document {twice!r} is there twice; give each its own name.")


@dataclass(frozen=True, slots=True)
class Text:
    """A collected document: ``written`` is false where it was there before."""

    name: str
    role: str
    kind: str
    path: Path
    text_bytes: int = 0
    written: bool = False


def read_manifest(path: Path = MANIFEST) -> Manifest:
    """The documents of a manifest file. Raises SpardaError for one that is wrong."""
    return read(Manifest, read_toml(path), where=str(path))


def collect(folder: Path, manifest: Manifest | None = None, fetch: Fetch | None = None) -> list[Text]:
    """Write every document that is not there yet to ``folder/ROLE/NAME.txt``, in UTF-8, whole or not at all.

    Everything that can be had is written before a SpardaError says which packages or files could not.
    """
    documents = (manifest or read_manifest()).document
    wanted = [d for d in documents if not path_in(folder, d).is_file()]
    if wanted and fetch is None:
        fetch = debian()
    missing: list[str] = []
    for package in dict.fromkeys(d.package for d in wanted):
        assert fetch is not None
        with tempfile.TemporaryDirectory(prefix="sparda-texts-") as temporary:
            try:
                fetch(package, Path(temporary))
            except SpardaError as error:
                missing.append(str(error))
                continue
            for document in (d for d in wanted if d.package == package):
                try:
                    _write(path_in(folder, document), extract(document, Path(temporary)))
                except SpardaError as error:
                    missing.append(f"{document.name}: {error}")
    if missing:
        raise SpardaError(f"{len(missing)} of the texts or packages could not be had: {' '.join(missing)}")
    new = {d.name for d in wanted}
    return [
        Text(d.name, d.role, d.kind, path, path.stat().st_size, d.name in new)
        for d in documents
        for path in [path_in(folder, d)]
    ]


def path_in(folder: Path, document: Source) -> Path:
    """Where a document's text is kept."""
    return folder / document.role / f"{document.name}.txt"


def extract(document: Source, root: Path) -> str:
    """The document's text, from the package unpacked at ``root``.

    Raises SpardaError where a pattern finds nothing or a mark is not in the text.
    """
    texts = [text_of(f, document.form, drop=document.drop, variable=document.variable) for f in _files(document, root)]
    text = "\n".join(texts)
    if document.begin:
        text = text[_place(document, text, document.begin) :]
    if document.end:
        text = text[: _place(document, text, document.end)].rstrip() + "\n"
    return _cut(text, document.limit_bytes) if document.limit_bytes else text


def _files(document: Source, root: Path) -> list[Path]:
    found: dict[Path, None] = {}
    for pattern in document.paths:
        here = sorted(f for f in root.glob(pattern) if f.is_file())
        if not here:
            raise SpardaError(f"package {document.package} has no file {pattern}; mend its paths in the manifest.")
        found.update(dict.fromkeys(here))
    inside = {f: str(f.relative_to(root)) for f in found}
    return [f for f in found if not any(fnmatch.fnmatch(inside[f], out) for out in document.exclude)]


def _place(document: Source, text: str, mark: str) -> int:
    at = text.find(mark)
    if at < 0:
        raise SpardaError(f"package {document.package}: {mark!r} is not in the text; mend the mark in the manifest.")
    return at


def _cut(text: str, limit_bytes: int) -> str:
    data = text.encode()
    return text if len(data) <= limit_bytes else data[: data.rfind(b"\n", 0, limit_bytes) + 1].decode()


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpardaError(
            f"{path.parent}: cannot be made ({error.strerror}); give a folder you may write to."
        ) from None
    write_text(path, text)


def debian() -> Fetch:
    """Fetches with apt-get, without root. Raises SpardaError where it or dpkg-deb is not installed."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise SpardaError(
                f"the texts come from Debian packages and {tool} is not installed; run on Debian or a kin."
            )
    return _fetch_debian


def _fetch_debian(package: str, into: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="sparda-deb-") as temporary:
        _run(["apt-get", "download", "-q", package], Path(temporary), f"package {package} was not fetched")
        archives = list(Path(temporary).glob("*.deb"))
        if len(archives) != 1:
            raise SpardaError(f"package {package}: {len(archives)} archives came; one is wanted.")
        _run(["dpkg-deb", "-x", str(archives[0]), str(into)], into, f"package {package} was not unpacked")


def _run(command: list[str], folder: Path, failed: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith(("E:", "dpkg"))]
        why = said[-1].removeprefix("E: ") if said else f"{command[0]} ended with {done.returncode}"
        raise SpardaError(f"{failed} ({why.rstrip('.')}); look at the network and at `apt-get update`.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: ``FOLDER`` and ``--json``; returns its exit code."""
    parser = Parser("corpus", __doc__)
    parser.add_argument("folder", type=Path, help="where the texts are written, in train/ and eval/")
    try:
        given = parser.parse_args(arguments)
        texts = collect(given.folder)
    except SpardaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps({"texts": [_shown(t) for t in texts]}, indent=2))
        return 0
    for t in texts:
        print(f"{t.role:5}  {t.kind:6}  {t.text_bytes:>9,} bytes  {t.path}{'' if t.written else '  (was there)'}")
    return 0


def _shown(t: Text) -> dict[str, object]:
    return {"name": t.name, "role": t.role, "kind": t.kind, "path": str(t.path), "bytes": t.text_bytes}


if __name__ == "__main__":
    sys.exit(main())
