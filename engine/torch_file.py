"""Tensors of a ``torch.save`` file, read without running anything that the file says.

Such a file is a zip archive: a pickle (``data.pkl``) that describes the object, and the values of each storage in an
entry of its own. A pickle may name any function and have it called. Here it can name anything but get nothing: tensors
become descriptions of where their values lie, and every other name becomes ``Inert``, which ignores what it is given.
Optimizer states, numpy arrays and random number states are thereby skipped, and their values are never read.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
from torch import Tensor

from sparda.engine.errors import SpardaError

_STORAGES = {
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "BFloat16Storage"): torch.bfloat16,
}
_MOST_PICKLE_BYTES = 1 << 30


class Inert:
    """What stands for every object of the file that is no tensor, table or plain value. It does nothing."""

    __slots__ = ()

    def __new__(cls, *args: object, **kwargs: object) -> Inert:
        return object.__new__(cls)

    # Defined here, so that the pickle cannot set attributes: on the class it fails for want of ``self``.
    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        pass

    def extend(self, values: object) -> None:
        pass

    def add(self, value: object) -> None:
        pass


class Table(dict[object, object]):
    """An OrderedDict of the file; its attributes (a state dict's ``_metadata``) are dropped."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class Stored:
    """A tensor of the file, not read yet: a strided view of a storage."""

    __slots__ = ("offset", "shape", "storage", "stride")

    def __init__(self, storage: object, offset: Any, shape: Any, stride: Any, *rest: object) -> None:
        self.storage, self.offset, self.shape, self.stride = storage, offset, shape, stride

    def __setstate__(self, state: object) -> None:
        pass


class _Parameter:
    """``torch.nn.Parameter``: the tensor that it wraps."""

    __slots__ = ()

    def __new__(cls, data: Any = None, *rest: object) -> Any:
        return data

    def __setstate__(self, state: object) -> None:
        pass


class _Storage(NamedTuple):
    """The values of one or more tensors; a named tuple, since a pickle cannot change one."""

    key: str
    dtype: object
    length: int


_KNOWN: dict[tuple[str, str], Any] = {
    **_STORAGES,
    ("collections", "OrderedDict"): Table,
    ("torch._utils", "_rebuild_tensor_v2"): Stored,
    ("torch._utils", "_rebuild_parameter"): _Parameter,
}


class _Unpickler(pickle.Unpickler):
    """Looks nothing up in Python: a name is one of ``_KNOWN`` or inert."""

    def find_class(self, module: str, name: str, /) -> Any:
        return _KNOWN.get((module, name), Inert)

    def persistent_load(self, pid: Any, /) -> object:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(key, str) or not isinstance(count, int):
            raise pickle.UnpicklingError("a persistent id that is not a storage")
        return _Storage(key, dtype, count)


class TorchFile:
    """An open ``torch.save`` file; ``content`` is what was saved, ``Stored`` for tensors and ``Inert`` for objects.

    Raises SpardaError for a file of another form, older ones without a zip archive included: reading those would need
    the pickle's own word on what follows it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except FileNotFoundError:
            raise SpardaError(f"{path}: there is no such file; check the path.") from None
        except OSError as error:
            raise SpardaError(f"{path}: cannot be read ({error.strerror}); give a file that you may read.") from None
        except zipfile.BadZipFile:
            self._refuse(
                "not a zip archive as torch.save writes since version 1.6; older files cannot be read without running "
                "code. Load it where you trust it and save it again"
            )
        roots = [n.removesuffix("data.pkl") for n in self._archive.namelist() if n.endswith("/data.pkl")]
        if len(roots) != 1 or roots[0].count("/") != 1:
            self._refuse("a zip archive, but not one that torch.save writes; give a checkpoint")
        self._root = roots[0]
        if f"{self._root}byteorder" in self._archive.namelist() and self._bytes("byteorder", 16) != b"little":
            self._refuse("its values are big-endian; save it again on a little-endian machine")
        try:
            self.content: object = _Unpickler(io.BytesIO(self._bytes("data.pkl", _MOST_PICKLE_BYTES))).load()
        except SpardaError:
            raise
        except Exception as error:
            # Whatever a malformed pickle trips over; none of it is ours to interpret.
            self._refuse(f"its pickle cannot be read ({error}); write the checkpoint anew")

    def read(self, stored: Stored, name: str) -> Tensor:
        """The values of a tensor of ``content``, contiguous on the CPU.

        Raises SpardaError, naming it, where it is of no floating type or reaches beyond its storage.
        """
        storage, shape, stride, offset = stored.storage, stored.shape, stored.stride, stored.offset
        if not isinstance(storage, _Storage) or not isinstance(storage.dtype, torch.dtype):
            self._refuse(f"{name} is not of a floating type (fp64, fp32, fp16, bf16); save it as one")
        if not (_sizes(shape) and _sizes(stride) and _sizes((offset,)) and len(shape) == len(stride)) or 0 in shape:
            self._refuse(f"{name} has no valid shape; write the checkpoint anew")
        if offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) >= storage.length:
            self._refuse(f"{name} of shape {list(shape)} reaches beyond its values; write the checkpoint anew")
        length = storage.length * storage.dtype.itemsize
        data = self._bytes(f"data/{storage.key}", length)
        if len(data) != length:
            self._refuse(f"{name} has {len(data)} bytes of values for {length}; write the checkpoint anew")
        flat = torch.frombuffer(bytearray(data), dtype=storage.dtype)
        return flat.as_strided(shape, stride, offset).clone(memory_format=torch.contiguous_format)

    def _bytes(self, entry: str, most: int) -> bytes:
        """The bytes of an entry. torch.save compresses none: a small file cannot swell in memory."""
        try:
            info = self._archive.getinfo(self._root + entry)
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > most:
                self._refuse(f"entry {entry} is compressed or too long; write the checkpoint anew")
            return self._archive.read(info)
        except (KeyError, zipfile.BadZipFile, OSError, EOFError) as error:
            self._refuse(f"entry {entry} cannot be read ({error}); write the checkpoint anew")

    def _refuse(self, why: str) -> NoReturn:
        raise SpardaError(f"{self.path}: {why}.")


def _sizes(value: object) -> TypeGuard[tuple[int, ...]]:
    """Whether a pickle's shape, stride or offset is one."""
    return isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value)
