"""Selection traces: block scores per step that stand in for a model's own, with a stated reuse.

With random weights the chosen blocks mean nothing, so their dynamics are an input. A trace holds scores, not ids:
the selection kernel reads the trace where it would read the live scores, and does all its work either way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import ModelShape, SparseSpec

LAYER_PHASE = 7
"""Steps by which each layer's place in the trace is ahead of the layer before it."""

GROWTH_BLOCKS = 10
"""Blocks before the local window that no trace names, so that they stay outside it while decoding goes on."""

MAX_PERIOD = 4096


@dataclass(frozen=True, slots=True)
class SelectionTrace:
    """``scores`` fp32 [period, B, H, M]; layer l at step s reads period index (s + phase(l)) % period.

    ``miss_rate`` is the stated share of top-k that misses, whatever the slots; None where a reuse is stated instead,
    and misses can only be counted. ``turnover`` is then the share of the free picks that each step replaces.
    """

    scores: Tensor
    miss_rate: float | None
    turnover: float | None = None

    @property
    def period(self) -> int:
        return int(self.scores.shape[0])

    def phase(self, layer: int) -> int:
        return layer * LAYER_PHASE % self.period


def rotating_trace(
    shape: ModelShape,
    spec: SparseSpec,
    workload: Workload,
    config: Config,
    *,
    blocks: int,
    device: torch.device | str,
    seed: int = 0,
) -> SelectionTrace:
    """A trace that misses ``workload.miss_rate`` of top-k per step and head, whatever the eviction order.

    Each head's free picks are a window that slides over a random circle of blocks: in every step as many blocks
    enter as leave, and none returns before more blocks have passed than there are slots. ``blocks`` is the
    capacity M of the score rows.

    Raises SpardaError when the context has too few blocks for that, or the rate exceeds the free picks.
    """
    free = config.top_k - spec.forced
    rate = workload.miss_rate * config.top_k
    candidates = spec.blocks(workload.context_tokens) - spec.forced - GROWTH_BLOCKS
    if rate > free:
        raise SpardaError(
            f"workload.miss_rate {workload.miss_rate} of top_k {config.top_k} is {rate:.1f} blocks, but only {free} "
            f"of them are not forced; give a miss rate of at most {free / config.top_k:.3f}."
        )
    circle = max(config.slots + 1 - spec.forced, free) + 2 * math.ceil(rate) + 2 if rate else max(free, 1)
    period = max(64, math.ceil(circle / rate)) if rate else 1
    total = round(period * rate)
    if rate and total > candidates:
        period = int(candidates / rate)
        total = round(period * rate)
    if candidates < free or (rate and (total < circle or period > MAX_PERIOD)):
        raise SpardaError(
            f"a context of {workload.context_tokens} tokens is too short for a selection trace with miss rate "
            f"{workload.miss_rate} at top_k {config.top_k} and {config.slots} resident blocks; lengthen the context, "
            "lower top_k or resident_blocks, or raise the miss rate."
        )
    heads = workload.batch * shape.kv_heads
    generator = torch.Generator(device=device).manual_seed(seed)
    order = torch.rand(heads, candidates, device=device, generator=generator).argsort(1)
    ring = spec.init_blocks + order[:, : max(total, free)]
    offset = torch.rand(heads, 1, device=device, generator=generator, dtype=torch.float64)
    scores = torch.zeros(period, heads, blocks, device=device)
    window = torch.arange(free, device=device)
    for step in range(period):
        # A whole number of blocks enters each step; the offset spreads the fractions over the heads.
        start = (step * (total / period) + offset).floor().long() if rate else torch.zeros_like(offset).long()
        scores[step].scatter_(1, ring.gather(1, (start + window) % ring.shape[1]), 1.0)
    shaped = scores.view(period, workload.batch, shape.kv_heads, blocks)
    return SelectionTrace(shaped, total / period / config.top_k)
