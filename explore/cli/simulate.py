"""Predict one decode step: its time, its error band, and where the time goes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sparda.explore.cli.common import Output, add_scenario, profile_of, scenario_of, write_folder_of

if TYPE_CHECKING:
    from sparda.calibrate.profile import Profile
    from sparda.explore.predict import Prediction
    from sparda.sim.timeline import Timeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    add_scenario(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the step for chrome://tracing or Perfetto")


def run(args: argparse.Namespace) -> Output:
    """Play one step and break its time down."""
    from sparda.engine.loader import write_json
    from sparda.engine.policies import make_plan
    from sparda.explore.headline import opening
    from sparda.explore.predict import Predictor, interval90_us
    from sparda.sim.player import play
    from sparda.sim.trace import chrome_trace

    scenario = scenario_of(args)
    profile = profile_of(scenario)
    predictor = Predictor.of(profile, scenario)
    prediction = predictor(scenario.workload, scenario.config)
    plan = make_plan(predictor.shape, predictor.spec, prediction.workload, scenario.config)
    timeline = play(plan, profile.costs)
    interval = interval90_us(profile, plan)
    trace = write_folder_of(args.trace) if args.trace else None
    if trace:
        write_json(trace, chrome_trace(timeline))
    misses_from = predictor.misses_from(scenario.workload.context_tokens)
    data: dict[str, object] = {
        "profile": profile.name,
        "tier": profile.tier,
        "model": scenario.model_name,
        "misses_from": misses_from,
        "prediction": prediction.to_dict(),
        "interval90_us": list(interval) if interval else None,
        "by_kind": _kinds(timeline),
        "busy_us": {stream: ns / 1e3 for stream, ns in timeline.busy_ns.items()},
        "exposed_us": timeline.exposed_ns / 1e3,
        "link_busy_us": timeline.link_busy_ns / 1e3,
        "link_bytes": timeline.link_bytes,
        "trace": str(trace) if trace else None,
    }
    opened = opening(profile, prediction, scenario.model_name, misses_from) + _interval(profile, interval)
    return Output(
        data, "\n".join([*opened, "", *_lines(prediction, timeline), *([f"Trace: {trace}"] if trace else [])])
    )


def _interval(profile: Profile, interval: tuple[float, float] | None) -> list[str]:
    from sparda.explore.text import percent, wrapped

    if interval is None:
        return []
    held = profile.judged.coverage
    checked = "" if held is None else f"; {percent(held)} of the held-out steps lie inside theirs"
    low, high = (us / 1e3 for us in interval)
    return [wrapped(f"90 % interval {low:.3f} to {high:.3f} ms, from calibration residuals{checked}.")]


def _kinds(timeline: Timeline) -> list[dict[str, object]]:
    streams: dict[str, set[str]] = {}
    for span in timeline.spans:
        streams.setdefault(span.kind, set()).add(span.stream)
    return [
        {"kind": kind, "stream": "+".join(sorted(streams[kind])), "count": total.count, "us": total.ns / 1e3}
        for kind, total in timeline.by_kind().items()
    ]


def _lines(p: Prediction, timeline: Timeline) -> list[str]:
    from sparda.explore.headline import warnings
    from sparda.explore.text import columns, percent, wrapped

    kinds = sorted(timeline.by_kind().items(), key=lambda item: -item[1].ns)
    where = {span.kind: span.stream for span in timeline.spans}
    step_ns, exposed = timeline.makespan_ns, timeline.exposed_ns
    rows = [[k, where[k], str(t.count), f"{t.ns / 1e3:.0f}", percent(t.ns / step_ns)] for k, t in kinds]
    return [
        columns(["kind", "stream", "count", "us", "of step"], rows, left=2),
        "",
        wrapped(
            "Busy: "
            + ", ".join(f"{s} {percent(ns / step_ns)}" for s, ns in timeline.busy_ns.items())
            + f"; link {percent(timeline.link_busy_ns / step_ns)}."
        ),
        f"Exposed: main waits {exposed / 1e3:.0f} us ({percent(exposed / step_ns)}) for other streams.",
        *warnings(p),
    ]
