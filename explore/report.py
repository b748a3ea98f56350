"""An HTML report of a scenario in one file that needs no network: the answer first, then what it rests on."""

from __future__ import annotations

from pathlib import Path

from sparda.calibrate.profile import Profile
from sparda.engine.loader import write_text
from sparda.explore.report_answer import answer, headline
from sparda.explore.report_data import Report, collect
from sparda.explore.report_page import Html, lines, page, section, tag
from sparda.explore.report_quality import quality
from sparda.explore.report_sections import cta_curves, front, held_out, one_step
from sparda.explore.report_sources import sources
from sparda.explore.scenario import Scenario

SECTIONS = {
    "answer": ("What to use", answer),
    "errors": ("Predicted against measured", held_out),
    "curves": ("Step time by CTA count", cta_curves),
    "step": ("Where the time of one step goes", one_step),
    "front": ("Speed against the block budget", front),
    "quality": ("Quality", quality),
    "sources": ("Where the numbers come from", sources),
}


def write_report(path: Path, profile: Profile, scenario: Scenario) -> None:
    """Write the report; the same profile and scenario give the same bytes.

    Raises SpardaError where the scenario or a measured row cannot be, and where ``path`` cannot be written.
    """
    write_text(path, render(collect(profile, scenario)))


def render(report: Report) -> str:
    """The page as text."""
    title = headline(report)
    links = [tag("a", name, href=f"#{key}") for key, (name, _) in SECTIONS.items()]
    head = [
        tag("p", f"sparda report: {report.scenario.model_name}, profile {report.profile.label}", class_="over"),
        tag("h1", title),
        tag("nav", *links),
    ]
    body = [section(key, name, make(report)) for key, (name, make) in SECTIONS.items()]
    return page(f"{title} - {report.scenario.model_name}", lines([Html("".join(head)), *body]))
