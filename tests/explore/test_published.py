"""The case study of published figures: complete, computed, its assumptions switchable, nothing fitted."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.calibrate.profile import BASE, Profile, load_profile
from sparda.calibrate.published import published
from sparda.engine.config import Workload
from sparda.engine.errors import SpardaError
from sparda.engine.policies import make_plan
from sparda.engine.shapes import SparseSpec
from sparda.explore import cli
from sparda.explore.cli.published import assumptions_of
from sparda.explore.published import Assumptions, Model, issue_ns, step_us
from sparda.explore.published_case import Case, case_of, conclusions
from sparda.explore.published_limits import Claim, Room
from sparda.explore.published_ratios import RATIOS, Ratio, Trend
from sparda.explore.published_text import assumed, markdown_of, text_of
from sparda.explore.scaled import scaled
from sparda.sim.player import play

Capture = pytest.CaptureFixture[str]
FEW = Assumptions(miss_rates=(0.06, 0.12), launch_us=(5.0,))


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of(published(), Assumptions(), BASE)


@pytest.fixture(scope="module")
def base() -> Profile:
    return load_profile(BASE)


def model_of(base: Profile, **changed: Any) -> Model:
    return Model("h100-sxm", base, published(), replace(Assumptions(), **changed))


def said(case: Case, start: str) -> str:
    (sentence,) = (c for c in conclusions(case) if c.startswith(start))
    return sentence


def test_every_published_cell_is_compared_once(case: Case) -> None:
    assert [c.cell for c in case.cells] == list(published().cells)
    for c in case.cells:
        assert 0 < c.low <= c.high
        assert c.inside == (c.ratio_low <= 1 <= c.ratio_high)


def test_every_ratio_with_both_figures_is_there_and_divides_them(case: Case) -> None:
    p = published()
    for policy, over, about in RATIOS:
        places = {(c.context_tokens, c.batch) for c in p.cells if c.policy == policy}
        places &= {(c.context_tokens, c.batch) for c in p.cells if c.policy == over}
        own = [r for r in case.ratios if r.about == about]
        assert {(r.context_tokens, r.batch) for r in own} == places
        for r in own:
            top, bottom = (p.cell(r.machine, r.context_tokens, r.batch, name) for name in (policy, over))
            assert top
            assert bottom
            assert r.published == top.tokens_per_s / bottom.tokens_per_s
            assert r.low <= r.high
            assert 0 <= r.agree <= r.plays


@pytest.mark.parametrize(
    ("low", "high", "agree", "verdict"),
    [
        (1.2, 1.6, 8, "inside"),
        (0.9, 1.6, 5, "inside"),
        (1.1, 1.3, 8, "order only"),
        (1.6, 1.9, 8, "order only"),
        (0.9, 1.3, 3, "order in some"),
        (0.7, 0.9, 0, "opposite"),
    ],
)
def test_a_verdict_is_read_off_the_numbers(low: float, high: float, agree: int, verdict: str) -> None:
    assert Ratio("m", "a", "b", "a over b", 1, 1, 1.5, low, high, agree, 8).verdict == verdict


@pytest.mark.parametrize(
    ("values", "agree", "direction", "verdict"),
    [
        ((1.0, 2.0, 3.0), 8, "rises", "holds"),
        ((3.0, 2.0), 1, "falls", "holds in some"),
        ((1.0, 2.0, 1.0), 0, "rises and falls", "does not hold"),
    ],
)
def test_a_trend_is_read_off_the_numbers(values: tuple[float, ...], agree: int, direction: str, verdict: str) -> None:
    trend = Trend("m", "a over b", "batch", tuple(range(len(values))), 1, values, agree, 8)
    assert (trend.direction, trend.verdict) == (direction, verdict)


def test_a_claim_and_a_memory_count_are_judged_by_their_numbers() -> None:
    assert [Claim("m", "x", 1.5, *span, "y").verdict for span in ((1.0, 2.0), (1.6, 2.0), (1.0, 1.4))] == [
        "inside",
        "model gives more",
        "model gives less",
    ]
    assert Room("m", "p", 1, 1, ran_out=True, needs_gib=90.0, room_gib=80.0).agrees
    assert not Room("m", "p", 1, 1, ran_out=True, needs_gib=70.0, room_gib=80.0).agrees
    assert Room("m", "p", 1, 1, ran_out=False, needs_gib=70.0, room_gib=80.0).agrees


def test_the_longest_a_launch_can_take_fits_every_published_step(case: Case) -> None:
    per_layer = published().launches.per_layer
    assert case.bound.us * case.bound.launches == pytest.approx(case.bound.cell.step_us)
    for cell in published().cells:
        assert per_layer[cell.policy] * 32 * case.bound.us <= cell.step_us * (1 + 1e-9)
    assert f"at most {case.bound.us:.1f} us for each" in said(case, "Launches")


def test_misses_estimated_from_hidden_time_are_those_that_the_link_could_carry(case: Case, base: Profile) -> None:
    by_batch = {m.batch: m for m in case.misses}
    assert by_batch[4].miss_rate is None
    model = model_of(base)
    for batch in (16, 64):
        without, faster = (published().cell("h100-sxm", 131072, batch, p) for p in ("sparda-on-demand", "sparda"))
        assert without
        assert faster
        rate = by_batch[batch].miss_rate
        assert rate
        plan = make_plan(model.shape, SparseSpec(), Workload(batch, 131072, rate), model.config("sparda", batch))
        moved_us = sum(op.work.h2d_bytes for op in plan) / base.machine.link_h2d_gb_s / 1e3
        assert moved_us == pytest.approx(without.step_us - faster.step_us, rel=0.01)


def test_conclusions_count_what_the_tables_hold(case: Case) -> None:
    below = sum(c.cell.tokens_per_s < c.low for c in case.cells)
    assert f"of {len(case.cells)} published figures {below} lie below" in said(case, "Speed")
    for r in case.ratios:
        place = f"{r.about} at {r.context_tokens // 1024}K, batch {r.batch} ("
        assert (place in said(case, "Not explained")) == (r.verdict == "opposite")
    for t in case.trends:
        assert f"{t.about} along the {t.axis} {t.direction}: {t.verdict}" in said(case, "Trends")
    odd = [r for r in case.rooms if not r.agrees]
    assert f"{len(case.rooms) - len(odd)} of {len(case.rooms)}" in said(case, "Memory")


def test_conclusions_follow_when_the_numbers_change(case: Case) -> None:
    slower = tuple(replace(c, low=c.cell.tokens_per_s / 2, high=c.cell.tokens_per_s * 2) for c in case.cells)
    assert f"0 lie below the model's range, {len(slower)} inside" in said(replace(case, cells=slower), "Speed")
    turned = tuple(replace(r, low=r.published, high=r.published, agree=r.plays) for r in case.ratios)
    held = tuple(replace(t, agree=t.plays) for t in case.trends)
    text = said(replace(case, ratios=turned, trends=held), "Not explained")
    assert text == "Not explained: no order or trend is the other way round."


@given(us=st.floats(0.0, 40.0), batch=st.sampled_from((1, 4, 16, 64)))
def test_no_step_ends_before_its_last_launch_is_made(us: float, batch: int) -> None:
    model = model_of(load_base())
    # A launch's time is rounded to a nanosecond.
    assert model.step_us(32768, batch, "sparda", (0.06, us)) >= model.host_us("sparda", (0.06, us)) - 1


def test_a_host_that_takes_no_time_leaves_the_step_as_it_is(base: Profile) -> None:
    model = model_of(base)
    plan = make_plan(model.shape, SparseSpec(), Workload(16, 131072, 0.06), model.config("sparda", 16))
    assert model.step_us(131072, 16, "sparda", (0.06, 0.0)) == play(plan, base.costs).step_us


_BASE: list[Profile] = []


def load_base() -> Profile:
    if not _BASE:
        _BASE.append(load_profile(BASE))
    return _BASE[0]


def test_launches_are_spread_over_the_operations_of_a_plan(base: Profile) -> None:
    model = model_of(base)
    plan = make_plan(model.shape, SparseSpec(), Workload(4, 131072, 0.06), model.config("sparda", 4))
    assert issue_ns(plan, 28, 5.0) * len(plan.ops) == pytest.approx(28 * 32 * 5000, rel=1e-3)
    assert issue_ns(plan, 28, 0.0) == 0


def test_a_step_in_one_graph_is_never_hosted() -> None:
    case = case_of(published(), replace(FEW, eager=False), BASE)
    assert not any(c.hosted for c in case.cells)
    assert "one graph" in said(case, "Launches")
    assert "one CUDA graph" in assumed(case)[0]


SWITCHED: dict[str, Any] = {
    "miss_rates": (0.01,),
    "same_misses": False,
    "launch_us": (20.0,),
    "eager": False,
    "public_ctas": False,
    "prefetch_warps": 1,
    "prefetch_stages": 8,
    "blocking_ctas": 2,
    "kernel_factor": 2.0,
    "copy_factor": 0.5,
}


def test_every_assumption_can_be_switched(base: Profile) -> None:
    assert set(SWITCHED) == {f.name for f in fields(Assumptions)}
    assert model_of(base, prefetch_warps=4).config("sparda", 4).prefetch_warps == 4


def test_the_configuration_is_the_public_engines(base: Profile) -> None:
    model = model_of(base)
    prefetching, blocking = model.config("sparda", 64), model.config("sparse", 64)
    assert (prefetching.prefetch_ctas, prefetching.prefetch_warps, prefetching.prefetch_stages) == (32, 8, 1)
    assert model.config("sparda", 16).prefetch_ctas == 16
    assert model_of(base, public_ctas=False).config("sparda", 16).prefetch_ctas == 2
    assert blocking.prefetch_ctas == Assumptions().blocking_ctas


# The model has no warps: measured rows of one depth differ in them, and its laws do not.
@pytest.mark.parametrize("name", [n for n in SWITCHED if n != "prefetch_warps"])
def test_each_assumption_alone_changes_the_answer(name: str) -> None:
    # Without launches, which hide what the GPU does; copies at a rate that matters.
    usual = replace(FEW, launch_us=(10.0 if name == "eager" else 0.1,))
    before, after = (case_of(published(), a, BASE) for a in (usual, replace(usual, **{name: SWITCHED[name]})))
    assert after.ratios != before.ratios
    assert after.assumptions.changed[name] == SWITCHED[name]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("launchus=5", "unknown key 'launchus'; did you mean 'launch_us'"),
        ("miss_rates=2", "miss_rates is"),
        ("launch_us=-1", "launch_us is"),
        ("kernel_factor=0", "kernel_factor is 0; give a factor"),
        ("eager=maybe", "key 'eager' is 'maybe'; true or false"),
        ("eager", "give KEY=VALUE"),
    ],
)
def test_a_wrong_assumption_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(SpardaError, match=f"--assume {text.split('=')[0]}.*{complaint}"):
        assumptions_of([text])


def test_assumptions_are_read_as_typed() -> None:
    made = assumptions_of(["launch_us=10,15", "miss_rates=0.06", "eager=false", "blocking_ctas=16"])
    assert made == Assumptions(launch_us=(10.0, 15.0), miss_rates=(0.06,), eager=False, blocking_ctas=16)


def test_scaling_by_one_is_the_profile_itself_and_by_others_scales_times_and_rates(base: Profile) -> None:
    assert scaled(base, 1.0, 1.0) is base
    made = scaled(base, 3.0, 0.5)
    model = model_of(base)
    plan = make_plan(model.shape, SparseSpec(), Workload(16, 131072, 0.06), model.config("sparda", 16))
    assert made.costs.transfer_gb_s(plan, 16) == pytest.approx(base.costs.transfer_gb_s(plan, 16) / 2, rel=0.01)
    for kind in ("gateup", "attention"):
        op = plan.of_kind(kind)[0]
        assert made.costs.fitted.kernels[kind].ns[0][0] == 3 * base.costs.fitted.kernels[kind].ns[0][0]
        assert made.costs.slowdown(op, plan, 16) == base.costs.slowdown(op, plan, 16)
        assert made.costs.transfer_share(op, plan, 16) == pytest.approx(
            base.costs.transfer_share(op, plan, 16), rel=0.02
        )


def test_text_and_section_hold_every_cell_assumption_and_conclusion(case: Case) -> None:
    text, section = text_of(case), markdown_of(case)
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    for part in (*assumed(case), *conclusions(case)):
        assert part in flat
        assert f"* {part}" in section
    assert sum(line.startswith("| Spar") for line in section.splitlines()) == len(case.cells)


def test_the_command_plays_each_machine_on_its_datasheet(capsys: Capture) -> None:
    words = ["published", "--assume", "launch_us=10", "--assume", "miss_rates=0.06,0.12", "--json"]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert err == ""
    assert (data["schema"], data["command"]) == (1, "published")
    assert data["profiles"] == {
        machine: {"profile": f"{machine}.datasheet", "tier": "datasheet"} for machine in published().hardware
    }
    assert len(data["cells"]) == len(published().cells)
    assert data["changed"] == {"launch_us": [10.0], "miss_rates": [0.06, 0.12]}
    assert {c["machine"] for c in data["claims"]} == set(published().hardware)
    assert {r["verdict"] for r in data["ratios"]} <= {"inside", "order only", "order in some", "opposite"}
    by_hand = case_of(published(), Assumptions(launch_us=(10.0,), miss_rates=(0.06, 0.12)))
    assert data["conclusions"] == conclusions(by_hand)


def test_on_its_datasheet_a_machine_is_played_with_the_costs_carried_over_to_it() -> None:
    assumptions = Assumptions(miss_rates=(0.06,), eager=False)
    on_sheets, on_base = case_of(published(), assumptions), case_of(published(), assumptions, BASE)
    for own, other in zip(on_sheets.cells, on_base.cells, strict=True):
        model = Model(own.cell.machine, load_profile(f"{own.cell.machine}.datasheet"), published(), assumptions)
        us = model.step_us(own.cell.context_tokens, own.cell.batch, own.cell.policy, (0.06, 0.0))
        assert own.low == own.high == own.cell.batch * 1e6 / us
        # An H100 has seven tenths of the base's memory bandwidth.
        assert own.high <= other.high


@settings(deadline=None, max_examples=8)
@given(us=st.floats(0.0, 20.0), slower=st.floats(1.0, 3.0), policy=st.sampled_from(("sparse", "sparda")))
def test_a_slower_host_never_makes_a_step_shorter_than_its_launches_or_than_itself(
    us: float, slower: float, policy: str
) -> None:
    model = model_of(load_base())
    steps = [model.step_us(32768, 16, policy, (0.06, t)) for t in (0.0, us, slower * us)]
    hosts = [model.host_us(policy, (0.06, t)) for t in (0.0, us, slower * us)]
    for step, host in zip(steps, hosts, strict=True):
        assert step >= host - 1
    assert steps[0] <= 1.001 * steps[1] <= 1.002 * steps[2]


def test_a_host_as_slow_as_the_gpu_costs_more_than_the_longer_of_the_two(base: Profile) -> None:
    model = model_of(base)
    plan = make_plan(model.shape, SparseSpec(), Workload(16, 32768, 0.06), model.config("sparse", 16))
    alone = play(plan, base.costs).step_us
    ns = round(1e3 * alone / len(plan.ops))
    assert step_us(plan, base, ns) > 1.01 * max(alone, ns * len(plan.ops) / 1e3), (
        "it waits here for one, there for the other"
    )
    # A host that is far ahead is never waited for; one that is far behind leaves the GPU its last operation to do.
    assert step_us(plan, base, 1) == pytest.approx(alone, rel=0.01)
    far = round(20e3 * alone / len(plan.ops))
    assert 0 < step_us(plan, base, far) - far * len(plan.ops) / 1e3 < 0.05 * alone


def test_the_command_prints_tables_or_a_section(capsys: Capture) -> None:
    few = ["--profile", BASE, "--assume", "launch_us=10", "--assume", "miss_rates=0.06"]
    assert cli.main(["published", *few]) == 0
    assert "It comes to:" in capsys.readouterr().out
    assert cli.main(["published", *few, "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("### Published figures")


def test_a_mistake_is_one_sentence_and_2(capsys: Capture) -> None:
    assert cli.main(["published", "--assume", "launches=3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
