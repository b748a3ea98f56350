"""Two calls of the CUDA runtime that torch does not offer: a copy from one address to another, and many in one call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sparda.engine.errors import SpardaError

BATCH_SINCE, BATCH_WITHOUT_INDEX_SINCE = 12080, 13000
"""Versions of the runtime, 1000 x major + 10 x minor: ``cudaMemcpyBatchAsync`` came with the first. Up to the second it
also says which copy was refused: it has one argument more."""

HOST_TO_DEVICE = 1
ANY_ORDER = 3
"""``cudaMemcpySrcAccessOrderAny``: sources may be read before the stream comes to the copy, and after the call."""

MAPS = Path("/proc/self/maps")
"""What this process has loaded, and from where."""

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``cudaMemcpyAttributes``; the locations are hints for managed memory, which there is none of here."""

    _fields_ = (("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


class CudaRuntime:
    """Copies from host memory to the GPU by ``library``. Addresses and handles are plain integers."""

    def __init__(self, library: Any) -> None:
        self._library = library
        version = ctypes.c_int()
        library.cudaRuntimeGetVersion.argtypes = [_POINTER]
        library.cudaRuntimeGetVersion(ctypes.byref(version))
        self.version = version.value
        self.copy = _typed(library.cudaMemcpyAsync, [_POINTER, _POINTER, _SIZE, ctypes.c_int, _POINTER])
        """cudaMemcpyAsync(target, source, bytes, HOST_TO_DEVICE, stream): 0 or an error for ``check``."""
        self._attributes = _Attributes(order=ANY_ORDER)
        self._first, self._refused = _SIZE(0), _SIZE(0)
        self._batch = self._find_batch()

    def _find_batch(self) -> Callable[..., int] | None:
        if self.version < BATCH_SINCE or not hasattr(self._library, "cudaMemcpyBatchAsync"):
            return None
        after = [_POINTER] if self.version >= BATCH_WITHOUT_INDEX_SINCE else [_POINTER, _POINTER]
        before = [_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE]
        return _typed(self._library.cudaMemcpyBatchAsync, before + after)

    def require_batch(self) -> None:
        """Raise SpardaError where many copies cannot be started in one call."""
        if self._batch is None:
            major, minor = self.version // 1000, self.version % 1000 // 10
            raise SpardaError(
                f"the CUDA runtime is {major}.{minor} and starts no batch of copies: cudaMemcpyBatchAsync came with "
                "12.8; install a newer torch, or give config.transfer 'blocks' or another."
            )

    def copy_batch(self, targets: int, sources: int, sizes: int, count: int, stream: int) -> None:
        """Start ``count`` copies in one call. ``targets``, ``sources``, ``sizes``: addresses of 64-bit arrays.

        ``stream`` must not be the default one: the call refuses it. Sources must be as they are to be copied now.
        """
        self.require_batch()
        assert self._batch is not None
        attributes, first = ctypes.byref(self._attributes), ctypes.byref(self._first)
        refused = () if self.version >= BATCH_WITHOUT_INDEX_SINCE else (ctypes.byref(self._refused),)
        self.check(self._batch(targets, sources, sizes, count, attributes, first, 1, *refused, stream))

    def check(self, error: int) -> None:
        """Raise SpardaError for an error that a copy returned."""
        if error:
            text = self._library.cudaGetErrorString
            text.argtypes, text.restype = [ctypes.c_int], ctypes.c_char_p
            raise SpardaError(
                f"the CUDA runtime refused a copy to the GPU: {text(error).decode()}; give another config.transfer "
                "than 'blocks' and 'batch'."
            )


def _typed(function: Any, arguments: list[Any]) -> Callable[..., int]:
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function  # type: ignore[no-any-return]


@functools.cache
def cuda_runtime() -> CudaRuntime:
    """The runtime that torch has loaded. Raises SpardaError where it cannot be found."""
    for name in _candidates():
        try:
            return CudaRuntime(ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue
    raise SpardaError(
        "the CUDA runtime library (libcudart) that torch uses was not found; install a torch that brings it along, or "
        "give another config.transfer than 'blocks' and 'batch'."
    )


def _candidates() -> list[str]:
    """The very file that is loaded, then what the loader finds under the names that such files have."""
    try:
        mapped = [line.split(maxsplit=5)[-1].strip() for line in MAPS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        mapped = []
    loaded = [path for path in dict.fromkeys(mapped) if Path(path).name.startswith("libcudart")]
    major = (torch.version.cuda or "").split(".")[0]
    return loaded + [f"libcudart.so.{n}" for n in dict.fromkeys((major, "13", "12")) if n]
