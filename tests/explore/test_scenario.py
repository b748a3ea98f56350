from __future__ import annotations

from pathlib import Path

import pytest

from sparda.engine.errors import SpardaError
from sparda.explore.scenario import default_scenario, load_scenario


def test_defaults_need_no_file() -> None:
    assert load_scenario(None) == default_scenario()


def test_a_file_then_overrides_then_the_profile_argument(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('profile = "a"\n[workload]\nbatch = 4\n[config]\ntop_k = 64\n[grid]\nbatch = [1, 2]\n')
    found = load_scenario(path, ["config.top_k=128", "grid.miss_rate=0.1,0.2", "config.policy=sparse"], "b")
    assert (found.profile, found.workload.batch, found.config.top_k) == ("b", 4, 128)
    assert found.grid.batch == (1, 2)
    assert found.grid.miss_rate == (0.1, 0.2)
    assert found.config.policy == "sparse"


def test_values_that_are_only_allowed_together_may_be_set_in_any_order() -> None:
    found = load_scenario(None, ["config.resident_blocks=100", "config.top_k=64"])
    assert (found.config.resident_blocks, found.config.top_k) == (100, 64)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("config.prefetch_cta=4", ["prefetch_cta", "did you mean 'prefetch_ctas'"]),
        ("confg.top_k=4", ["confg", "did you mean 'config'"]),
        ("config.top_k=many", ["'many'", "an integer"]),
        ("config.top_k=4.5", ["4.5", "an integer"]),
        ("workload.miss_rate=2", ["2.0", "0 to 1"]),
        ("workload.miss_rate=nan", ["nan", "finite"]),
        ("config.resident_blocks=10", ["10", "96"]),
        ("grid.batch=", ["section.key=value"]),
        ("grid.batch=0", ["grid.batch", "1 to 1024"]),
        ("grid.batch=[]", ["grid.batch is empty"]),
        ("grid.batch=a", ["'[a]'", "a list"]),
        ("config=4", ["config.top_k"]),
        ("limits.gpu_gib=-1", ["limits.gpu_gib", "-1"]),
        ("nonsense", ["section.key=value"]),
    ],
)
def test_a_wrong_override_is_named_with_what_is_allowed(override: str, words: list[str]) -> None:
    with pytest.raises(SpardaError) as error:
        load_scenario(None, [override])
    for word in words:
        assert word in str(error.value)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpardaError, match=r"none\.toml"):
        load_scenario(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[workload\n")
    with pytest.raises(SpardaError, match="not valid TOML"):
        load_scenario(tmp_path / "bad.toml")
