"""Tensors in safetensors files: headers first, then one at a time; and binary files that are whole or not there."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sparda.engine.errors import SpardaError

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of values that a checkpoint may hold, by their names in a header."""

_NAMES = {dtype: name for name, dtype in FLOATS.items()}
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of a tensor before any of its bytes are read."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


class TensorFiles:
    """The tensors of some safetensors files, by name; ``headers`` are there at once, values are read when asked for."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._open: dict[Path, Any] = {}
        self.headers: dict[str, Header] = {}
        for file in files:
            self._open[file] = opened = _opened(file)
            for name in opened.keys():  # noqa: SIM118 - no mapping, it has only this method
                part = opened.get_slice(name)
                if name in self.headers:
                    raise SpardaError(f"{name} is in {self.headers[name].file.name} and in {file}; remove one.")
                self.headers[name] = Header(tuple(part.get_shape()), part.get_dtype(), file)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, as stored."""
        tensor: Tensor = self._open[self.headers[name].file].get_tensor(name)
        return tensor


def _opened(file: Path) -> Any:
    if not file.is_file():
        raise SpardaError(f"{file}: there is no such file; check the path, or fetch the missing shard.")
    package = _safetensors()
    try:
        return package.safe_open(str(file), framework="pt", device="cpu")
    except (OSError, package.SafetensorError) as error:
        raise SpardaError(f"{file}: not a whole safetensors file ({error}); fetch or write it anew.") from None


def _safetensors() -> ModuleType:
    try:
        import safetensors
    except ModuleNotFoundError:
        raise SpardaError(
            "reading safetensors needs a package that is not installed: pip install 'sparda[engine]'."
        ) from None
    return safetensors


def check_headers(
    headers: Mapping[str, Header], wanted: Mapping[str, tuple[int, ...]], harmless: Iterable[str], where: str
) -> None:
    """Refuse tensors that are missing, unknown, misshapen or of no floating type, naming the first few of each.

    ``wanted``: shape by name; ``harmless``: names of the file that may be ignored. Raises SpardaError.
    """
    missing = [name for name in wanted if name not in headers]
    extra = sorted(set(headers) - set(wanted) - set(harmless))
    present = [(name, shape) for name, shape in wanted.items() if name in headers]
    misshapen = [f"{n} {list(headers[n].shape)}, not {list(s)}" for n, s in present if headers[n].shape != s]
    mistyped = [f"{n} {headers[n].dtype}" for n, _ in present if headers[n].dtype not in FLOATS]
    complaints = [
        f"{len(names)} {what}: {_first(names)}"
        for what, names in (
            ("missing", missing),
            ("unknown", extra),
            ("of another shape than the configuration's", misshapen),
            (f"of a type that is none of {', '.join(FLOATS)}", mistyped),
        )
        if names
    ]
    if complaints:
        raise SpardaError(f"{where}: the tensors do not fit the model. {'; '.join(complaints)}. Give its own files.")


def _first(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, whole or not at all.

    One tensor after the other is brought to the CPU: the package's own writer wants all of them there at once and
    refuses views of one storage, which the rows of a fused projection are. Layout: eight bytes with the length of the
    header, the header in JSON, the values. Raises SpardaError where the file cannot be written.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary, open(temporary, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def save_torch(path: Path, content: Mapping[str, object]) -> None:
    """Write plain objects and tensors with ``torch.save``, whole or not at all. Raises SpardaError where it cannot."""
    with replacing(path) as temporary, open(temporary, "xb") as file:
        torch.save(dict(content), file)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A name beside ``target`` to write a file or folder under; renamed to it when the block ends well, else removed.

    Raises SpardaError where the system refuses.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            yield temporary
            os.replace(temporary, target)
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary)
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise SpardaError(
            f"{target}: cannot be written ({error.strerror}); give a new path in a folder that you may write to."
        ) from None
