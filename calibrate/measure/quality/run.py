"""Measuring what choices of blocks cost a model: resumable, within a budget, part by part."""

from __future__ import annotations

import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from sparda.calibrate.measure.quality.assemble import assemble
from sparda.calibrate.measure.quality.materials import Materials
from sparda.calibrate.measure.quality.retrieved import Case
from sparda.calibrate.measure.quality.scope import PARTS, Scope
from sparda.calibrate.measure.quality.selectors import chooser
from sparda.calibrate.measure.quality.session import Job, Session, Text, prepared
from sparda.calibrate.measure.quality.store import Store
from sparda.calibrate.measure.quality.window import Prefix, run_window
from sparda.calibrate.quality import Choice, QualityProfile
from sparda.engine.errors import SpardaError
from sparda.engine.forecast_file import Forecast
from sparda.engine.shapes import SparseSpec
from sparda.engine.weights import DTYPES, ScorerWeights, Weights

SPEC = SparseSpec(init_blocks=1, local_blocks=1)
"""The geometry that is measured by default: few forced blocks, so that what is chosen is the selector's."""


def on_stderr(sentence: str) -> None:
    """Say something beside whatever a command prints."""
    print(sentence, file=sys.stderr, flush=True)


def measure_quality(
    weights: Weights,
    documents: Sequence[Text],
    forecasts: Mapping[tuple[int, int], Forecast],
    scorer: ScorerWeights | None,
    cases: Sequence[Case],
    out: Path,
    parts: Collection[str] = PARTS,
    budget_seconds: float | None = None,
    *,
    spec: SparseSpec = SPEC,
    scope: Scope | None = None,
    name: str = "",
    provenance: Mapping[str, str | int | float] | None = None,
    say: Callable[[str], None] = on_stderr,
) -> QualityProfile:
    """Measure the parts that are not yet in ``out`` and return the profile of all that is there.

    ``forecasts``: by (lookahead, heads per KV head). What needs a Forecast, a scorer or a second document that is not
    given is left out; selection traces of ``sparse`` are written to ``out`` with the dynamics. A measurement that ends
    early, by its budget or otherwise, goes on where it stopped when it is started again with the same arguments. Raises
    SpardaError for unknown parts, windows and top-ks that cannot be, documents that are too short, and a folder with
    the parts of another measurement.
    """
    scope = scope or Scope()
    scope.check(weights.shape, spec)
    for (ahead, heads), forecast in forecasts.items():
        forecast.check_fits(weights.shape, ahead, heads)
    unknown = sorted(set(parts) - set(PARTS))
    if unknown or not documents:
        what = f"part {unknown[0]!r} is not known" if unknown else "no documents were given"
        raise SpardaError(f"{what}; parts are {', '.join(PARTS)}, each of one document or more.")
    materials = Materials(
        weights,
        forecasts,
        _beside(weights, scorer),
        seed=scope.seed,
        sharing_layer=scope.sharing_layer,
        refresh=scope.refresh_steps,
    )
    store = Store(out, _about(weights, spec, scope, forecasts, scorer))
    texts = [prepared(document, scope.context_tokens) for document in documents]
    if len({text.name for text in texts}) < len(texts):
        raise SpardaError("two documents have the same name; name each differently.")
    session = Session(weights, spec, scope, store, materials, texts, cases, parts)
    jobs = list(session.jobs())
    if jobs:
        say(f"{_listed(jobs)} to measure: {_estimated(session, jobs)}")
    left = _work(jobs, budget_seconds)
    if left:
        say(f"the budget of {budget_seconds:g} s is spent; left are {_listed(left)}: start again to go on.")
    about = {"torch": torch.__version__, "device": _device_name(weights), **(provenance or {})}
    return assemble(session, out, name or weights.shape.name, about)


def _work(jobs: Sequence[Job], budget_seconds: float | None) -> Sequence[Job]:
    """Do the jobs while one more like the last of its kind fits into the budget; returns those that are left."""
    began, took = time.monotonic(), dict[str, float]()
    shown = sys.stderr.isatty()
    for number, job in enumerate(jobs):
        before = time.monotonic()
        if budget_seconds is not None and before - began + took.get(job.kind, 0.0) > budget_seconds:
            return jobs[number:]
        if shown:
            print(f"\r\x1b[K{number + 1}/{len(jobs)} {job.kind}: {job.of}", end="", file=sys.stderr, flush=True)
        job.run()
        took[job.kind] = time.monotonic() - before
    if shown and jobs:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return ()


def _listed(jobs: Sequence[Job]) -> str:
    return ", ".join(f"{count} of {kind}" for kind, count in Counter(job.kind for job in jobs).items())


def _estimated(session: Session, jobs: Sequence[Job]) -> str:
    """How long jobs will take, from the time of one layer: right to a factor of about two."""
    scope = session.scope
    run = _layer_seconds(session, scope.loss_tokens) * session.weights.shape.layers
    more, orders = scope.recall_tokens / scope.loss_tokens, len(session.recall_choices) / max(1, len(scope.top_ks))
    read = scope.context_tokens / scope.loss_tokens / 2
    runs = {
        "loss": 1.0 + read,
        "dynamics": more + read,
        # Its choices share the attention; each has scores to compute and to order.
        "recall": more * (2 + orders / 2),
        "perplexity": 1.0,
        "retrieval": read + len(session.retrieval_choices) * scope.question_tokens / scope.loss_tokens,
    }
    return f"about {sum(runs[job.kind] for job in jobs) * run:.0f} s."


def _layer_seconds(session: Session, tokens: int) -> float:
    """Seconds of one layer of a window, the second time it runs."""
    w, scope = session.weights, session.scope
    s = w.shape
    one = Weights(replace(s, layers=1), w.embed, w.layers[:1], w.final_norm, w.head)
    room = (1, s.kv_heads, scope.context_tokens - tokens, s.head_dim)
    keys = torch.zeros(room, dtype=DTYPES[s.value_bytes], device=w.embed.device)
    choose = chooser(Choice("sparse", scope.loss_top_ks[0]), session.materials)
    ids = torch.zeros(tokens, dtype=torch.int64)
    for _ in range(2):
        began = time.perf_counter()
        run_window(one, session.spec, Prefix(keys, keys, keys), ids, choose, loss=False)
        if keys.is_cuda:
            torch.cuda.synchronize(keys.device)
        seconds = time.perf_counter() - began
    return seconds


def _beside(weights: Weights, scorer: ScorerWeights | None) -> ScorerWeights | None:
    """The scorer on the model's device."""
    if scorer is None:
        return None
    device = weights.embed.device
    return ScorerWeights(scorer.hidden.to(device), scorer.hidden_bias.to(device), scorer.output.to(device))


def _about(
    weights: Weights,
    spec: SparseSpec,
    scope: Scope,
    forecasts: Mapping[tuple[int, int], Forecast],
    scorer: ScorerWeights | None,
) -> dict[str, str]:
    """What parts depend on: a folder holds those of one measurement."""
    last = weights.layers[-1]
    about = {
        "model": f"{weights.shape.name} {_digest(weights.embed[:8], last.fused[:8], last.down[:8])}",
        "geometry": f"{spec.block}/{spec.kernel}/{spec.stride}/{spec.init_blocks}/{spec.local_blocks}",
        "windows": f"{scope.context_tokens}/{scope.recall_tokens}/{scope.loss_tokens}/{scope.question_tokens}",
        "settings": f"{scope.seed}/{scope.sharing_layer}/{scope.refresh_steps}",
    }
    for (ahead, heads), forecast in forecasts.items():
        rows = [forecast.rows[query][layer][:8] for query in forecast.rows for layer in sorted(forecast.rows[query])]
        about[f"forecast d={ahead} x{heads}"] = _digest(*rows)
    if scorer is not None:
        about["scorer"] = _digest(scorer.hidden[:8], scorer.output)
    return about


def _digest(*tensors: torch.Tensor) -> str:
    """A short hash of some values, the same on every device."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()[:12]


def _device_name(weights: Weights) -> str:
    device = weights.embed.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
