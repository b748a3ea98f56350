from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import MODELS, SparseSpec
from sparda.explore import evidence as evidence_module
from sparda.explore.evidence import evidence
from sparda.explore.figures import LIVE, Figure
from sparda.explore.floor import floor_of
from sparda.explore.predict import Predictor
from sparda.explore.readme import evidence_block
from sparda.explore.scenario import Scenario
from sparda.explore.validate import FILE, winners

IDS = [
    "prefetch.share.2cta.all_miss",
    "prefetch.share.2cta.miss15_b16",
    "decode.step_ms.b4_m06",
    "decode.step_ms.b16_m06",
    "decode.step_ms.b16_m12",
    "decode.step_ms.b32_m06",
    "decode.step_ms.b64_m03",
    "decode.step_ms.b64_m12",
    "decode.floor_share.median",
    "policies.count",
    "speedup.sparda_over_offload.max",
    "crossover.offload_wins.from_batch.32k",
    "crossover.offload_wins.from_batch.128k",
    "parity.smollm2.prompts",
    "parity.smollm2.mismatches",
    "trace.misses.max_gap",
    "trace.step_error.max",
    "heldout.steps.count",
    "heldout.steps.median",
    "heldout.steps.p95",
    "heldout.steps.max",
    "heldout.steps.max.few_ctas",
    "heldout.host_paths.median",
    "heldout.tau.min",
    "interval90.coverage",
    "regret.max",
    "gain.vs_public.max",
    "handicap.count",
    "handicap.median",
    "handicap.max",
    "quality.recall.forecast.d1.k16",
    "quality.recall.forecast.d2.k16",
    "quality.recall.forecast.d3.k16",
    "quality.recall.forecast.d4.k16",
    "quality.recall.infinigen.d1.k16",
    "quality.recall.proxy.d1.k16",
    "quality.recall.previous.k16",
    "quality.recall.shared.k16",
    "quality.ppl_increase.forecast.d1.k16",
    "quality.ppl_increase.forecast.d4.k16",
    "quality.ppl_increase.infinigen.d1.k16",
    "quality.ppl_increase.proxy.d1.k16",
    "quality.ppl_increase.previous.k16",
    "quality.ppl_increase.shared.k16",
    "quality.ppl_increase.sparse.k16",
    "quality.ppl_increase.recency.k16",
    "quality.ppl_increase.oracle.k16",
    "quality.miss_rate.1x",
    "quality.miss_rate.2x",
    "quality.miss_rate.4x",
    "quality.generator.max_gap",
    "train.seconds_per_step.8b_64k",
    "train.peak_gib.8b_64k",
    "machines.measured",
    "machines.datasheet",
    "sim.steps_per_s",
    "sim.ms_per_step",
    "sim.configs_per_s",
]
COUNTED = ("heldout.steps.count", "handicap.count")
"""Figures that are 0 without rows: there is nothing else that they could be."""
ROWLESS = ("machines.", "sim.")
"""Figures that rest on no row."""


@pytest.fixture(autouse=True)
def no_quality(monkeypatch: pytest.MonkeyPatch) -> None:
    """No quality profile comes with the package: its figures do not rest on a profile's rows."""
    monkeypatch.setattr(evidence_module, "shipped_quality", lambda: None)


def test_figures_come_from_the_rows(profile: Profile) -> None:
    figures = evidence(profile, seconds=0.01)
    assert list(figures) == IDS
    assert figures["prefetch.share.2cta.all_miss"].value == pytest.approx(48 / 50)
    assert figures["prefetch.share.2cta.all_miss"].met is True
    assert "2 warps" in figures["prefetch.share.2cta.all_miss"].conditions
    assert figures["prefetch.share.2cta.miss15_b16"].value == pytest.approx(44 / 50)
    assert figures["prefetch.share.2cta.miss15_b16"].met is False
    assert figures["heldout.steps.count"].value == 3
    assert figures["heldout.steps.median"].value == pytest.approx(1 - 1 / 1.02, abs=1e-4)
    assert figures["decode.step_ms.b16_m06"].rows == 1
    assert "NVIDIA Fake $1: s1" in figures["decode.step_ms.b16_m06"].provenance
    assert figures["heldout.steps.p95"].value == figures["heldout.steps.max"].value
    assert all((figures[i].value or 0) > 0 for i in IDS if i.startswith(ROWLESS))
    assert all(figures[i].provenance == LIVE for i in IDS if i.startswith("sim."))
    assert figures["regret.max"].value is None
    assert figures["regret.max"].met is None


def test_the_smallest_median_counts_and_another_policy_does_not(profile: Profile, row: Callable[..., Row]) -> None:
    at = Workload(16, 131072, 0.06)
    plain = row("step", at, Config(), 1000.0)
    wider = replace(plain, case={**plain.case, "resident_blocks": 192})
    profile.store.append(
        "more",
        [
            row("validation", at, Config(prefetch_ctas=3), 3000.0),
            row("step", at, Config(policy="sparse"), 1000.0),
            row("step", at, Config(top_k=64), 1000.0),
            row("step", at, Config(lookahead=2), 1000.0),
            wider,
        ],
    )
    figure = evidence(profile, seconds=0.01)["decode.step_ms.b16_m06"]
    assert (figure.value, figure.rows) == (3.0, 2)


def test_regret_and_gain_come_from_validation(
    profile: Profile, predictor: Predictor, small: Scenario, row: Callable[..., Row]
) -> None:
    cells = winners(predictor, small, profile.folder / FILE)
    rows = [row("validation", c.workload, r.config, r.predicted_us) for c in cells.cells for r in c.runs]
    profile.store.append("v", rows)
    figures = evidence(profile, seconds=0.01)
    assert 0 <= (figures["regret.max"].value or 0.0) <= 0.01
    assert figures["regret.max"].met
    assert (figures["gain.vs_public.max"].value or 0.0) > 0


def test_the_floor_share_is_the_median_over_cells_of_their_fastest_steps(
    profile: Profile, row: Callable[..., Row]
) -> None:
    before = evidence(profile, seconds=0.01)["decode.floor_share.median"]
    assert "3 cells" in before.conditions
    assert "4,000 GB/s" in before.conditions
    assert "50.0 GB/s" in before.conditions
    slower = [row("step", Workload(16, 131072, 0.06), Config(prefetch_ctas=8), 1e6)]
    other = [row("step", Workload(16, 131072, 0.06), Config(policy="sparse"), 1.0)]
    profile.store.append("more", [*slower, *other])
    after = evidence(profile, seconds=0.01)["decode.floor_share.median"]
    assert (after.value, after.rows) == (before.value, before.rows + 1), "neither another count nor another policy"
    assert 0.5 < (after.value or 0.0) < 1.0
    # At another top-k it is a cell of its own; a step as long as its floor moves the median up.
    w, c = Workload(16, 131072, 0.12), Config(prefetch_ctas=8)
    floor = floor_of(MODELS["minicpm4.1-8b"], SparseSpec(), w, c, profile.machine)
    profile.store.append("more", [row("step", w, c, floor.us)])
    moved = evidence(profile, seconds=0.01)["decode.floor_share.median"]
    assert (moved.value or 0.0) > (before.value or 0.0)


def parity_row(prompt: int, policy: str, compared: int, mismatches: int, op: str = "smollm2") -> Row:
    case: dict[str, float | int | str | bool] = {"prompt": prompt, "policy": policy}
    return Row("parity", op, "s1", "greedy", case, (1.0,), {"compared": compared, "mismatches": mismatches})


def test_parity_counts_prompts_once_and_every_token_that_differs(profile: Profile) -> None:
    rows = [parity_row(i, p, 64, 0) for i in range(5) for p in ("dense", "sparse")]
    profile.store.append("parity", [*rows, parity_row(9, "dense", 64, 7, op="another")])
    figures = evidence(profile, seconds=0.01)
    prompts, differ = figures["parity.smollm2.prompts"], figures["parity.smollm2.mismatches"]
    assert (prompts.value, prompts.met, prompts.rows) == (5, True, 10)
    assert (differ.value, differ.met) == (0, True)
    assert "640 tokens compared; policies: dense, sparse" in differ.conditions
    profile.store.append("parity", [parity_row(2, "dense", 64, 3)])
    differ = evidence(profile, seconds=0.01)["parity.smollm2.mismatches"]
    assert (differ.value, differ.met) == (3, False)


def test_the_front_page_says_of_each_missing_value_why_it_is_missing() -> None:
    figures = {
        "a": Figure(None, "sequences", None, False, 3, "never", "s1"),
        "b": Figure(None, "ms", 5.0, False, 0, "batch 1", "no rows"),
        "c": Figure(1000.0, "steps/s", None, True, 0, "here", LIVE),
        "d": Figure(1.234, "times", None, True, 2, "most", "s1"),
    }
    lines = evidence_block(figures).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == [
        "none",
        "not measured",
        "measured where you run it",
        "1.23 times",
    ]


def test_without_rows_nothing_is_claimed(profile: Profile) -> None:
    for path in (profile.folder / "rows").glob("*"):
        path.unlink()
    figures = evidence(profile, seconds=0.01)
    assert list(figures) == IDS
    assert [figures[i].value for i in COUNTED] == [0, 0]
    assert all(figures[i].value is None for i in IDS if i not in COUNTED and not i.startswith(ROWLESS))
    assert not any(figures[i].rows for i in IDS)


def test_a_row_without_its_case_is_named(profile: Profile, row: Callable[..., Row]) -> None:
    bad = replace(row("step", Workload(), Config(), 1.0), case={"batch": 1})
    profile.store.append("bad", [bad])
    with pytest.raises(SpardaError, match="lacks"):
        evidence(profile, seconds=0.01)
