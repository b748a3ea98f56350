"""Selection traces from choices: a decoder with any weights then chooses, step by step, what was recorded or drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparda.engine.config import Config, Workload
from sparda.engine.dynamics.choices import Choices
from sparda.engine.dynamics.generator import generate
from sparda.engine.dynamics.generator_params import GeneratorParams
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.trace import SelectionTrace


@dataclass(frozen=True, slots=True)
class ReplayTrace(SelectionTrace):
    """``scores`` [layers * steps, B, H, M]: 1 for what is chosen; each layer's ``steps`` lie together.

    ``starts`` [layers]: where those that a layer of the model follows begin. After ``steps`` steps it would run on into
    those of another layer: do not decode further.
    """

    starts: tuple[int, ...] = ()
    steps: int = 0

    def phase(self, layer: int) -> int:
        return self.starts[layer]


def follows(choices: Choices, spec: SparseSpec, workload: Workload, config: Config) -> str:
    """What keeps a decoder from following the choices as they are, or nothing."""
    f = choices.facts
    wanted = {
        "block": spec.block,
        "init_blocks": spec.init_blocks,
        "local_blocks": spec.local_blocks,
        "top_k": config.top_k,
        "positions_per_step": 1,
    }
    for name, value in wanted.items():
        if getattr(f, name) != value:
            return f"its {name} is {getattr(f, name)} and {value} is decoded with"
    if set(f.context_tokens) != {workload.context_tokens}:
        given = ", ".join(str(c) for c in sorted(set(f.context_tokens)))
        return f"it begins at a context of {given} tokens and {workload.context_tokens} are decoded from"
    live = choices.blocks[: int(choices.lengths().min())]
    existing = choices.per_stream(choices.existing())[: len(live)]
    if not len(live) or bool(((live >= 0).sum(-1) != np.minimum(existing, f.top_k)).any()):
        return "a step of it chooses fewer blocks than top_k"
    if bool((choices.forced()[: len(live)].sum(-1) != np.minimum(existing, f.forced)).any()):
        return "a step of it leaves out a block that is always chosen"
    return ""


def replay_trace(
    shape: ModelShape,
    spec: SparseSpec,
    workload: Workload,
    config: Config,
    *,
    blocks: int,
    device: torch.device | str,
    choices: Choices,
    seed: int = 0,
) -> SelectionTrace:
    """A trace that chooses what ``choices`` chose, as long as every sequence of it goes on.

    Layers of another number follow those at the same relative place; more sequences and heads take the recorded ones in
    turn. ``blocks`` is the capacity M of the score rows. Nothing is random: ``seed`` is not read, nor is
    ``workload.miss_rate``. What misses, the slots decide: ``dynamics.residents.miss_counts`` says how much.

    Raises SpardaError where the choices were made with other blocks, top_k or context: generate some from them.
    """
    if reason := follows(choices, spec, workload, config):
        raise SpardaError(f"the selection trace cannot be replayed: {reason}; fit it and generate one for this case.")
    f, steps = choices.facts, int(choices.lengths().min())
    if int(choices.existing()[steps - 1].max()) > blocks:
        raise SpardaError(
            f"the selection trace goes to {int(choices.existing()[steps - 1].max())} blocks and the KV tiers have room "
            f"for {blocks}; decode fewer steps of it."
        )
    own = [layer * len(f.layers) // shape.layers for layer in range(shape.layers)]
    used = sorted(set(own))
    heads = np.arange(shape.kv_heads) % f.kv_heads
    rows = (np.arange(workload.batch) % len(f.context_tokens))[:, None] * f.kv_heads + heads
    scores = torch.zeros(len(used) * steps, workload.batch, shape.kv_heads, blocks, device=device)
    for place, layer in enumerate(used):
        ids = torch.from_numpy(choices.blocks[:steps, layer][:, rows].astype(np.int64)).to(device)
        mark(scores[place * steps : (place + 1) * steps], ids)
    starts = tuple(used.index(layer) * steps for layer in own)
    return ReplayTrace(scores, None, None, starts, steps)


def mark(scores: Tensor, ids: Tensor) -> None:
    """Set the scores of ``ids`` [steps, B, H, top_k] to 1. Where fewer were chosen, all are, and -1 names block 0."""
    scores.scatter_(-1, ids.clamp(min=0), 1.0)


def generated_trace(
    shape: ModelShape,
    spec: SparseSpec,
    workload: Workload,
    config: Config,
    *,
    blocks: int,
    device: torch.device | str,
    params: GeneratorParams,
    steps: int,
    seed: int = 0,
) -> SelectionTrace:
    """A trace of ``steps`` steps drawn from ``params`` for this very case: see ``generate``."""
    return replay_trace(
        shape,
        spec,
        workload,
        config,
        blocks=blocks,
        device=device,
        choices=drawn(shape, spec, workload, config, params=params, steps=steps, seed=seed),
    )


def drawn(
    shape: ModelShape,
    spec: SparseSpec,
    workload: Workload,
    config: Config,
    *,
    params: GeneratorParams,
    steps: int,
    seed: int = 0,
) -> Choices:
    """Choices of ``steps`` steps drawn from ``params`` for a model and workload."""
    return generate(
        params,
        steps=steps,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        sequences=workload.batch,
        top_k=config.top_k,
        context_tokens=workload.context_tokens,
        block=spec.block,
        init_blocks=spec.init_blocks,
        local_blocks=spec.local_blocks,
        seed=seed,
    )
