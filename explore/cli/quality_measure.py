"""``sparda quality measure``: what choosing blocks costs a model on texts, as a quality profile."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sparda.calibrate.quality import FILE, SELECTORS
from sparda.engine.errors import SpardaError
from sparda.explore.cli.common import Output, add_json, positive, require_engine
from sparda.explore.cli.quality_inputs import (
    add_inputs,
    check_tokens,
    check_top_k,
    context_of,
    documents_of,
    weights_of,
    within_memory,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparda.calibrate.measure.quality.retrieval import Case
    from sparda.calibrate.measure.quality.scope import Scope
    from sparda.engine.shapes import ModelShape
    from sparda.engine.weights import Weights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this action."""
    add_inputs(parser, "float32")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the profile; a measurement resumes")
    parser.add_argument("--name", default="", metavar="NAME", help="of the profile (default: MODEL.measured)")
    parser.add_argument("--forecast", type=Path, metavar="PATH", help="what `quality train` wrote, or one Forecast")
    parser.add_argument("--retrieval", type=Path, metavar="FILE", help="retrieval tasks, made for this tokenizer")
    parser.add_argument("--parts", type=_words, default=(), metavar="LIST", help="recall,perplexity,retrieval,dynamics")
    parser.add_argument("--selectors", type=_words, default=(), metavar="LIST", help=f"of {', '.join(SELECTORS)}")
    parser.add_argument(
        "--top-k", type=_counts, default=(), metavar="LIST", help="blocks chosen (default: 4 to 64, up to half of all)"
    )
    parser.add_argument("--budget", type=positive, metavar="SECONDS", help="stop then; the same command goes on")
    add_json(parser)


def run(args: argparse.Namespace) -> Output:
    """Measure, and show the profile. Raises SpardaError for a model or texts that do not do."""
    require_engine("quality measure", "here, or on a machine with a GPU for a model that is not small")
    from sparda.calibrate.measure.quality.run import measure_quality
    from sparda.calibrate.measure.quality.scope import PARTS
    from sparda.calibrate.quality import write_quality
    from sparda.engine.shapes import SparseSpec
    from sparda.engine.training.found import trained_forecasts, trained_scorer
    from sparda.explore.quality_text import plain_quality, text_of_quality

    _check_given(args)
    documents, cases = documents_of(args, "eval"), _cases(args)
    weights, spec = weights_of(args), SparseSpec(local_blocks=args.local_blocks)
    check_tokens(documents, weights.shape, args.tokens)
    _check_cases(args, cases, weights.shape)
    scorer = trained_scorer(args.forecast, weights.shape) if args.forecast else None
    scope = _scope(args, weights, spec, scorer[0] if scorer else None)
    parts = args.parts or tuple(p for p in PARTS if p != "retrieval" or cases)
    forecasts = trained_forecasts(args.forecast, weights.shape) if args.forecast else {}
    with within_memory("give a shorter --context; what was measured is there"):
        profile = measure_quality(
            weights, documents, forecasts, scorer[1] if scorer else None, cases, args.out, parts, args.budget,
            spec=spec, scope=scope, name=args.name or f"{weights.shape.name}.measured", provenance=_provenance(args),
        )  # fmt: skip
    write_quality(args.out / FILE, profile)
    return Output({"out": str(args.out), **plain_quality(profile)}, text_of_quality(profile))


def _scope(args: argparse.Namespace, weights: Weights, spec: object, layer: int | None) -> Scope:
    """Windows in proportion to the context, and the top-ks that it has blocks for."""
    from dataclasses import replace

    from sparda.calibrate.measure.quality.scope import Scope
    from sparda.engine.shapes import SparseSpec

    assert isinstance(spec, SparseSpec)
    context, scope = context_of(args, weights), Scope(seed=args.seed)
    blocks = spec.blocks(context)

    check_top_k(args.top_k, spec, context, blocks // 2)
    least, most = spec.forced + 1, blocks // 2

    def possible(top_ks: Sequence[int]) -> tuple[int, ...]:
        # A short context has room for none of them: then the largest that it has room for.
        return args.top_k or tuple(k for k in top_ks if least <= k <= most) or (most,)

    trace = possible((scope.trace_top_k, *scope.top_ks))
    return replace(
        scope,
        context_tokens=context,
        recall_tokens=min(scope.recall_tokens, context // 4),
        loss_tokens=min(scope.loss_tokens, context // 8),
        question_tokens=min(scope.question_tokens, context // 8),
        top_ks=possible(scope.top_ks),
        loss_top_ks=possible(scope.loss_top_ks),
        retrieval_top_ks=possible(scope.retrieval_top_ks),
        dynamics_top_ks=possible(scope.dynamics_top_ks),
        trace_top_k=trace[0],
        selectors=args.selectors or scope.selectors,
        sharing_layer=min(scope.sharing_layer, weights.shape.layers - 2) if layer is None else layer,
    )


def _provenance(args: argparse.Namespace) -> dict[str, str]:
    """When, by which source, of which weights and how they were trained to choose."""
    from datetime import UTC, datetime

    from sparda.calibrate.measure.provenance import commit

    found = {"utc": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit(), "checkpoint": args.checkpoint.name}
    return {**found, "values": args.dtype, **({"forecast": str(args.forecast)} if args.forecast else {})}


def _check_given(args: argparse.Namespace) -> None:
    """Refuse to be asked for what nothing was given for: it would be left out. Raises SpardaError."""
    if "retrieval" in args.parts and not args.retrieval:
        raise SpardaError("--parts retrieval needs retrieval tasks; give --retrieval FILE.")
    for name in ("forecast", "shallow"):
        if name in args.selectors and not args.forecast:
            raise SpardaError(f"--selectors {name} needs what `sparda quality train` wrote; give --forecast PATH.")


def _cases(args: argparse.Namespace) -> Sequence[Case]:
    if not args.retrieval:
        return ()
    from sparda.calibrate.measure.quality.retrieval import read

    return read(args.retrieval)[0]


def _check_cases(args: argparse.Namespace, cases: Sequence[Case], shape: ModelShape) -> None:
    """Refuse tasks that the model cannot read, before any time went into the rest. Raises SpardaError."""
    check_tokens(cases, shape, args.retrieval)
    longest = max((case.context for case in cases), default=0)
    if longest > shape.max_context:
        raise SpardaError(
            f"{args.retrieval} has tasks of {longest} tokens, and {shape.name} takes {shape.max_context}; make shorter "
            "ones."
        )


def _words(text: str) -> tuple[str, ...]:
    words = tuple(part.strip() for part in text.split(",") if part.strip())
    if not words:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return words


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 8,16,32") from None
