"""Terms of the model against the simpler form: a term that made the steps wins, one that did not loses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparda.calibrate.costs import Beside, CtaCurve, FittedCosts
from sparda.calibrate.judged import Term
from sparda.calibrate.store import Row
from sparda.calibrate.terms import TERMS, TIE, Without, terms
from sparda.calibrate.terms import _without as without
from sparda.engine.config import POLICIES, Config, Workload
from sparda.engine.policies import make_plan
from sparda.sim.costs import CostModel
from sparda.sim.player import play
from tests.calibrate.conftest import MODEL, SPEC, step_row

CTAS = (1, 4, 16, 32)
CASES = [
    (Workload(16, 131072, 0.12), Config(prefetch_ctas=4)),
    (Workload(16, 131072, 0.12), Config(prefetch_ctas=32, prefetch_stages=4)),
    (Workload(64, 131072, 0.12), Config(prefetch_ctas=4)),
]


@pytest.fixture(scope="module")
def telling(costs: FittedCosts) -> FittedCosts:
    """Costs in which every term weighs: thread blocks in order, late ones, memory that is asked for too much."""
    ordered = Beside(16, (CtaCurve(8, CTAS, (1.5,) * 4),), (CtaCurve(8, CTAS, (9.0, 30.0, 40.0, 45.0)),))
    fitted = replace(
        costs.fitted,
        in_order=(ordered,),
        start_ns=20_000.0,
        launches=((1, 3000.0),),
        step_ns=400_000.0,
    )
    # So little memory that what runs side by side has to share it.
    return FittedCosts(replace(costs.machine, hbm_gb_s=costs.machine.hbm_gb_s / 3), fitted)


def rows_of(costs: CostModel) -> list[Row]:
    """Steps of a machine that is as these costs say."""
    return [step_row(w, c, play(make_plan(MODEL, SPEC, w, c), costs).step_us) for w, c in CASES]


def duels(rows: list[Row], costs: FittedCosts) -> dict[str, Term]:
    return {t.name: t for t in terms(rows, costs, MODEL, SPEC)}


def test_a_term_that_made_the_steps_wins_and_loses_nowhere(telling: FittedCosts) -> None:
    found = duels(rows_of(telling), telling)
    assert list(found) == list(TERMS)
    for name, term in found.items():
        assert (term.about, term.median, term.p95) == (TERMS[name], 0.0, 0.0)
        assert term.simpler_median >= 0.0
        assert term.winner == "term", name


@pytest.mark.parametrize("name", list(TERMS))
def test_a_term_that_the_machine_has_not_loses_to_the_simpler_form(telling: FittedCosts, name: str) -> None:
    found = duels(rows_of(without(telling, name)), telling)[name]
    assert (found.simpler_median, found.simpler_p95) == (0.0, 0.0)
    assert found.median + found.p95 > TIE
    assert found.winner == "simpler"


def test_a_term_that_changes_nothing_is_a_tie(costs: FittedCosts) -> None:
    idle = replace(costs, fitted=replace(costs.fitted, step_ns=0.0))
    assert duels(rows_of(idle), idle)["graph"].winner == "tie"


@pytest.mark.parametrize("name", list(TERMS))
@pytest.mark.parametrize("policy", [p for p in POLICIES if p.startswith("sp")])
def test_every_policy_plays_without_any_term_and_moves_the_same(telling: FittedCosts, name: str, policy: str) -> None:
    # A step may even be longer without: a copy that starts sooner may run beside what it disturbs more.
    plan = make_plan(MODEL, SPEC, Workload(4, 32768, 0.06), Config(policy, prefetch_ctas=4))
    simpler = play(plan, without(telling, name))
    assert len(simpler.spans) == len(plan.ops)
    assert simpler.link_bytes == play(plan, telling).link_bytes


def test_costs_without_a_term_keep_all_others(telling: FittedCosts) -> None:
    plan = make_plan(MODEL, SPEC, Workload(), Config())
    op = plan.of_kind("attention")[3]
    for name in TERMS:
        rest = Without(telling, name)
        values = {
            "slow-down": (rest.slowdown(op, plan, 2), telling.slowdown(op, plan, 2)),
            "copy's share": (rest.transfer_share(op, plan, 2), telling.transfer_share(op, plan, 2)),
            "late CTAs": (rest.places(op, plan), telling.places(op, plan)),
            "copy's start": (rest.transfer_start_ns(plan), telling.transfer_start_ns(plan)),
            "join": (rest.join_ns(op, plan), telling.join_ns(op, plan)),
            "graph": (rest.step_ns(plan), telling.step_ns(plan)),
            "shared HBM": (rest.machine, telling.machine),
        }
        changed = {term for term, (ours, theirs) in values.items() if ours != theirs}
        assert changed == {name} & set(values)
        assert rest.alone_ns(op, plan) == telling.alone_ns(op, plan)
