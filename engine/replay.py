"""Selection traces from choices: a decoder with any weights then chooses, step by step, what was recorded or drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

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

    After ``steps`` steps a layer would run on into those of the next one: do not decode further.
    """

    steps: int = 0

    def phase(self, layer: int) -> int:
        return layer * self.steps


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


def spread_over(choices: Choices, shape: ModelShape, workload: Workload, steps: int | None = None) -> Choices:
    """The choices of every layer, sequence and KV head of a model that follows these, as long as all of them go on.

    Layers of another number follow those at the same relative place; more sequences and heads take the recorded ones in
    turn. ``steps``: no more than the first so many.
    """
    f, length = choices.facts, int(choices.lengths().min())
    layers = [layer * len(f.layers) // shape.layers for layer in range(shape.layers)]
    sequences = np.arange(workload.batch) % len(f.context_tokens)
    heads = (sequences[:, None] * f.kv_heads + np.arange(shape.kv_heads) % f.kv_heads).ravel()
    facts = replace(
        f,
        layers=tuple(range(shape.layers)),
        kv_heads=shape.kv_heads,
        context_tokens=tuple(f.context_tokens[s] for s in sequences),
    )
    kept = choices.blocks[: length if steps is None else min(steps, length)]
    return Choices(facts, np.ascontiguousarray(kept[:, layers][:, :, heads]))


def replay_trace(
    shape: ModelShape,
    spec: SparseSpec,
    workload: Workload,
    config: Config,
    *,
    blocks: int,
    device: torch.device | str,
    choices: Choices,
    steps: int | None = None,
    seed: int = 0,
) -> SelectionTrace:
    """A trace that chooses what ``choices`` chose, spread over the model: see ``spread_over``.

    ``blocks`` is the capacity M of the score rows. Nothing is random: ``seed`` is not read, nor is
    ``workload.miss_rate``. What misses, the slots decide: ``dynamics.residents.miss_counts`` says how much.

    Raises SpardaError where the choices were made with other blocks, top_k or context: generate some from them.
    """
    if reason := follows(choices, spec, workload, config):
        raise SpardaError(f"the selection trace cannot be replayed: {reason}; fit it and generate one for this case.")
    spread = spread_over(choices, shape, workload, steps)
    if spread.room - 1 > blocks:
        raise SpardaError(
            f"the selection trace goes to {spread.room - 1} blocks and the KV tiers have room for {blocks}; decode "
            "fewer steps of it."
        )
    size = (shape.layers * spread.steps, workload.batch, shape.kv_heads, blocks)
    scores = torch.zeros(size, device=device)
    for layer in range(shape.layers):
        ids = torch.from_numpy(spread.blocks[:, layer].astype(np.int64)).to(device)
        # Where fewer than top_k were chosen all are, so that it does no harm to name block 0 once more.
        named = ids.clamp(min=0).view(spread.steps, *size[1:3], -1)
        scores[layer * spread.steps : (layer + 1) * spread.steps].scatter_(-1, named, 1.0)
    return ReplayTrace(scores, None, None, spread.steps)


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
