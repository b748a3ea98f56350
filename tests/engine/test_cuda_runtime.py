"""The CUDA runtime's copies, by a library that copies within host memory and has the real one's signatures."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch

from sparda.engine import cuda_runtime
from sparda.engine.copy_engine import BlockCopies
from sparda.engine.cuda_runtime import ANY_ORDER, HOST_TO_DEVICE, CudaRuntime
from sparda.engine.errors import SpardaError

ROWS, SLOTS, VALUES, STREAM = 12, 7, 16, 77
POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t


class FakeLibrary:
    """Functions with C's calling convention; ``calls``: name, copies and stream of each that was made."""

    def __init__(self, version: int, error: int = 0) -> None:
        self.version, self.error, self.calls = version, error, list[tuple[str, int, int]]()
        self.cudaRuntimeGetVersion = ctypes.CFUNCTYPE(ctypes.c_int, POINTER)(self._version)
        one = [POINTER, POINTER, SIZE, ctypes.c_int, POINTER]
        self.cudaMemcpyAsync = ctypes.CFUNCTYPE(ctypes.c_int, *one)(self._copy)
        self.cudaGetErrorString = partial(lambda code: b"no such thing")
        many: list[Any] = [POINTER, POINTER, POINTER, SIZE, POINTER, POINTER, SIZE]
        if version >= 13000:
            self.cudaMemcpyBatchAsync = ctypes.CFUNCTYPE(ctypes.c_int, *many, POINTER)(self._batch)
        elif version >= 12080:
            function = ctypes.CFUNCTYPE(ctypes.c_int, *many, POINTER, POINTER)
            self.cudaMemcpyBatchAsync = function(self._batch_with_index)

    def _version(self, found: int) -> int:
        ctypes.c_int.from_address(found).value = self.version
        return 0

    def _copy(self, target: int, source: int, size: int, kind: int, stream: int) -> int:
        assert kind == HOST_TO_DEVICE
        self.calls.append(("one", 1, stream))
        if not self.error:
            ctypes.memmove(target, source, size)
        return self.error

    def _batch(
        self, targets: int, sources: int, sizes: int, count: int, attributes: int, first: int, kinds: int, stream: int
    ) -> int:
        order, *locations, flags = (ctypes.c_int * 6).from_address(attributes)
        assert (order, locations, flags) == (ANY_ORDER, [0] * 4, 0)
        assert (SIZE.from_address(first).value, kinds) == (0, 1)
        lists = [(SIZE * count).from_address(x) for x in (targets, sources, sizes)]
        self.calls.append(("batch", count, stream))
        for target, source, size in zip(*lists, strict=True):
            ctypes.memmove(target, source, size)
        return self.error

    def _batch_with_index(self, *arguments: Any) -> int:
        *same, refused, stream = arguments
        assert refused
        return self._batch(*same, stream)  # type: ignore[call-arg]


class FakeStream:
    """A stream with a handle, which is waited for by others."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream, self.waits = handle, list[int]()

    def wait_stream(self, other: FakeStream) -> None:
        self.waits.append(other.cuda_stream)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    made = FakeStream(STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made)
    return made


class Listed:
    """Three blocks to copy of a list of five."""

    def __init__(self, runtime: CudaRuntime | None) -> None:
        self.pool = torch.arange(ROWS * VALUES, dtype=torch.float32).view(ROWS, VALUES)
        self.slots = torch.full((SLOTS, VALUES), -1.0)
        self.copies = BlockCopies(self.pool, ROWS, runtime)
        self.src, self.dst = (torch.tensor(x, dtype=torch.int32) for x in ([11, 0, 5, 3, 3], [2, 6, 0, 1, 1]))
        self.copies.enlist(self.src, self.dst, 3, self.slots)

    def check(self) -> None:
        expected = torch.full((SLOTS, VALUES), -1.0)
        expected[[2, 6, 0]] = self.pool[[11, 0, 5]]
        assert torch.equal(self.slots, expected)


STARTS: list[Callable[[BlockCopies], None]] = [BlockCopies.one_by_one, BlockCopies.at_once]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("version", [0, 12080, 12090, 13000, 13020])
def test_the_listed_blocks_and_no_others_are_copied_whatever_carries_them(
    start: Callable[[BlockCopies], None], version: int, stream: FakeStream
) -> None:
    listed = Listed(CudaRuntime(FakeLibrary(version)) if version else None)
    start(listed.copies)
    listed.check()


def test_every_block_is_a_call_or_all_are_one_on_the_current_stream(stream: FakeStream) -> None:
    library = FakeLibrary(13000)
    listed = Listed(CudaRuntime(library))
    listed.copies.one_by_one()
    assert library.calls == [("one", 1, STREAM)] * 3
    library.calls.clear()
    listed.copies.at_once()
    assert library.calls == [("batch", 3, STREAM)]


def test_a_batch_on_the_default_stream_takes_a_stream_of_its_own_between_two_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    default, side = FakeStream(0), FakeStream(5)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: default)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: side)
    library = FakeLibrary(13000)
    Listed(CudaRuntime(library)).copies.at_once()
    assert library.calls == [("batch", 3, 5)]
    assert (side.waits, default.waits) == ([0], [5])


@pytest.mark.parametrize("start", STARTS)
def test_an_empty_list_starts_nothing(start: Callable[[BlockCopies], None], stream: FakeStream) -> None:
    library = FakeLibrary(13000)
    listed = Listed(CudaRuntime(library))
    listed.copies.enlist(listed.src, listed.dst, 0, listed.slots)
    start(listed.copies)
    assert library.calls == []


def test_a_runtime_without_batches_says_which_it_is_and_still_copies_one_by_one(stream: FakeStream) -> None:
    listed = Listed(CudaRuntime(FakeLibrary(12060)))
    with pytest.raises(SpardaError, match=r"runtime is 12\.6 and starts no batch .* 12\.8; .* config\.transfer"):
        listed.copies.at_once()
    listed.copies.one_by_one()
    listed.check()


@pytest.mark.parametrize("start", STARTS)
def test_a_refused_copy_is_an_error_with_the_runtimes_reason(
    start: Callable[[BlockCopies], None], stream: FakeStream
) -> None:
    listed = Listed(CudaRuntime(FakeLibrary(13000, error=1)))
    with pytest.raises(SpardaError, match="refused a copy to the GPU: no such thing"):
        start(listed.copies)


def test_the_library_that_is_loaded_comes_before_those_that_could_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    maps = tmp_path / "maps"
    line = "7f0000000000-7f0000001000 r-xp 00000000 00:00 1 {}\n"
    files = ["/opt/a b/libcudart.so.13", "/opt/a b/libcudart.so.13", "/lib/libc.so.6", ""]
    maps.write_text("".join(line.format(file) for file in files))
    monkeypatch.setattr(cuda_runtime, "MAPS", maps)
    tried: list[str] = []

    def load(name: str) -> FakeLibrary:
        tried.append(name)
        if name.startswith("/opt"):
            raise OSError
        return FakeLibrary(13000)

    monkeypatch.setattr(cuda_runtime, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": load}))
    assert cuda_runtime.cuda_runtime.__wrapped__().version == 13000
    assert tried[0] == "/opt/a b/libcudart.so.13"
    assert tried[1].startswith("libcudart.so.1")


def test_a_machine_without_the_runtime_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(name: str) -> FakeLibrary:
        raise OSError

    monkeypatch.setattr(cuda_runtime, "MAPS", tmp_path / "nothing")
    monkeypatch.setattr(cuda_runtime, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": load}))
    with pytest.raises(SpardaError, match=r"libcudart\) that torch uses was not found; .* config\.transfer"):
        cuda_runtime.cuda_runtime.__wrapped__()
