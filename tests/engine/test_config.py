"""What is refused, and in which words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparda.engine.config import FETCHING, POLICIES, TRANSFERS, Config, Workload, check_fits
from sparda.engine.errors import SpardaError
from sparda.engine.policies import make_plan
from sparda.engine.shapes import MODELS, ModelShape, SparseSpec, model_named

SHAPE = MODELS["minicpm4.1-8b"]
SPEC = SparseSpec()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Workload(batch=0), r"workload\.batch is 0; allowed are 1 to 1024"),
        (lambda: Workload(batch=1025), r"workload\.batch is 1025"),
        (lambda: Workload(context_tokens=0), r"workload\.context_tokens is 0"),
        (lambda: Workload(miss_rate=1.5), r"workload\.miss_rate is 1\.5; .* 0 to 1"),
        (lambda: Workload(miss_rate=float("nan")), r"workload\.miss_rate is nan"),
        (
            lambda: Config(policy="spards"),
            r"config\.policy is 'spards'; allowed are dense, sparse",
        ),
        (lambda: Config(top_k=0), r"config\.top_k is 0"),
        (lambda: Config(lookahead=5), r"config\.lookahead is 5; allowed are 0 to 4"),
        (lambda: Config(lookahead=-1), r"config\.lookahead is -1"),
        (lambda: Config(prefetch_ctas=0), r"config\.prefetch_ctas is 0"),
        (lambda: Config(prefetch_warps=3), r"config\.prefetch_warps is 3; allowed are 1, 2, 4, 8"),
        (lambda: Config(prefetch_stages=13), r"config\.prefetch_stages is 13"),
        (lambda: Config(top_k=96, resident_blocks=95), r"config\.resident_blocks is 95 with top_k 96"),
        (lambda: Config(score_layer=-1), r"config\.score_layer is -1; allowed are 0 to"),
        (lambda: Config(refresh_steps=-1), r"config\.refresh_steps is -1; allowed are 0 \(never again\) to"),
        (lambda: Config(reserve=1.01), r"config\.reserve is 1\.01; it is a share .* 0 to 1"),
        (lambda: Config(reserve=float("nan")), r"config\.reserve is nan"),
        (lambda: Config(transfer="dma"), r"config\.transfer is 'dma'; allowed are uva, gather, blocks, batch"),
        (lambda: SparseSpec(kernel=48), "kernel 48, stride 16"),
        (lambda: model_named("gpt"), r"unknown model 'gpt'; known models: .*minicpm4\.1-8b"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(make: Callable[[], object], says: str) -> None:
    with pytest.raises(SpardaError, match=says):
        make()


@pytest.mark.parametrize(
    ("workload", "config", "says"),
    [
        (Workload(context_tokens=4096), Config(top_k=65), "top_k is 65 but a context of 4096 tokens has 64 blocks"),
        (Workload(), Config(top_k=33), "top_k is 33 but 34 of the 2048 blocks of 131072 tokens are always chosen"),
        (Workload(context_tokens=640), Config(top_k=9), "top_k is 9 but 10 of the 10 blocks of 640 tokens"),
        (Workload(context_tokens=640), Config(top_k=11), "top_k is 11 but a context of 640 tokens has 10 blocks"),
        (Workload(context_tokens=131073), Config(), "context_tokens is 131073; .* reaches 131072"),
        (Workload(), Config("shallow", score_layer=31), "score_layer is 31 .* 32 layers; give .* at most 30"),
        (
            Workload(),
            Config("shallow", reserve=0.031),
            "reserve is 0.031, 63 of 2048 blocks, but a top_k of 96 leaves 62 beside the 34",
        ),
    ],
)
def test_a_combination_that_cannot_be_is_refused_with_both_values(
    workload: Workload, config: Config, says: str
) -> None:
    with pytest.raises(SpardaError, match=says):
        make_plan(SHAPE, SPEC, workload, config)


def test_lookahead_stays_below_the_number_of_layers() -> None:
    shallow = ModelShape("shallow", layers=2, d_model=64, heads=2, kv_heads=1, head_dim=32, ffn=64, vocab=64)
    with pytest.raises(SpardaError, match=r"lookahead is 2; shallow has 2 layers"):
        check_fits(shallow, SPEC, Workload(), Config(lookahead=2))


@pytest.mark.parametrize(("context", "top_k"), [(4096, 34), (4096, 64), (2176, 34), (2112, 33), (640, 10), (1, 1)])
def test_the_bounds_themselves_fit_in_short_contexts_too(context: int, top_k: int) -> None:
    check_fits(SHAPE, SPEC, Workload(context_tokens=context), Config(top_k=top_k))


def test_what_shallow_alone_reads_troubles_no_other_policy() -> None:
    check_fits(SHAPE, SPEC, Workload(), Config("sparse", score_layer=31, reserve=1.0))
    check_fits(SHAPE, SPEC, Workload(), Config("shallow", score_layer=30, reserve=0.03))


def test_the_transfer_path_tells_configurations_apart_only_where_it_is_read_and_is_not_the_first() -> None:
    assert Config(transfer="batch").settings == {**Config().settings, "transfer": "batch"}
    assert "transfer" not in Config(transfer="uva").settings
    for policy in set(POLICIES) - set(FETCHING):
        assert Config(policy, transfer="gather").settings == Config(policy).settings


def test_a_plan_takes_the_path_that_is_configured_where_its_policy_fetches() -> None:
    kinds = {"uva": "prefetch", "gather": "upload", "blocks": "blocks", "batch": "batch"}
    for policy in POLICIES:
        for transfer in TRANSFERS:
            if policy == "infinigen" and transfer in ("blocks", "batch"):
                continue
            config = Config(policy, transfer=transfer)
            found = {op.kind for op in make_plan(SHAPE, SPEC, Workload(), config)} & set(kinds.values())
            assert found == ({kinds[config.path]} if config.path else set())
            assert config.path == (transfer if policy in FETCHING else "gather" if policy == "infinigen" else "")


@pytest.mark.parametrize("transfer", ["blocks", "batch"])
def test_infinigen_gathers_and_says_so(transfer: str) -> None:
    with pytest.raises(SpardaError, match=f"transfer is '{transfer}'; infinigen has the host gather .* 'gather'"):
        make_plan(SHAPE, SPEC, Workload(), Config("infinigen", transfer=transfer))
    same = make_plan(SHAPE, SPEC, Workload(), Config("infinigen", transfer="gather"))
    assert same.ops == make_plan(SHAPE, SPEC, Workload(), Config("infinigen")).ops


def test_resident_blocks_left_at_zero_are_as_many_as_top_k() -> None:
    assert Config(top_k=80).slots == 80
    assert Config(top_k=80, resident_blocks=120).slots == 120


def test_the_forced_blocks_of_the_default_geometry_are_thirty_four() -> None:
    assert SPEC.forced == 34
    assert SPEC.keys_per_block == 4


@pytest.mark.parametrize(("tokens", "keys"), [(0, 0), (31, 0), (32, 1), (47, 1), (48, 2), (64, 3), (131072, 8191)])
def test_a_compressed_key_counts_once_its_window_is_whole(tokens: int, keys: int) -> None:
    assert SPEC.compressed(tokens) == keys
