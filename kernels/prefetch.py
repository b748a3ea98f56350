"""Copy missing key/value blocks from pinned host memory into GPU block slots, over PCIe, from a few thread blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparda.kernels.launch import shared_bytes

SHARED_BYTES = 200 * 1024
"""Shared memory one thread block may fill with chunks in flight, in bytes."""
DEFAULT_CHUNK = 16 * 1024
"""Bytes copied at a time unless the caller says otherwise: half a 64 x 128 block of bf16."""
WIDE_BYTES = 16
"""Bytes in the widest access of one thread."""
ROWS = (torch.bfloat16, torch.float32)
"""Types of pool and cache; both alike."""


HELD_CHUNK = 8 * 1024
"""Bytes by which the shared memory of a thread block that copies is counted out."""


@triton.jit
def _prefetch_kernel(
    pool: tl.tensor,
    cache: tl.tensor,
    src: tl.tensor,
    dst: tl.tensor,
    count: tl.tensor,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    never: tl.tensor,
    HELD: tl.constexpr,
    HELD_STAGES: tl.constexpr,
) -> None:
    parts: tl.constexpr = VALUES // CHUNK
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    items = tl.cdiv(tl.load(count) - program, programs)
    # VALUES and CHUNK are compile-time powers of two, so the compiler sees that every chunk starts on a 16-byte
    # boundary although its row is loaded at run time: each thread then copies 16 bytes at a time, asynchronously.
    inside = tl.arange(0, CHUNK)
    # A block stays with one program: two that share it would both wait for the translation of its host addresses.
    for task in tl.range(0, items * parts, num_stages=STAGES):
        item = program + (task // parts) * programs
        begin = (task % parts) * CHUNK
        source = tl.load(src + item).to(tl.int64) * VALUES + begin
        target = tl.load(dst + item).to(tl.int64) * VALUES + begin
        tl.store(cache + target + inside, tl.load(pool + source + inside))
    if HELD_STAGES:
        # ``never`` is 0, which the compiler cannot know: this loop costs nothing but the shared memory of its pipeline,
        # which is all that a multiprocessor has. A thread block that computes beside one that copies would wait for
        # host memory behind it, load by load, and the whole kernel would wait for that thread block.
        held = tl.arange(0, HELD)
        for task in tl.range(0, never, num_stages=HELD_STAGES):
            tl.store(cache + task * HELD + held, tl.load(pool + task * HELD + held))


def prefetch(
    pool: torch.Tensor,
    cache: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    count: torch.Tensor,
    *,
    ctas: int,
    warps: int,
    stages: int,
    chunk_values: int = 0,
) -> None:
    """Set ``cache[dst[i]] = pool[src[i]]`` for ``i < count``; rows of ``cache`` named by no such ``i`` are untouched.

    pool: [host_rows, V] bf16 or fp32, pinned host memory (or GPU memory), read in place.
    cache: [gpu_rows, V], of the type of pool, on the GPU; V is the values in one block, 2 * block * head_dim.
    src, dst: int32 [N], rows of ``pool`` and of ``cache``; entries of ``dst`` below ``count`` are distinct.
    count: int32 [1] on the GPU, at most N, so that the host never waits to learn how many blocks are missing.
    ctas: thread blocks launched, however long the list is; thread block p copies entries p, p + ctas, and so on, each
    whole. Each has a multiprocessor to itself where ``pool`` is host memory and stages are above 1.
    warps: warps in each of them.
    stages: depth of the copy pipeline: ``stages - 1`` chunks of ``chunk_values`` values are on their way into shared
    memory while one is stored; 1 copies through registers, one chunk at a time.
    chunk_values: values copied at a time; 0 takes DEFAULT_CHUNK bytes, or the whole row where that is shorter.

    Raises ValueError for a shape, type or setting that the copy cannot take.
    """
    _check_tensors(pool, cache, src, dst, count)
    values = int(pool.shape[1])
    chunk_values = chunk_values or min(DEFAULT_CHUNK // pool.element_size(), values)
    _check_settings(pool, ctas, warps, stages, chunk_values)
    held = HELD_CHUNK // pool.element_size()
    _prefetch_kernel[(ctas,)](
        pool, cache, src, dst, count, VALUES=values, CHUNK=chunk_values, STAGES=stages, never=0, HELD=held,
        HELD_STAGES=_held_stages(pool, cache) if stages > 1 else 0, num_warps=warps,
    )  # fmt: skip


def _held_stages(pool: torch.Tensor, cache: torch.Tensor) -> int:
    """Stages of a pipeline of HELD_CHUNK bytes each that leaves nobody else room beside it; 0 where none is wanted.

    Copies inside GPU memory and interpreted ones hold nothing.
    """
    # A pipeline keeps one chunk fewer than it has stages, and none may be too many.
    return shared_bytes(cache) // HELD_CHUNK if cache.is_cuda and not pool.is_cuda else 0


def prefetch_reference(
    pool: torch.Tensor, cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, count: torch.Tensor
) -> None:
    """What ``prefetch`` does, by plain indexing; shapes as there. Waits for ``count`` on the host."""
    missing = int(count.item())
    rows = pool[src[:missing].to(pool.device, torch.int64)]
    cache[dst[:missing].to(torch.int64)] = rows.to(cache.device)


def _check_tensors(
    pool: torch.Tensor, cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, count: torch.Tensor
) -> None:
    for name, rows in (("pool", pool), ("cache", cache)):
        if rows.dim() != 2 or rows.dtype not in ROWS or not rows.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous bf16 or fp32 [rows, values], got {rows.dtype} {tuple(rows.shape)}"
            )
    if pool.dtype != cache.dtype:
        raise ValueError(f"pool is {pool.dtype} and cache is {cache.dtype}: they must be alike")
    if pool.shape[1] != cache.shape[1]:
        raise ValueError(f"pool has {pool.shape[1]} values a row and cache has {cache.shape[1]}: they must agree")
    if cache.is_cuda and not (pool.is_cuda or pool.is_pinned()):
        raise ValueError("pool must be pinned host memory for the GPU to read it, got pageable memory")
    for name, index in (("src", src), ("dst", dst), ("count", count)):
        if index.dim() != 1 or index.dtype != torch.int32 or not index.is_contiguous():
            raise ValueError(f"{name} must be a contiguous int32 vector, got {index.dtype} {tuple(index.shape)}")
        if index.device != cache.device:
            raise ValueError(f"{name} must be on {cache.device} like cache, got {index.device}")
    if src.shape != dst.shape or count.numel() != 1:
        raise ValueError(
            f"src and dst must be equally long and count hold one value, got {src.numel()}, {dst.numel()} and "
            f"{count.numel()}"
        )


def _check_settings(pool: torch.Tensor, ctas: int, warps: int, stages: int, chunk: int) -> None:
    values, value_bytes = int(pool.shape[1]), pool.element_size()
    if ctas < 1:
        raise ValueError(f"ctas must be at least 1, got {ctas}")
    if warps not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"warps must be 1, 2, 4, 8, 16 or 32, got {warps}")
    fewest = WIDE_BYTES // value_bytes
    if chunk < fewest or chunk & (chunk - 1) or values % chunk:
        raise ValueError(
            f"chunk_values must be a power of two from {fewest} up that divides the {values} values of a row, "
            f"got {chunk}"
        )
    largest = SHARED_BYTES // (value_bytes * chunk)
    if largest < 1:
        raise ValueError(
            f"chunk_values must be at most {SHARED_BYTES // value_bytes} to fit in shared memory, got {chunk}"
        )
    if not 1 <= stages <= largest:
        raise ValueError(
            f"stages must be 1 to {largest}: that many chunks of {chunk} values fit in {SHARED_BYTES} bytes of shared "
            f"memory, got {stages}"
        )
