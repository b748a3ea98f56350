"""What training a Forecast takes: seconds of an optimizer step and peak memory, at the length it is trained at."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparda.calibrate.measure.bench import Bench
from sparda.calibrate.measure.parts import Case
from sparda.calibrate.store import Value
from sparda.engine.shapes import ModelShape
from sparda.engine.training.config import Student, Training
from sparda.engine.training.targets import Teacher
from sparda.engine.training.trainer import Trainer
from sparda.engine.training.walk import walk

LENGTHS = (8192, 32768, 65536)
"""Tokens of a sequence; the last is what MiniCPM4.1's Forecast was trained at."""

STEPS = 3
METHOD = "wall clock around optimizer steps of one sequence, ended by a synchronise; random weights and tokens"


def _case(tokens: int) -> Case:
    student, training = Student(), Training()
    stated: dict[str, Value] = {"tokens": tokens, "lookahead": student.lookahead, "heads": student.heads}
    return Case("training", "forecast", {**stated, "top_k": training.top_k, "sequences": 1})


def cases(shape: ModelShape) -> Iterator[Case]:
    """Every row of the part ``training``."""
    return (_case(tokens) for tokens in LENGTHS if tokens <= shape.max_context)


def measure_training(bench: Bench) -> None:
    """Rows of kind ``training``: optimizer steps of one sequence on the whole model, and the parts of such a step.

    ``walk_s``: the frozen model alone; ``teacher_s``: walk and teacher; the rest is the student's. ``peak_gib``: the
    most that torch had reserved, weights included.
    """
    for case in cases(bench.shape):
        if not bench.due(case):
            continue
        bench.release()
        tokens = int(case.conditions["tokens"])
        generator = torch.Generator().manual_seed(bench.seed)
        text = torch.randint(0, bench.shape.vocab, (tokens,), generator=generator).to(bench.device)
        torch.cuda.reset_peak_memory_stats()
        trainer = Trainer(bench.weights, bench.spec, Training(steps=1, batch=1), (Student(),), [text])
        trainer.run()  # compiles and captures
        samples = []
        for step in range(2, 2 + STEPS):
            trainer.training = Training(steps=step, batch=1)
            samples.append(_seconds(trainer.run))
        peak = torch.cuda.max_memory_reserved() / 2**30
        del trainer
        bench.release()
        values = {
            "seconds_per_step": sorted(samples)[len(samples) // 2],
            "peak_gib": peak,
            "walk_s": _seconds(partial(_walk, bench, text, teach=False)),
            "teacher_s": _seconds(partial(_walk, bench, text, teach=True)),
        }
        bench.say(f"training, {tokens} tokens: {values['seconds_per_step']:.2f} s a step, {peak:.1f} GiB")
        bench.keep(bench.row("training", case.op, case.conditions, tuple(s * 1e6 for s in samples), METHOD, values))


def _walk(bench: Bench, text: torch.Tensor, *, teach: bool) -> None:
    for view in walk(bench.weights, text):
        if teach:
            teacher = Teacher.of(view, bench.spec, Training().top_k)
            for start in range(0, len(text), teacher.chunk):
                teacher.targets(start, min(start + teacher.chunk, len(text)))


def _seconds(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start
