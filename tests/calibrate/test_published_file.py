"""Published figures: read strictly, every one with its source, and consistent with each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparda.calibrate.datasheet import datasheets
from sparda.calibrate.published import FILE, CtaRule, Published, PublishedCell, load_published, published
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, to_plain
from sparda.engine.shapes import MODELS
from sparda.explore.cells import public_ctas


def test_the_file_survives_being_read_and_written_again() -> None:
    assert read(Published, to_plain(published()), where="again") == published()
    assert load_published(FILE) == published()


def test_every_figure_says_where_it_was_read() -> None:
    p = published()
    sources = [c.source for c in p.cells] + [n.source for n in p.no_room] + [m.source for m in p.most]
    sources += [r.source for r in p.ctas] + [p.launches.source]
    for source in sources:
        assert any(word in source for word in ("table", "abstract", "launcher", "decode path"))


def test_model_and_machines_are_known_here() -> None:
    p = published()
    assert p.model in MODELS
    assert set(p.hardware) <= set(datasheets())
    assert {c.policy for c in p.cells} == set(p.headings)


def test_a_step_lasts_as_long_as_its_tokens_say() -> None:
    assert PublishedCell("h100-sxm", 131072, 4, "sparda", 240.2, "x").step_us == pytest.approx(16652.8, abs=0.1)


def test_both_headlines_of_the_paper_follow_from_its_cells() -> None:
    def speed(batch: int, policy: str) -> float:
        cell = published().cell("h100-sxm", 131072, batch, policy)
        assert cell
        return cell.tokens_per_s

    assert speed(8, "sparda") / speed(8, "sparse") == pytest.approx(1.7, abs=0.05)
    assert speed(64, "sparda") / speed(4, "sparse-resident") == pytest.approx(5.3, abs=0.05)


@pytest.mark.parametrize("batch", [1, 4, 16, 17, 32, 64, 2048])
def test_the_launchers_rule_for_the_h100_is_the_one_used_elsewhere(batch: int) -> None:
    assert published().public_ctas("h100-sxm", batch) == public_ctas(batch)


def test_the_launchers_rule_for_the_a100_switches_later() -> None:
    assert [published().public_ctas("a100-sxm", b) for b in (4, 32, 33, 64)] == [16, 16, 32, 32]


def test_a_cell_that_was_not_published_is_none() -> None:
    assert published().cell("h100-sxm", 131072, 32, "sparda") is None


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("tokens_per_s = 277.2", "tokens = 277.2", r"unknown key 'cells\[0\]\.tokens'"),
        ("tokens_per_s = 277.2", "tokens_per_s = 0.0", r"a published figure is 0"),
        ("ratio = 1.55", "ratio = -1.0", r"a published figure is -1"),
        (
            'policy = "sparda"\ntokens_per_s = 235.7',
            'policy = "dense"\ntokens_per_s = 235.7',
            r"'dense' has no heading",
        ),
        ("batch = 8\npolicy", "batch = 4\npolicy", r"is there twice; keep one"),
        ("sparda-on-demand = 30\n", "", r"launches\.per_layer has no count for 'sparda-on-demand'"),
        ('sparda = "SparDA"', 'sparta = "SparDA"', r"headings has 'sparta'"),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    text = FILE.read_text()
    assert old in text
    path = tmp_path / "figures.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(SpardaError, match=r"figures\.toml: .*" + complaint):
        load_published(path)


def test_a_machine_without_hardware_or_rule_is_refused() -> None:
    p = published()
    stray = replace(p.cells[0], machine="l40s")
    with pytest.raises(SpardaError, match="'l40s' has no hardware"):
        replace(p, cells=(*p.cells, stray))
    with pytest.raises(SpardaError, match="'a100-sxm' has no rule in ctas"):
        replace(p, ctas=(CtaRule("h100-sxm", 64, 16, "the public launcher"),))
