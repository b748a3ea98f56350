"""``sparda quality train``: Forecasts, and the shallow scorer, on a frozen model."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sparda.engine.errors import SpardaError
from sparda.explore.cli.common import Output, add_json, require_engine, write_folder_of
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
    from torch import Tensor

    from sparda.calibrate.measure.quality.documents import Document
    from sparda.engine.shapes import ModelShape
    from sparda.engine.training.trainer import StepLog, Trainer

HELD_OUT = 10
"""Of texts without roles every tenth sequence is judged on, not trained on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this action; the optimizer's defaults are those of the paper."""
    from sparda.engine.training.config import BEGINNINGS, SCHEDULES, Training

    t = Training()
    add_inputs(parser, "bfloat16")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="checkpoints; a training resumes")
    parser.add_argument("--lookahead", type=_numbers, default=(1,), metavar="LIST", help="0 to 4, as 1,2 (default: 1)")
    parser.add_argument(
        "--heads", type=_numbers, default=(1,), metavar="LIST", help="Forecast heads per KV head, of 1,2,4 (default: 1)"
    )
    parser.add_argument(
        "--begin", choices=BEGINNINGS, default=BEGINNINGS[0], help=f"rows at first (default: {BEGINNINGS[0]})"
    )
    parser.add_argument("--scorer-layer", type=int, metavar="N", help="train the scorer of `shallow` in that layer too")
    parser.add_argument("--top-k", type=int, default=t.top_k, metavar="N", help=f"blocks chosen (default: {t.top_k})")
    parser.add_argument(
        "--steps", type=int, default=t.steps, metavar="N", help=f"of the optimizer (default: {t.steps})"
    )
    parser.add_argument(
        "--batch", type=int, default=t.batch, metavar="N", help=f"sequences a step (default: {t.batch})"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=t.learning_rate, metavar="X", help="at most (default: 5e-4)"
    )
    parser.add_argument(
        "--warmup", type=int, default=t.warmup, metavar="N", help="steps until the rate is reached (default: 0)"
    )
    parser.add_argument(
        "--schedule", choices=SCHEDULES, default=t.schedule, help=f"of the rate (default: {t.schedule})"
    )
    parser.add_argument(
        "--save-every", type=int, default=t.save_every, metavar="N", help="steps between checkpoints (default: 50)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> Output:
    """Train, and judge on what was not trained on. Raises SpardaError for a model or texts that do not do."""
    require_engine("quality train", "here, or on a machine with a GPU for a model that is not small")
    from sparda.engine.training.config import Student, Training

    students = [Student(d, n, args.begin) for d in args.lookahead for n in args.heads]
    training = Training(
        steps=args.steps, batch=args.batch, learning_rate=args.learning_rate, warmup=args.warmup,
        schedule=args.schedule, top_k=args.top_k, seed=args.seed, save_every=args.save_every,
    )  # fmt: skip
    train, held = _documents(args)
    from sparda.engine.shapes import SparseSpec
    from sparda.engine.training.judge import judge
    from sparda.engine.training.scorer import ScorerRows
    from sparda.engine.training.trainer import LOG, Trainer

    weights, spec = weights_of(args), SparseSpec(local_blocks=args.local_blocks)
    context = context_of(args, weights)
    check_tokens((*train, *held), weights.shape, args.tokens)
    check_top_k((args.top_k,), spec, context, spec.blocks(context))
    sequences, judged = _sequences(train, held, context)
    _check_layers(args, weights.shape)
    write_folder_of(args.out / LOG)
    layer = args.scorer_layer
    scorer = None if layer is None else ScorerRows.begun(weights, spec, layer, args.top_k, args.seed)
    trainer = Trainer(weights, spec, training, students, sequences, args.out, scorer)
    print(_beforehand(trainer, context), file=sys.stderr)
    with within_memory("give a shorter --context or fewer students; what was saved is there"):
        trainer.run(_Progress(trainer).step)
        found = judge(weights, spec, args.top_k, trainer.rows, judged) if judged else {}
    data = {
        "out": str(args.out),
        "model": weights.shape.name,
        "steps": trainer.step,
        "sequences": len(sequences),
        "context_tokens": context,
        "training": asdict(training),
        "losses": trainer.log[-1].losses if trainer.log else {},
        "seconds_per_step": _seconds(trainer.log),
        "judged": {name: asdict(j) for name, j in found.items()},
        "judged_on": len(judged),
    }
    lines = [f"{n}: loss {j.loss:.4f} nats, {100 * j.recall:.1f} % of its teacher's blocks" for n, j in found.items()]
    on = f"On {len(judged)} sequences that were not trained on:" if judged else "No sequence was left to judge on."
    text = "\n".join([f"{trainer.step} steps, checkpoints in {args.out}.", on, *lines])
    return Output(data, text)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1,2") from None


def _check_layers(args: argparse.Namespace, shape: ModelShape) -> None:
    """Refuse to look past the last layer, and to score in it. Raises SpardaError."""
    last = shape.layers - 1
    ahead, layer = max(args.lookahead), args.scorer_layer
    if ahead > last:
        raise SpardaError(f"--lookahead {ahead}; the layers of {shape.name} are {shape.layers}, give at most {last}.")
    if layer is not None and not 0 <= layer < last:
        allowed = f"0 to {last - 1} can" if last else "none can"
        raise SpardaError(f"--scorer-layer {layer}; of the {shape.layers} layers of {shape.name} {allowed} score.")


def _documents(args: argparse.Namespace) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Those to train on, and those to judge on where a token file has them."""
    if args.tokens:
        from sparda.calibrate.measure.quality.documents import read

        return documents_of(args, "train"), read(args.tokens).of_role("eval")
    return documents_of(args, "train"), ()


def _sequences(
    train: tuple[Document, ...], held: tuple[Document, ...], context: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Windows of ``context`` tokens to train on, and to judge on: the first of every held-out document."""
    import numpy as np
    import torch

    from sparda.calibrate.measure.quality.documents import windows

    whole = [torch.from_numpy(w.astype(np.int64)) for d in train for w in windows(d, context)]
    judged = [torch.from_numpy(next(windows(d, context)).astype(np.int64)) for d in held if len(d) >= context]
    if not held:
        judged = whole[HELD_OUT - 1 :: HELD_OUT]
        whole = [w for i, w in enumerate(whole) if i % HELD_OUT != HELD_OUT - 1]
    if not whole:
        longest = max((len(d) for d in train), default=0)
        raise SpardaError(
            f"no text has {context} tokens, the longest {longest}; give longer texts or a lower --context."
        )
    return whole, judged


def _beforehand(trainer: Trainer, context: int) -> str:
    names = ", ".join(part.name for part in trainer.parts)
    begun = f", {trainer.step} of them done already" if trainer.step else ""
    return (
        f"training {names} on {trainer.weights.shape.name}: {trainer.training.steps} steps{begun}, each of "
        f"{trainer.training.batch} sequences of {context} tokens; the first steps say how long it takes"
    )


def _seconds(log: list[StepLog]) -> float | None:
    later = sorted(step.seconds for step in log[1:])
    return later[len(later) // 2] if later else None


class _Progress:
    """A line on a terminal, and how long it will take once two steps have shown it, terminal or not.

    Raises SpardaError where a loss is no number any more: no further step would mend it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.first = trainer, trainer.step

    def step(self, done: StepLog) -> None:
        left = self.trainer.training.steps - done.step
        lost = [name for name, loss in done.losses.items() if not math.isfinite(loss)]
        if lost:
            raise SpardaError(
                f"step {done.step}: the loss of {lost[0]} is no number any more; give a lower --learning-rate, "
                "--dtype float32 or a whole --checkpoint, and a new --out."
            )
        if done.step == self.first + 2 and left:
            print(f"{done.seconds:.2f} s a step, about {left * done.seconds:.0f} s more", file=sys.stderr)
        if sys.stderr.isatty():
            losses = ", ".join(f"{name} {loss:.4f}" for name, loss in done.losses.items())
            end = "" if left else "\n"
            print(f"\r\x1b[Kstep {done.step}: {losses}"[:200], end=end, file=sys.stderr, flush=True)
