"""No figure on the front page is typed by hand: each block is what the command it names prints today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparda.calibrate.profile import Profile, load_profile
from sparda.calibrate.quality import load_quality, quality_names
from sparda.explore.evidence import evidence
from sparda.explore.evidence_quality import SHIPPED
from sparda.explore.policies import comparison
from sparda.explore.readme import evidence_block, policies_block, quality_block, table_block
from sparda.explore.scenario import default_scenario
from sparda.explore.table import cta_table

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def shipped() -> Profile:
    return load_profile("h200-sxm.measured")


def block(name: str) -> str:
    """What stands between a marker and its end, without the fence of a code block."""
    found = re.search(rf"<!-- {name}: .*? -->\n(.*?)\n<!-- end -->", README.read_text(), re.DOTALL)
    assert found, f"README.md has no block {name!r}"
    return re.sub(r"^```text\n|\n```$", "", found[1])


def test_the_evidence_on_the_front_page_is_what_the_rows_give(shipped: Profile) -> None:
    assert block("evidence") == evidence_block(evidence(shipped, seconds=0.1))


def test_the_table_on_the_front_page_is_what_the_command_prints(shipped: Profile) -> None:
    table = cta_table(shipped, default_scenario())
    assert block("table") == table_block(table, 131072, (4, 16, 32, 64))
    assert len(block("table").splitlines()) == 2 + 4 * 3


def test_the_policies_on_the_front_page_are_what_the_command_prints(shipped: Profile) -> None:
    assert block("policies") == policies_block(comparison(shipped), 131072)


@pytest.mark.skipif(not quality_names(), reason="no quality profile comes with the package yet")
def test_the_quality_on_the_front_page_is_what_the_command_prints() -> None:
    assert block("quality") == quality_block(load_quality(SHIPPED))


def test_every_command_on_the_front_page_exists() -> None:
    from sparda.explore.cli import COMMANDS

    text = README.read_text()
    shell = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    named = set(re.findall(r"(?:^|/)sparda ([a-z]+)", shell, re.MULTILINE)) | set(re.findall(r"`sparda ([a-z]+)", text))
    assert {"measure", "table", "evidence", "simulate"} <= named
    assert named <= set(COMMANDS)
