"""Parity on the GPU: a published model's tokens, in fp32, against those that another program decoded from it."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sparda.calibrate.measure.bench import Bench, Clock
from sparda.calibrate.measure.provenance import clocks, provenance
from sparda.calibrate.measure.run import finish
from sparda.calibrate.measure.timing import warm_clocks
from sparda.calibrate.parity import Agreement, Reference, compare, read_reference
from sparda.calibrate.store import Store, Value
from sparda.engine.batch import Batch, Generation
from sparda.engine.config import Config
from sparda.engine.errors import SpardaError
from sparda.engine.gguf_file import load_gguf
from sparda.engine.weights import Weights, with_proxy_forecast

OP = "smollm2"
ROWS = 3
"""Fewer than there are prompts: sequences of different lengths share a batch, end, and are replaced."""

EVERY_BLOCK = 4096
"""A top_k that no context here reaches: a batch lowers it to all blocks, where sparse attention is full attention."""

METHOD = "wall clock around each step of the batch, its tokens read back"
SECONDS = 300.0


@dataclass(slots=True)
class Decoded:
    """A prompt's new tokens and the microseconds of each step it was part of: none for the first token."""

    generation: Generation
    step_us: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.generation.tokens


def decode(batch: Batch, prompts: Sequence[Sequence[int]], max_new: int) -> list[Decoded]:
    """As ``Batch.generate``, with the time of every step: each prompt is decoded as soon as a row is free."""
    waiting, found = deque(prompts), []
    owner: dict[int, Decoded] = {}
    while waiting or batch.live:
        while waiting and batch.free:
            row = batch.admit(waiting.popleft(), max_new)
            generation = batch.generations[row]
            assert generation is not None
            owner[row] = Decoded(generation)
            found.append(owner[row])
        rows, start = list(batch.live), time.perf_counter_ns()
        batch.step()
        took_us = (time.perf_counter_ns() - start) / 1e3
        for row in rows:
            owner[row].step_us.append(took_us)
    return found


def decode_reference(weights: Weights, config: Config, known: Reference, *, rows: int = ROWS) -> list[Decoded]:
    """Every prompt of the reference, for as many new tokens as it has there."""
    batch = Batch(weights, config, rows=rows, capacity=known.capacity)
    return decode(batch, [p.tokens for p in known.prompts], max(len(p.continuation) for p in known.prompts))


def measure_parity(gguf: Path, reference: Path, out: Path, policies: Sequence[str] = ("dense",)) -> dict[str, object]:
    """Decode the reference's prompts in fp32 and keep a row of kind ``parity`` for each in the store at ``out``.

    ``policies`` other than dense choose every block; those with a Forecast start from the proxy. A row's values are
    how many tokens were compared, how many differ, and the first that does (-1: none).
    Returns what ``finish`` does, with the sums over all rows. Raises SpardaError where there is no CUDA GPU, for a
    damaged reference and for a file that it was not made from.
    """
    known = read_reference(reference)
    known.check_file(gguf)
    if not torch.cuda.is_available():
        raise SpardaError("no CUDA GPU is visible to torch; parity is measured on one.")
    weights = load_gguf(gguf, device="cuda", value_bytes=4)
    store, session = Store(out), uuid.uuid4().hex[:8]
    warm_clocks()
    about = {"model": weights.shape.name, "model_sha256": known.sha256, "reference": dict(known.versions)}
    store.add_session(session, {**provenance(seed=0), "clocks_at_start": clocks(), **about})
    bench = Bench(store, session, weights.shape, Clock(SECONDS))
    agreed: list[Agreement] = []

    def work(bench: Bench) -> None:
        for policy in policies:
            agreed.extend(_measure_policy(bench, weights, known, policy))

    done = finish(bench, work)
    return {**done, "compared": sum(a.compared for a in agreed), "mismatches": sum(a.mismatches for a in agreed)}


def _measure_policy(bench: Bench, weights: Weights, known: Reference, policy: str) -> list[Agreement]:
    config = Config(policy, top_k=EVERY_BLOCK)
    if policy.startswith("sparda"):
        weights = with_proxy_forecast(weights, config.lookahead)
    agreed = []
    for number, (prompt, found) in enumerate(zip(known.prompts, decode_reference(weights, config, known), strict=True)):
        agreement = compare(found.tokens, prompt.continuation)
        case: dict[str, Value] = {"prompt": number, "prompt_tokens": len(prompt.tokens), "policy": policy}
        values = {
            "compared": float(agreement.compared),
            "mismatches": float(agreement.mismatches),
            "first_mismatch": float(agreement.first),
            "least_margin": min(prompt.margins),
        }
        bench.keep(bench.row("parity", OP, case, tuple(found.step_us), METHOD, values))
        bench.say(f"{policy}, {len(prompt.tokens)} tokens: {agreement.mismatches} of {agreement.compared} differ")
        agreed.append(agreement)
    return agreed
