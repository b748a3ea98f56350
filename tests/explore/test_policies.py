"""Policies side by side: floors by hand, cells measured or not, and answers that follow from made-up rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from sparda.calibrate.profile import Profile
from sparda.calibrate.store import Row
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.memory import memory_of
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, SparseSpec
from sparda.explore import cli
from sparda.explore.crossover import crossover, floor_share, lookahead_gains, offload_speedup
from sparda.explore.floor import floor_of
from sparda.explore.policies import comparison
from sparda.explore.policies_text import answers, text_of
from sparda.sim.costs import Machine

GIB = 1 << 30
SHAPE, SPEC = MODELS["minicpm4.1-8b"], SparseSpec()
MACHINE = Machine("m", "GPU", 132, 4000.0, 50.0, 50.0, 141 * GIB, 160 * GIB)
MS: dict[int, dict[str, tuple[float | None, ...]]] = {
    # At batch 4, 16 and 64: tokens/s of the fastest resident cell are 3200 at 32K, 2000 at 128K.
    32768: {"sparse-resident": (6, 8, 20), "sparda-resident": (5, 7, 21), "sparda": (5, 6, 25), "sparse": (8, 12, 40)},
    131072: {"sparse-resident": (6, 8, None), "sparda": (5, 7, 16), "sparse": (8, 14, 40), "dense": (9, 30, None)},
}
BATCHES = (4, 16, 64)


def policy_row(policy: str, batch: int, context: int, ms: float, lookahead: int = 1, ctas: int = 3) -> Row:
    case = {**asdict(Workload(batch, context, 0.06)), **asdict(Config(policy, lookahead=lookahead, prefetch_ctas=ctas))}
    missed = 0.0 if policy.endswith("resident") or policy == "dense" else 5.76 * 2 * batch
    return Row("policy", policy, "s1", "graph", case, (ms * 1e3,) * 3, {"misses_per_layer": missed})


def residency_row(resident: int, missed: float, batch: int = 16) -> Row:
    case = {"batch": batch, "context_tokens": 131072, "turnover": 0.06, "tail": 3.0}
    case |= asdict(Config(prefetch_ctas=3, resident_blocks=resident))
    return Row("residency", "sparda", "s1", "graph", case, (7e3 - resident,) * 3, {"misses_per_layer": missed})


@pytest.fixture
def compared(profile: Profile) -> Profile:
    rows = [
        policy_row(policy, batch, context, ms)
        for context, by_policy in MS.items()
        for policy, times in by_policy.items()
        for batch, ms in zip(BATCHES, times, strict=True)
        if ms is not None
    ]
    rows += [policy_row("sparda", 64, 131072, 15.0, lookahead=2), policy_row("sparda", 64, 131072, 12.8, lookahead=4)]
    profile.store.append("policy", rows)
    profile.store.append("residency", [residency_row(96, 119.0), residency_row(192, 8.0)])
    return profile


def test_a_floor_is_the_slower_of_the_plans_bytes_and_the_counted_blocks() -> None:
    workload, config = Workload(16, 131072, 0.06), Config()
    plan = make_plan(SHAPE, SPEC, workload, config)
    counted = floor_of(SHAPE, SPEC, workload, config, MACHINE, 200.0)
    assert counted.hbm_us == pytest.approx(sum(op.work.hbm_bytes for op in plan) / 4e6)
    assert counted.link_us == pytest.approx(200 * 31 * 32768 / 5e4)
    assert counted.us == max(counted.hbm_us, counted.link_us)
    stated = floor_of(SHAPE, SPEC, workload, config, MACHINE)
    assert stated.link_us == pytest.approx(sum(op.work.h2d_bytes for op in plan) / 5e4)
    resident = floor_of(SHAPE, SPEC, workload, Config("sparda-resident"), MACHINE, 0.0)
    assert (resident.link_us, resident.us) == (0.0, resident.hbm_us)


def test_every_cell_of_a_policy_that_was_measured_somewhere_is_there_and_says_what_it_needs(compared: Profile) -> None:
    found = comparison(compared)
    assert found.grids == [(32768, 0.06), (131072, 0.06)]
    assert found.batches == list(BATCHES)
    grid = found.grid(131072, 0.06)
    assert list(grid) == ["dense", "sparse", "sparse-resident", "sparda", "sparda, ahead 2", "sparda, ahead 4"]
    assert list(found.grid(32768, 0.06)) == ["sparse", "sparse-resident", "sparda", "sparda-resident"]
    large = grid["sparse-resident"][64]
    assert (large.step_us, large.fits, large.tokens_per_s, large.floor_share) == (None, False, None, None)
    assert large.gpu_gib == memory_of(SHAPE, SPEC, large.workload, large.config).gpu_bytes / GIB
    own = grid["sparda"][16]
    assert (own.step_us, own.fits, own.pinned_fits) == (7000.0, True, True)
    assert own.tokens_per_s == pytest.approx(16e3 / 7)
    assert own.floor is not None
    assert own.floor_share == own.floor.us / 7000.0 == max(own.hbm_share or 0, own.link_share or 0)
    assert not grid["sparda"][64].pinned_fits
    # What is between the measured batches of a lookahead was not measured, though it would fit.
    assert (grid["sparda, ahead 2"][16].step_us, grid["sparda, ahead 2"][16].fits) == (None, True)


def test_of_several_cta_counts_the_fastest_stands_in_the_table(compared: Profile) -> None:
    compared.store.append("policy", [policy_row("sparda", 16, 131072, 6.5, ctas=2)])
    cell = comparison(compared).grid(131072, 0.06)["sparda"][16]
    assert (cell.step_us, cell.config.prefetch_ctas) == (6500.0, 2)


def test_offloading_wins_from_the_batch_whose_tokens_exceed_every_resident_cell_and_stay_above(
    compared: Profile,
) -> None:
    cells = comparison(compared).cells
    near, far = crossover(cells, 32768), crossover(cells, 131072)
    assert near is not None
    assert far is not None
    # 64 / 25 ms = 2560 tokens/s stays below the 3200 of sparse-resident at batch 64, though 16 / 6 beat its own batch.
    assert (near.from_batch, near.resident and near.resident.label) == (None, "sparse-resident")
    assert (near.no_room_from, near.no_room_gib) == (None, None)
    # 2286 at batch 16 and 4000 at batch 64 exceed 2000; 800 at batch 4 does not.
    assert (far.from_batch, far.resident and far.resident.workload.batch) == (16, 16)
    assert far.no_room_from == 64
    assert far.no_room_gib == pytest.approx(280.5, abs=0.1)
    assert crossover(cells, 8192) is None


def test_a_batch_that_falls_back_below_is_not_counted_as_won(compared: Profile) -> None:
    compared.store.append("policy", [policy_row("sparda", 64, 131072, 40.0)])
    found = crossover(comparison(compared).cells, 131072)
    assert found is not None
    assert found.from_batch is None


def test_lookahead_floor_and_speedup_follow_from_the_rows(compared: Profile) -> None:
    cells = comparison(compared).cells
    gains = lookahead_gains(cells)
    assert list(gains) == [(131072, 64)]
    assert gains[131072, 64] == {2: pytest.approx(16 / 15 - 1), 4: pytest.approx(0.25)}
    share, count = floor_share(cells)
    assert count == 6
    assert 0 < (share or 0.0) < 1
    pair = offload_speedup(cells)
    assert pair is not None
    assert (pair[0].label, pair[0].workload.batch, pair[1].label) == ("sparda, ahead 4", 64, "sparse")


def test_resident_blocks_are_judged_by_the_blocks_that_were_counted(compared: Profile) -> None:
    few, many = comparison(compared).residency
    assert (few.resident_blocks, few.times) == (96, 1.0)
    assert many.times == pytest.approx(158 / 62)
    assert few.missed == pytest.approx(119 / (16 * 2 * 62))
    assert few.expected == 0.06
    assert many.expected == pytest.approx(0.06 * (62 / 158) ** 3)
    assert many.tokens_per_s == pytest.approx(16e6 / 6808)


def test_the_text_fits_a_terminal_marks_the_best_and_says_what_does_not_fit(compared: Profile) -> None:
    text = text_of(comparison(compared), 16, 131072, tokens=False)
    assert max(map(len, text.splitlines())) <= 80
    table = text.split("128K tokens of context")[1].split("\n\n")[0]
    lines = {line.split("  ")[0]: line.split() for line in table.splitlines()}
    assert lines["sparse-resident"][1:4] == ["6.00", "8.00", "280"]
    assert lines["sparda, ahead 4"][-1] == "12.80*"
    assert "Batch 16, 128K tokens, 6 % misses" in text
    assert "4,000 GB/s" in text
    assert "50.0 GB/s" in text
    assert "tokens/s by batch" in text_of(comparison(compared), 16, 131072, tokens=True)
    assert "248.1+" in text_of(comparison(compared), 64, 131072, tokens=False)


def test_answers_are_sentences_with_their_numbers(compared: Profile) -> None:
    found = answers(comparison(compared))
    assert "At 32K offloading (sparda) stays below the best resident sparse policy (3200 tokens/s" in found[0]
    assert "from batch 16 on than the best resident sparse policy does at any batch that fits (2000 tok" in found[1]
    assert found[1].endswith("From batch 64 on no resident policy fits: the least needs 280 GiB.")
    assert found[2] == "Lookahead 2, 4 instead of 1, batch 64 at 128K: +6.7 %, +25.0 % tokens/s of sparda."
    assert found[3].endswith("in the median of 6 cells.")


def test_without_rows_the_command_says_how_to_measure_them(
    shipped: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["policies"]) == 2
    assert "`sparda measure --parts policies" in capsys.readouterr().err


def test_a_cell_that_was_not_measured_is_refused_naming_those_that_were(compared: Profile) -> None:
    with pytest.raises(SpardaError, match=r"no policy was measured at batch 3 and 131072 .* 4, 16, 64 at 32768"):
        comparison(compared).at(3, 131072)


def test_a_damaged_residency_row_is_named(compared: Profile) -> None:
    bad = replace(residency_row(144, 1.0), values={})
    compared.store.append("residency", [bad])
    with pytest.raises(SpardaError, match="a residency row of session s1 lacks"):
        comparison(compared)


def test_the_command_prints_one_object_with_all_of_it(
    compared: Profile, shipped: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["policies", "--batch", "64", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    keys = ("cells", "detail", "residency", "crossover", "floor_share", "answers", "profile", "tier", "model")
    assert set(keys) | {"schema", "command"} == set(data)
    assert {c["workload"]["batch"] for c in data["detail"]} == {64}
    assert data["crossover"]["131072"]["from_batch"] == 16
    assert data["crossover"]["131072"]["resident"]["label"] == "sparse-resident"
    assert {"floor_share", "hbm_share", "link_share", "tokens_per_s", "label"} <= set(data["cells"][0])
    assert cli.main(["policies", "--tokens"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_evidence_counts_policies_and_says_from_where_on_offloading_wins(
    compared: Profile, row: Callable[..., Row]
) -> None:
    from sparda.explore.evidence import evidence

    figures = evidence(compared, seconds=0.01)
    assert figures["policies.count"].value == 5
    assert "sparda-resident" in figures["policies.count"].conditions
    assert figures["speedup.sparda_over_offload.max"].value == pytest.approx(40 / 12.8)
    assert "batch 64, 131072 tokens" in figures["speedup.sparda_over_offload.max"].conditions
    near, far = (figures[f"crossover.offload_wins.from_batch.{k}"] for k in ("32k", "128k"))
    assert (near.value, far.value) == (None, 16)
    assert near.rows == 12
    assert "not exceeded" in near.conditions
    assert "2000, sparse-resident at batch 16; neither fits from batch 64 on" in far.conditions
