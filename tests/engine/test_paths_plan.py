"""Plans whose missing blocks come by way of the host: another way from a choice to its attention, the same step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda.engine.config import FETCHING, Config, Workload
from sparda.engine.plan import COPY, HOST, MAIN, PREFETCH, SELECT, Plan, Work
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS
from tests.engine.test_plan import BLOCK, SHAPE, SPEC, attention_of, history, only

BY_HOST = ("gather", "blocks", "batch")
ON_DEMAND = ("sparse", "nosa", "sparda-on-demand")
WAYS = {
    "gather": ("select", "report", "gather", "upload", "scatter"),
    "blocks": ("select", "report", "enlist", "blocks"),
    "batch": ("select", "report", "enlist", "batch"),
}
OF_THE_PATH = {"prefetch", "report", "gather", "upload", "scatter", "enlist", "blocks", "batch"}

policies = st.sampled_from(FETCHING)
paths = st.sampled_from(BY_HOST)
lookaheads = st.integers(0, 4)
examples = settings(deadline=None, max_examples=60)


def plan_of(policy: str, transfer: str, lookahead: int = 1, workload: Workload | None = None) -> Plan:
    config = Config(policy, transfer=transfer, lookahead=lookahead)
    return make_plan(SHAPE, SPEC, workload or Workload(), config)


def fetched_layers(plan: Plan) -> list[int]:
    return [op.layer for op in plan.of_kind("report") if op.layer is not None]


@examples
@given(policies, paths, lookaheads)
def test_everything_but_the_fetch_is_the_step_that_reads_host_memory_in_place(
    policy: str, transfer: str, lookahead: int
) -> None:
    ours, uva = plan_of(policy, transfer, lookahead), plan_of(policy, "uva", lookahead)

    def rest(plan: Plan, stream: str) -> list[tuple[str, Work]]:
        return [(op.name, op.work) for op in plan if op.stream == stream and op.kind not in OF_THE_PATH]

    for stream in (MAIN, SELECT, PREFETCH):
        assert rest(ours, stream) == rest(uva, stream)
    assert fetched_layers(ours) == [op.layer for op in uva.of_kind("prefetch")]


@examples
@given(policies, paths, lookaheads)
def test_each_part_of_the_way_follows_the_one_before_and_the_attention_the_last(
    policy: str, transfer: str, lookahead: int
) -> None:
    plan = plan_of(policy, transfer, lookahead)
    earlier = history(plan)
    assert history(plan)[-1] == set(range(len(plan.ops) - 1))
    for layer in fetched_layers(plan):
        way = [*(only(plan, kind, layer) for kind in WAYS[transfer]), attention_of(plan, layer)]
        assert all(before.index in earlier[after.index] for before, after in pairwise(way))
        assert way[1].stream == way[0].stream
        assert way[1].index == way[0].index + 1
        assert [op.stream for op in way[2:4]] == [HOST, COPY]


@examples
@given(policies, lookaheads)
def test_a_staging_buffer_is_free_when_it_is_filled_again_however_far_ahead_choices_run(
    policy: str, lookahead: int
) -> None:
    plan = plan_of(policy, "gather", lookahead)
    earlier = history(plan)
    layers = fetched_layers(plan)
    for layer in layers[2:]:
        assert only(plan, "upload", layer - 2).index in earlier[only(plan, "gather", layer).index]
        assert only(plan, "scatter", layer - 2).index in earlier[only(plan, "upload", layer).index]


@pytest.mark.parametrize("policy", FETCHING)
def test_one_layer_ahead_or_none_the_buffers_need_no_wait_of_their_own(policy: str) -> None:
    plan = plan_of(policy, "gather", 1)
    for op in plan.of_kind("gather") + plan.of_kind("upload"):
        assert (len(op.after) == 1) or policy == "shallow"


@examples
@given(policies, st.sampled_from(["blocks", "batch"]), lookaheads)
def test_a_list_of_copies_is_started_before_the_next_is_written(policy: str, transfer: str, lookahead: int) -> None:
    plan = plan_of(policy, transfer, lookahead)
    for op in plan.of_kind("enlist"):
        started = plan.ops[op.index + 1]
        assert (started.kind, started.layer, started.after) == (transfer, op.layer, (op.index,))


@examples
@given(st.integers(1, 4), paths)
def test_the_host_turns_to_a_report_when_all_that_needs_no_blocks_is_issued_and_not_later(
    lookahead: int, transfer: str
) -> None:
    """All the main stream has to do up to the next attention is in its queue; its own choice too."""
    plan = plan_of("sparda", transfer, lookahead)
    own = WAYS[transfer][2]
    for layer in fetched_layers(plan):
        turn = only(plan, own, layer)
        reporter = layer - lookahead
        assert only(plan, "down", reporter).index < only(plan, "append", reporter + 1).index < turn.index
        if layer + 1 < SHAPE.layers:
            assert only(plan, "report", layer + 1).index < turn.index
        assert turn.index < attention_of(plan, reporter + 1).index


@pytest.mark.parametrize("transfer", BY_HOST)
def test_shallows_host_starts_a_layers_copies_right_before_its_attention_is_issued_without_waiting_for_the_gpu(
    transfer: str,
) -> None:
    plan = plan_of("shallow", transfer)
    layers = fetched_layers(plan)
    assert layers == list(range(7, SHAPE.layers))
    for layer in layers:
        assert only(plan, "report", layer).index < attention_of(plan, 6).index
        turn = only(plan, WAYS[transfer][2], layer)
        assert only(plan, "append", layer).index < turn.index < attention_of(plan, layer).index


@examples
@given(st.sampled_from(ON_DEMAND), paths, lookaheads)
def test_a_main_stream_that_fetches_by_itself_does_nothing_until_its_blocks_are_there(
    policy: str, transfer: str, lookahead: int
) -> None:
    plan = plan_of(policy, transfer, lookahead)
    earlier = history(plan)
    for layer in fetched_layers(plan):
        select, last = only(plan, "select", layer), only(plan, WAYS[transfer][-1], layer)
        after = next(op for op in plan.ops[last.index + 1 :] if op.stream == MAIN and op.kind.endswith("attention"))
        assert select.stream == MAIN
        assert last.index in earlier[after.index]


@examples
@given(policies, st.floats(0, 1))
def test_copies_are_as_many_as_misses_and_the_lists_are_both_reported(policy: str, miss_rate: float) -> None:
    workload = Workload(miss_rate=miss_rate)
    misses = round(miss_rate * 96 * 16 * SHAPE.kv_heads)
    slots = 16 * SHAPE.kv_heads * 97
    for transfer, lists in (("gather", 1), ("blocks", 2), ("batch", 2)):
        plan = plan_of(policy, transfer, workload=workload)
        assert {op.work.d2h_bytes for op in plan.of_kind("report")} == {4 * (lists * slots + 1)}
        assert {op.work for op in plan.of_kind("enlist")} <= {Work(copies=misses)}
        moved = misses * BLOCK
        copied = {op.work for op in plan if op.kind == transfer and op.stream == COPY}
        assert copied <= {Work(hbm_bytes=moved, h2d_bytes=moved, copies=misses)}
        assert bool(copied) == (transfer != "gather")
        assert sum(op.work.h2d_bytes for op in plan) == len(fetched_layers(plan)) * moved


def test_two_layers_are_enough_for_a_plan_by_way_of_the_host() -> None:
    shape = replace(MODELS["minicpm4.1-8b"], name="two layers", layers=2)
    for transfer in BY_HOST:
        plan = make_plan(shape, SPEC, Workload(), Config(transfer=transfer))
        assert fetched_layers(plan) == [1]
