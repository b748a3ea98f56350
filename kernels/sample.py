"""Greedy sampling: the index of the largest logit of every sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparda.kernels.launch import dependent

CHUNK = 4096
"""Logits that one program reads."""


@triton.jit
def _chunk_kernel(
    logits: tl.tensor, best: tl.tensor, vocab: tl.tensor, chunks: tl.tensor, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * vocab + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(value, 0)
    # The lowest index among equals; a chunk of NaNs alone names its first.
    index = tl.minimum(tl.min(tl.where(value == top, i, 2147483647), 0), vocab - 1)
    place = best + (row * chunks + chunk) * 2
    tl.store(place, top)
    tl.store(place + 1, index.to(tl.float32, bitcast=True))


@triton.jit
def _pick_kernel(best: tl.tensor, tokens: tl.tensor, chunks: tl.tensor, WIDTH: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    place = best + (row * chunks + c) * 2
    value = tl.load(place, mask=c < chunks, other=float("-inf"))
    index = tl.load(place + 1, mask=c < chunks, other=0.0).to(tl.int32, bitcast=True)
    found = tl.min(tl.where((value == tl.max(value, 0)) & (c < chunks), index, 2147483647), 0)
    tl.store(tokens + row, tl.where(found == 2147483647, 0, found).to(tl.int64))


def greedy_chunks(vocab: int) -> int:
    """Chunks that ``greedy`` reads a row of ``vocab`` logits in: the middle size of its scratch."""
    return int(triton.cdiv(vocab, CHUNK))


def greedy(logits: torch.Tensor, tokens: torch.Tensor, best: torch.Tensor) -> None:
    """Put the index of each row's largest logit into tokens; the lowest where several are equal.

    logits: [B, vocab] bf16 or fp32, contiguous. tokens: int64 [B], written. best: fp32 scratch
    [B, greedy_chunks(vocab), 2], contiguous. A row that holds NaNs gets some valid index.

    Raises ValueError for shapes or types that do not fit together.
    """
    if logits.dim() != 2 or logits.dtype not in (torch.bfloat16, torch.float32) or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous bf16 or fp32 [B, vocab], got {logits.dtype} {tuple(logits.shape)}")
    batch, vocab = logits.shape
    chunks = greedy_chunks(vocab)
    if tokens.shape != (batch,) or tokens.dtype != torch.int64:
        raise ValueError(f"tokens must be int64 [{batch}], got {tokens.dtype} {tuple(tokens.shape)}")
    if tuple(best.shape) != (batch, chunks, 2) or best.dtype != torch.float32 or not best.is_contiguous():
        raise ValueError(f"best must be contiguous fp32 {(batch, chunks, 2)}, got {best.dtype} {tuple(best.shape)}")
    _chunk_kernel[(chunks, batch)](logits, best, vocab, chunks, CHUNK=CHUNK, num_warps=4, **dependent(logits))
    width = triton.next_power_of_2(chunks)
    _pick_kernel[(batch,)](best, tokens, chunks, WIDTH=width, num_warps=1, **dependent(logits))


def greedy_reference(logits: torch.Tensor) -> torch.Tensor:
    """What ``greedy`` finds, by plain PyTorch: int64 [B]."""
    return logits.float().argmax(-1)
