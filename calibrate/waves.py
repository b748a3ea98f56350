"""What fewer or more multiprocessors do to kernels whose thread blocks come in turns.

A thread block of a linear streams its share of the weights: while all multiprocessors have one, HBM sets the pace; in
the last turn, when few are left, each multiprocessor reads only so fast. An attention's thread block goes through its
blocks of keys one after the other, at its own pace: the kernel takes as long as the most that one of them has to do.
"""

from __future__ import annotations

from math import ceil

from sparda.engine.occupancy import attention_splits
from sparda.engine.shapes import ModelShape
from sparda.kernels.tilings import MAX_ROWS, Tiling, splits_of, tiling_for
from sparda.sim.costs import Machine

SHARED_KIB = 228
"""Shared memory of a multiprocessor where the machine does not say: compute capability 9.0."""

LINEARS = ("qkv", "oproj", "gateup", "down", "lm_head")


def linear_ns(kind: str, batch: int, shape: ModelShape, machine: Machine) -> float:
    """Nanoseconds that the turns of a linear's thread blocks take: full ones at HBM's rate, then one of stragglers."""
    tiling, rows, columns, weights = _tiling(kind, batch, shape, machine.sms)
    tiles = ceil(rows / tiling.rows) * tiling.splits
    tile_bytes = weights * tiling.rows * columns * shape.value_bytes / tiling.splits
    slots = machine.sms * _resident(tiling, weights, batch, shape, machine)
    last = tiles % slots
    full_ns = (tiles - last) * tile_bytes / machine.hbm_gb_s
    if not last or not machine.sm_read_gb_s:
        return full_ns + last * tile_bytes / machine.hbm_gb_s
    return full_ns + max(
        last * tile_bytes / machine.hbm_gb_s, ceil(last / machine.sms) * tile_bytes / machine.sm_read_gb_s
    )


def _tiling(kind: str, batch: int, shape: ModelShape, sms: int) -> tuple[Tiling, int, int, int]:
    """(tiling, weight rows, products each, weight matrices) of a linear of the model."""
    s = shape
    rows, columns = {
        "qkv": (s.qkvf_width, s.d_model),
        "oproj": (s.d_model, s.q_width),
        "gateup": (s.ffn, s.d_model),
        "down": (s.d_model, s.ffn),
        "lm_head": (s.vocab, s.d_model),
    }[kind]
    gated = kind == "gateup"
    splits = 1 if kind in ("gateup", "lm_head") else splits_of(rows, columns, sms)
    return tiling_for(rows, columns, batch, sms, splits=splits, gated=gated), rows, columns, 2 if gated else 1


def _resident(tiling: Tiling, weights: int, batch: int, shape: ModelShape, machine: Machine) -> int:
    """Thread blocks that one multiprocessor has at a time: as many as its shared memory holds pipelines."""
    padded = min(MAX_ROWS, max(16, 1 << (batch - 1).bit_length()))
    stage = (weights * tiling.rows + padded) * tiling.depth * shape.value_bytes
    # Each thread block takes a KiB for the system besides.
    return max(1, (machine.shared_kib_per_sm or SHARED_KIB) * 1024 // (stage * tiling.stages + 1024))


def attention_turns(batch: int, top_k: int, shape: ModelShape, sms: int) -> int:
    """Blocks of keys that the busiest multiprocessor goes through, one after the other."""
    heads = batch * shape.kv_heads
    splits = attention_splits(heads, top_k, sms)
    return ceil(top_k / splits) * ceil(heads * splits / sms)
