"""Selection traces with a stated reuse: what comes back, and after how long. How much of it misses, the slots decide.

A head that replaces blocks mostly takes back those it chose not long ago. So more slots than top-k spare copies; a
trace that states its misses cannot show how many, since whatever enters it has been away for longer than that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.trace import GROWTH_BLOCKS, SelectionTrace

FARTHEST = 4
"""Distance, in free picks, that a context must at least have room for."""


def reuse_trace(
    shape: ModelShape,
    spec: SparseSpec,
    workload: Workload,
    config: Config,
    *,
    blocks: int,
    device: torch.device | str,
    turnover: float,
    tail: float = 3.0,
    period: int = 256,
    seed: int = 0,
) -> SelectionTrace:
    """A trace in which each head replaces ``turnover`` of its free picks in every step.

    Random picks leave. What enters is drawn by its distance in the stack of least recent use: the free picks times a
    Pareto variable of index ``tail``, so that slots for x times the free picks miss turnover * x ** -tail of them
    (x >= 1, forgetting the least recently chosen first). Whether a model's choices return so is for its own selections
    to say. ``blocks`` is the capacity M of the score rows; ``workload.miss_rate`` is not read.

    The stack begins in the order in which ``Tiers.reset_residents`` leaves blocks, so that slots of any number need no
    long run to fill. Where the period ends, a step chooses anew and misses more: do not count across it.

    Raises SpardaError where the context has too few blocks, or the nearest distances would be drawn twice.
    """
    free = config.top_k - spec.forced
    entering = turnover * free
    candidates = spec.blocks(workload.context_tokens) - spec.forced - GROWTH_BLOCKS
    _check(free, entering, candidates, workload, config, turnover, tail)
    heads = workload.batch * shape.kv_heads
    generator = torch.Generator(device=device).manual_seed(seed)
    offset = torch.rand(heads, 1, device=device, generator=generator, dtype=torch.float64)
    order = torch.arange(candidates, device=device).repeat(heads, 1)
    scores = torch.zeros(period, heads, blocks, device=device)
    for step in range(period):
        scores[step].scatter_(1, spec.init_blocks + order[:, :free], 1.0)
        # A whole number of blocks enters each step; the offset spreads the fractions over the heads.
        count = ((step + 1) * entering + offset).floor() - (step * entering + offset).floor()
        order = _after_a_step(order, free, count, math.ceil(entering), tail, generator)
    return SelectionTrace(scores.view(period, workload.batch, shape.kv_heads, blocks), None, turnover)


def _after_a_step(
    order: Tensor, free: int, count: Tensor, most: int, tail: float, generator: torch.Generator
) -> Tensor:
    """The stacks ``order`` int64 [heads, C], the ``free`` chosen first, once ``count`` [heads, 1] have been replaced.

    The draws of a step are spread evenly over the distribution, from one random start: each distance is as likely as
    drawn apart, and none comes twice.
    """
    heads, candidates = order.shape
    draw = torch.arange(most, device=order.device)
    start = torch.rand(heads, 1, device=order.device, generator=generator, dtype=torch.float64)
    left = (1 - (draw + start) / count.clamp(min=1)).clamp(min=1e-12)
    entering = (free * left ** (-1 / tail)).clamp(max=candidates - 1).long()
    leaving = torch.rand(heads, free, device=order.device, generator=generator).argsort(1)[:, :most]
    # Heads that replace fewer than the most write the rest of their draws into a column that is cut off.
    unused = draw >= count
    place = torch.arange(candidates + 1, device=order.device).repeat(heads, 1)
    place[:, free:] += 2 * candidates
    place.scatter_(1, entering.masked_fill(unused, candidates), entering)
    place.scatter_(1, leaving.masked_fill(unused, candidates), candidates + leaving)
    return order.gather(1, place[:, :candidates].argsort(1))


def _check(
    free: int, entering: float, candidates: int, workload: Workload, config: Config, turnover: float, tail: float
) -> None:
    if free < 1 or turnover <= 0 or tail <= 0:
        raise SpardaError(
            f"a reuse trace with turnover {turnover} and tail {tail} at top_k {config.top_k}, {max(0, free)} of it "
            "free: all three must be above 0."
        )
    most = math.ceil(entering)
    if most * tail > free:
        raise SpardaError(
            f"turnover {turnover} replaces {most} of {free} free blocks a step; at tail {tail} the nearest would be "
            f"drawn twice: give a turnover of at most {math.floor(free / tail) / free:.3f}, or a lower tail."
        )
    # The last place stands for all distances beyond it and must not be drawn twice either.
    room = math.ceil(free * max(FARTHEST, most ** (1 / tail))) + 1
    if candidates < room:
        raise SpardaError(
            f"a context of {workload.context_tokens} tokens has {max(0, candidates)} blocks to choose from and a reuse "
            f"trace at top_k {config.top_k} and tail {tail} needs {room}; lengthen the context or lower top_k."
        )
