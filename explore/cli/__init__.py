"""The ``sparda`` command line: one small module for each command.

With ``--json`` a command prints one JSON object on stdout and nothing else:

- always ``schema`` (1) and ``command``; after a user's mistake ``error``, the sentence that went to stderr;
- ``doctor``: ``checks`` (name, state, found, hint), ``can_simulate``, ``can_measure``, ``can_train``;
- ``machines``: ``name``, ``machines`` (machines.Entry);
- ``simulate``: ``prediction`` (predict.Prediction, see below), ``misses_from``, ``interval90_us`` (low and high, or
  null), ``by_kind``, ``busy_us``, ``exposed_us``, ``link_busy_us``, ``link_bytes``, ``trace``;
- ``explain``: ``prediction``, ``explanation`` (explain.Explanation with ``rule``), ``trace``, ``measured`` (null, or
  the measured step's ``file``, ``step_us``, ``kernels_us``, ``parts_us``, ``same_case``);
- ``explore``: ``best``, ``fastest``, ``ties``, ``front``, ``public`` (predict.Prediction), ``objective``, ``gain``,
  ``noise``, ``considered``, ``fitting``, ``misses_from``, ``study`` (null, or study.Finding);
- ``table``: table.CtaTable with ``rows`` of table.TableRow, ``format``, ``out``; ``demo``: the same with ``report``;
- ``policies``: ``model``, ``cells`` and ``detail`` (policies.Cell with its shares), ``residency`` (policies.Residency),
  ``crossover`` by context (crossover.Crossover), ``floor_share``, ``answers`` (sentences);
- ``published``: ``paper``, ``code``, ``model``, ``assumptions`` (published.Assumptions), ``changed``, ``profiles``,
  ``cells`` (published.Compared), ``ratios``, ``trends``, ``claims``, ``rooms`` (published_ratios), ``misses``,
  ``launch_bound`` (published_case), ``conclusions`` (sentences);
- ``validate``: ``summary`` (validate.Summary) and ``verdicts`` (cells.CellVerdict); with --winners validate.Cells;
- ``evidence``: ``figures`` by id (figures.Figure); ``report``: ``out``; ``measure``: ``out``, ``ended``,
  ``rows_in_folder``, with --dry-run measure.estimate.Estimate; ``calibrate``: ``machine``, ``band``
  (profile.ErrorBand), ``path``;
- ``profile``: ``action``; new: as ``measure`` and ``calibrate``, and ``left`` (cases); list: ``profiles``; show: as
  ``calibrate``, and ``envelope`` and ``sessions`` (provenance and rows of each); diff: calibrate.diff.Diff;
- ``quality``: ``action``; list: ``qualities`` (``quality``, ``model``, ``context_tokens``, and how many ``documents``,
  ``recalls``, ``perplexities``, ``retrievals``, ``dynamics``); show: ``quality`` (its name), the fields of
  calibrate.quality.QualityProfile, ``answers`` (sentences) and the ``top_k`` that they are about; measure: ``out`` and
  as show; train: ``out``, ``model``, ``steps`` (done), ``sequences``, ``context_tokens``, ``training``
  (training.config.Training), ``losses`` of the last step by student (nats), ``seconds_per_step`` (null before the
  second), ``judged`` by student (training.judge.Judgement), ``judged_on`` (sequences);
- ``generate``: ``generations`` (prompt_tokens, tokens, text, reason), ``config``, ``rows``, ``forecast``, ``decoded``,
  ``seconds``, ``tokens_per_s``, ``misses_per_layer``;
- ``trace``: ``action``; record: as ``generate``, and ``out``, ``bytes``, ``steps``, ``facts`` (choices.TraceFacts);
  show: ``file``, ``bytes``, trace_show.Shown; fit: ``files``, ``out``, ``params`` (generator_params.GeneratorParams),
  ``replaced``; generate: ``out``, ``bytes``, ``steps``, ``facts``, ``gap``, ``gap_to``; run: ``file``, ``followed``,
  ``step_us``, ``spread``, ``samples_us``, ``misses_per_layer``, ``foretold_per_layer``, ``workload``, ``config``,
  ``out``.

A Prediction has ``quality`` (null, or quality.Quality: ``recall``, ``mass``, ``ppl_increase``, each null where it is
not known for the ``reason`` given; ``tier`` says what it was measured on; ``spread``, ``standard_error``), ``broken``
(the floors of quality that it breaks: ``reason``, empty where none, ``recall_short``, ``ppl_over``) and ``feasible``.
Rows of a table have ``quality`` and ``floor_reason``. ``misses_from`` (of a table ``selection``) says what the miss
rates rest on where they follow from resident blocks, and is empty where they are as stated.

Commands that use a profile name it in ``profile`` and ``tier``. Times end in ``_us`` (microseconds), memory in
``_gib`` (2**30 bytes); gains, errors, misses and bands are shares: 0.05 is 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from sparda.engine.errors import SpardaError
from sparda.explore.cli.common import Output, Parser

COMMANDS = {
    "doctor": "what this machine has and lacks",
    "machines": "machines with a profile, measured or by datasheet",
    "measure": "measure this machine's GPU and link (needs a GPU)",
    "calibrate": "fit a profile to measurement rows",
    "profile": "make one for this GPU in one go; list, show, compare",
    "simulate": "predict one decode step and where its time goes",
    "explain": "why a step takes its time, and what would shorten it",
    "explore": "search the configurations for one workload",
    "table": "CTA counts for a grid of workloads, in six formats",
    "policies": "all policies side by side, as measured",
    "quality": "what choosing blocks costs a model: list, show, measure; train Forecasts",
    "published": "the paper's figures beside the model's",
    "generate": "decode prompts with a checkpoint (needs a GPU)",
    "trace": "record, show, fit, draw and follow the blocks chosen",
    "validate": "measure what the search chose (needs a GPU), or judge what was measured",
    "report": "write an HTML report",
    "evidence": "recompute every claimed figure from committed rows",
    "demo": "the H200 table and a report, in under a minute",
}
SCHEMA = 1
MISTAKE, INTERRUPTED = 2, 130


def parser() -> Parser:
    """The parser of all commands; a command's module is loaded for its arguments only."""
    top = Parser(
        prog="sparda",
        description="Finds how a sparse-attention decoder with its KV cache in host memory should run on a GPU.",
        epilog="A mistake in the arguments ends with one sentence and exit code 2.",
    )
    top.add_argument("--version", action="version", version=f"sparda {_version()}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_text in COMMANDS.items():
        module = import_module(f"sparda.explore.cli.{name}")
        sub = commands.add_parser(name, help=help_text, description=module.__doc__)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    wants_json = "--json" in words
    command = next((w for w in words if w in COMMANDS), "")
    try:
        _check_command(words)
        args = parser().parse_args(words)
        _show(args.command, _run(args), wants_json)
    except SpardaError as e:
        return _mistake(str(e), command, wants_json)
    except KeyboardInterrupt:
        # A terminal has just shown ^C.
        start = "\n" if sys.stderr.isatty() else ""
        print(f"{start}sparda: interrupted; files already written are whole, begun ones resume.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`sparda table | head`): not an error, and nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as e:
        sentence = f"{e.filename or 'a file'}: {e.strerror or e}; check the path and its permissions."
        return _mistake(sentence, command, wants_json)
    return 0


def _mistake(sentence: str, command: str, as_json: bool) -> int:
    """Say what was wrong, on one line; returns the exit code."""
    line = " ".join(sentence.split())
    print(f"sparda: {line}", file=sys.stderr)
    if as_json:
        print(json.dumps({"schema": SCHEMA, "command": command, "error": line}))
    return MISTAKE


def _check_command(words: Sequence[str]) -> None:
    """Name the closest command where the first word is none; argparse would only list them."""
    if not [w for w in words if w != "--json"]:
        raise SpardaError(
            f"no command given; commands: {', '.join(COMMANDS)}. Begin with `sparda doctor` or see `sparda --help`."
        )
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SpardaError(f"unknown command {words[0]!r}; {hint}commands: {', '.join(COMMANDS)}.")


def _run(args: argparse.Namespace) -> Output:
    run: Callable[[argparse.Namespace], Output] = args.run
    if not args.json:
        return run(args)
    # Whatever a library prints must not get into the one object on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        return run(args)


def _show(command: str, output: Output, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"schema": SCHEMA, "command": command, **output.data}, allow_nan=False))
    else:
        print(output.text.rstrip("\n"))
    sys.stdout.flush()


def _version() -> str:
    try:
        return version("sparda")
    except PackageNotFoundError:
        return "0 (not installed)"
