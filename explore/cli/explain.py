"""Say why one decode step takes its time: its parts, its critical path, what bounds it, what would shorten it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sparda.explore.cli.common import Output, add_scenario, profile_of, scenario_of, write_folder_of

if TYPE_CHECKING:
    from sparda.calibrate.step_trace import MeasuredStep
    from sparda.explore.scenario import Scenario
    from sparda.sim.timeline import Timeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    add_scenario(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the step for ui.perfetto.dev")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="a measured step (steps/*.json of a store): shown beside, and a second process of the trace",
    )


def run(args: argparse.Namespace) -> Output:
    """Play the step, take it apart, and play it again on machines that are better in one thing each."""
    from sparda.engine.loader import write_json
    from sparda.explore.explain import explain, parts_us
    from sparda.explore.explain_text import explanation_text
    from sparda.explore.headline import opening, warnings
    from sparda.explore.predict import Predictor
    from sparda.sim.trace import joined

    scenario = scenario_of(args)
    profile = profile_of(scenario)
    predictor = Predictor.of(profile, scenario)
    prediction = predictor(scenario.workload, scenario.config)
    explanation, timeline = explain(
        profile.costs, predictor.shape, predictor.spec, prediction.workload, scenario.config
    )
    found = _measured(args.measured) if args.measured else None
    shown = [("simulated", timeline), *([("measured", found[1])] if found else [])]
    trace = write_folder_of(args.trace) if args.trace else None
    if trace:
        write_json(trace, joined(shown))
    measured_us = parts_us(found[1]) if found else None
    data: dict[str, object] = {
        "profile": profile.name,
        "tier": profile.tier,
        "model": scenario.model_name,
        "prediction": prediction.to_dict(),
        "explanation": explanation.to_dict(),
        "trace": str(trace) if trace else None,
        "measured": None,
    }
    misses_from = predictor.misses_from(scenario.workload.context_tokens)
    lines = [
        *opening(profile, prediction, scenario.model_name, misses_from),
        "",
        explanation_text(explanation, measured_us),
        "",
    ]
    if found:
        step, seen = found
        data["measured"] = {
            "file": str(args.measured),
            "machine": step.machine,
            "session": step.session,
            "method": step.method,
            "step_us": step.step_us,
            "kernels_us": seen.step_us,
            "parts_us": measured_us,
            "same_case": _same(step, scenario),
        }
        lines.append(_measured_text(args.measured, step, seen, scenario))
    lines += warnings(prediction)
    if trace:
        lines.append(f"Trace: {trace}")
    return Output(data, "\n".join(lines))


def _measured(path: Path) -> tuple[MeasuredStep, Timeline]:
    """The step in the file and its timeline; an error of either names the file."""
    from sparda.calibrate.step_trace import load_step
    from sparda.engine.errors import SpardaError

    step = load_step(path)
    try:
        return step, step.timeline()
    except SpardaError as e:
        raise SpardaError(f"{path}: {e}") from None


def _same(step: MeasuredStep, scenario: Scenario) -> bool:
    return (step.model, step.workload, step.config) == (scenario.model_name, scenario.workload, scenario.config)


def _measured_text(path: Path, step: MeasuredStep, timeline: Timeline, scenario: Scenario) -> str:
    from sparda.explore.text import percent, wrapped

    w = step.workload
    about = f"{step.model}, batch {w.batch}, {w.context_tokens} tokens, {percent(w.miss_rate)} misses, "
    other = "" if _same(step, scenario) else f" It is another case than the one explained: {about}{step.config.policy}."
    return wrapped(
        f"Measured on {step.machine} ({path}): {step.step_us / 1e3:.3f} ms without a profiler; under one, "
        f"{timeline.step_us / 1e3:.3f} ms from the first kernel's start to the last one's end, in the parts above. "
        f"What slows a measured operation is in the operation's own part.{other}"
    )
