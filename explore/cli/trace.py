"""Record, show, fit, draw and follow selection traces: the blocks chosen step by step. Each of them takes --json."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sparda.engine.errors import SpardaError
from sparda.explore.cli import generate as generate_command
from sparda.explore.cli.common import Output, add_json, add_overrides, require_gpu, write_folder_of

if TYPE_CHECKING:
    from sparda.engine.batch import Batch
    from sparda.engine.dynamics.choices import Choices
    from sparda.engine.dynamics.generator_params import GeneratorParams

STEPS = 1024
WARMUP, REPEATS = 80, 16
TURNED = ("config.", "workload.", "model=")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command: one of five actions, each with its own."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    record = actions.add_parser("record", help="decode prompts and keep what was chosen (needs a GPU)")
    generate_command.add_arguments(record)
    _add_out(record, "FILE.choices")
    record.add_argument("--note", default="", metavar="TEXT", help="conditions to keep with the trace")
    show = actions.add_parser("show", help="conditions, reuse and misses by slots")
    show.add_argument("file", type=Path, metavar="FILE", help="a trace")
    _add_skip(show)
    plain = "without the engine's slot to spare for the next block: as many slots as resident blocks"
    show.add_argument("--no-spare", action="store_true", help=plain)
    add_json(show)
    fit = actions.add_parser("fit", help="parameters of the generator, from one trace or several alike")
    fit.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a trace")
    _add_out(fit, "PARAMS.json")
    _add_skip(fit)
    add_json(fit)
    _add_generate(actions.add_parser("generate", help="draw a trace like a recorded one"))
    _add_run(actions.add_parser("run", help="measure decode steps that follow a trace (needs a GPU)"))


def _add_out(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar=name, help="file to write")


def _add_skip(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip", type=int, metavar="N", help="first steps to leave out (default: a quarter)")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--params", type=Path, metavar="FILE", help="parameters that `trace fit` wrote")
    source.add_argument("--trace", type=Path, metavar="FILE", help="a recorded trace, fitted first")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"steps to draw (default: {STEPS})")
    parser.add_argument("--layers", type=int, metavar="N", help="layers (default: as recorded)")
    parser.add_argument("--heads", type=int, metavar="N", help="KV heads (default: as recorded; 1 from parameters)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default: 1)")
    parser.add_argument("--top-k", type=int, metavar="N", help="blocks chosen (default: as recorded)")
    parser.add_argument(
        "--context", type=int, metavar="TOKENS", help="context at the first step (default: as recorded)"
    )
    parser.add_argument("--init-blocks", type=int, metavar="N", help="forced first blocks (default: as recorded)")
    parser.add_argument("--local-blocks", type=int, metavar="N", help="forced blocks before the last (default: same)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides the trace (default: 0)")
    _add_out(parser, "FILE.choices")
    add_json(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace, or parameters that `trace fit` wrote")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="store that the row of samples is added to")
    parser.add_argument("--warmup", type=int, default=WARMUP, metavar="N", help=f"steps before (default: {WARMUP})")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"steps timed (default: {REPEATS})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and a drawn trace (default: 0)")
    add_overrides(parser, "config.resident_blocks=192 or workload.batch=4 (repeatable)")
    add_json(parser)


def run(args: argparse.Namespace) -> Output:
    """Do what was asked. Raises SpardaError for a file that is no trace, and without a GPU where one is needed."""
    actions = {"record": _record, "show": _show, "fit": _fit, "generate": _generate, "run": _run}
    output = actions[args.action](args)
    return Output({"action": args.action, **output.data}, output.text)


def _record(args: argparse.Namespace) -> Output:
    from sparda.engine.dynamics.choices_file import write_choices

    written: list[tuple[Choices, int]] = []
    # Before anything is decoded: what cannot be written then would be lost.
    out = write_folder_of(args.out)
    if out.is_dir():
        raise SpardaError(f"--out {out} is a folder; give a file.")

    @contextmanager
    def beside(batch: Batch) -> Iterator[None]:
        from sparda.engine.recorder import recording

        with recording(batch.decoder) as recorder:
            try:
                yield
            finally:
                # What was chosen before an interruption is worth keeping too.
                if recorder.sequences:
                    choices = recorder.choices(conditions=args.note)
                    written.append((choices, write_choices(out, choices)))

    output = generate_command.generated(args, "trace record", beside)
    if not written:
        raise SpardaError("no step was recorded; decode at least one token after a prompt's first.")
    choices, size = written[0]
    data = {**output.data, "out": str(args.out), "bytes": size, "steps": choices.steps, "facts": asdict(choices.facts)}
    return Output(data, f"{_written(args.out, choices, size)}\nNext: sparda trace show {args.out}")


def _show(args: argparse.Namespace) -> Output:
    from sparda.engine.dynamics.choices_file import read_choices
    from sparda.engine.dynamics.residents import SPARE
    from sparda.explore.trace_show import shown, text_of_trace

    choices = read_choices(args.file)
    found = shown(choices, _skip(args.skip, choices), spare=0 if args.no_spare else SPARE)
    data = {"file": str(args.file), "bytes": args.file.stat().st_size, **found.to_dict()}
    return Output(data, text_of_trace(args.file.name, found))


def _fit(args: argparse.Namespace) -> Output:
    from sparda.engine.dynamics.choices_file import read_choices
    from sparda.engine.dynamics.fit import fit
    from sparda.engine.dynamics.generator_params import merged, write_params
    from sparda.explore.text import count, percent

    traces = [read_choices(file) for file in args.files]
    params = merged([fit(choices, skip=args.skip) for choices in traces])
    write_params(write_folder_of(args.out), params)
    replaced = sum(row[0] for row in params.layers) / len(params.layers)
    text = (
        f"Wrote {args.out}, fitted to {count(len(traces), 'trace')}: {percent(replaced)} of the free picks are "
        f"replaced in a step.\nNext: sparda trace generate --params {args.out} --out FILE.choices"
    )
    data = {"files": [str(file) for file in args.files], "out": str(args.out), "params": asdict(params)}
    return Output({**data, "replaced": replaced}, text)


def _generate(args: argparse.Namespace) -> Output:
    from sparda.engine.dynamics.choices_file import read_choices, write_choices
    from sparda.engine.dynamics.fit import fit
    from sparda.engine.dynamics.generator import fitted_gap, generate, max_gap
    from sparda.engine.dynamics.generator_params import read_params
    from sparda.explore.text import wrapped

    recorded = read_choices(args.trace) if args.trace else None
    params = fit(recorded) if recorded else read_params(args.params)
    choices = generate(
        params,
        steps=args.steps,
        layers=_given(args.layers, len(recorded.facts.layers) if recorded else len(params.layers)),
        kv_heads=_given(args.heads, recorded.facts.kv_heads if recorded else 1),
        sequences=args.batch,
        top_k=args.top_k,
        context_tokens=args.context,
        init_blocks=args.init_blocks,
        local_blocks=args.local_blocks,
        seed=args.seed,
    )
    size = write_choices(write_folder_of(args.out), choices)
    skip = _skip(None, choices)
    if recorded:
        gap = max_gap(recorded, choices, skip=_skip(None, recorded), skip_generated=skip)
    else:
        gap = fitted_gap(params, choices, skip=skip)
    against = "the recorded trace's" if recorded else "the fitted ones"
    data = {"out": str(args.out), "bytes": size, "steps": choices.steps, "facts": asdict(choices.facts), "gap": gap}
    said = f"Its misses lie within {100 * gap:.2f} percentage points of {against} at 1, 1.5, 2 and 4 times top_k."
    return Output(
        {**data, "gap_to": "trace" if recorded else "params"}, f"{_written(args.out, choices, size)}\n{wrapped(said)}"
    )


def _run(args: argparse.Namespace) -> Output:
    from sparda.explore.scenario import load_scenario
    from sparda.explore.text import wrapped

    for text in args.overrides:
        if not text.strip().startswith(TURNED):
            raise SpardaError(f"--set {text}: trace run takes config.…, workload.… and model.")
    if args.warmup < 0 or args.repeats < 1:
        raise SpardaError(f"--warmup {args.warmup} --repeats {args.repeats}: give at least 0 and 1 steps.")
    scenario, given = load_scenario(None, args.overrides), _trace_or_params(args.file)
    require_gpu("trace run")
    from sparda.calibrate.measure.selection import measure_trace

    case = (scenario.model, scenario.workload, scenario.config)
    steps = {"warmup": args.warmup, "repeats": args.repeats}
    found = measure_trace(given, args.file.name, *case, out=args.out, seed=args.seed, **steps)
    data: dict[str, object] = {
        "file": str(args.file),
        "followed": found.how,
        "step_us": found.row.us,
        "spread": found.row.spread,
        "samples_us": list(found.row.samples_us),
        "misses_per_layer": found.counted,
        "foretold_per_layer": found.foretold,
        "workload": asdict(scenario.workload),
        "config": scenario.config.settings,
        "out": str(args.out) if args.out else None,
    }
    text = (
        f"{found.row.us / 1e3:.3f} ms a step, {100 * found.row.spread:.1f} % spread of {len(found.row.samples_us)}; "
        f"the trace was {found.how}. {found.counted:.1f} blocks missed a layer and step, {found.foretold:.1f} foretold."
    )
    return Output(data, wrapped(text))


def _trace_or_params(file: Path) -> Choices | GeneratorParams:
    from sparda.engine.dynamics.choices_file import read_choices
    from sparda.engine.dynamics.generator_params import read_params

    return read_params(file) if file.suffix == ".json" else read_choices(file)


def _skip(given: int | None, choices: Choices) -> int:
    return _given(given, choices.steps // 4)


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _written(out: Path, choices: Choices, size: int) -> str:
    from sparda.explore.text import count

    sets = choices.steps * choices.facts.streams
    return (
        f"Wrote {count(choices.steps, 'step')} of {count(choices.facts.streams, 'stream')} to {out}, "
        f"{size / sets:.1f} bytes a set of blocks."
    )
