"""Validation on a GPU that is not: every run of every cell in every round, tiers kept as long as cells are alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="measuring needs torch and triton")

from sparda.calibrate.measure import validate
from sparda.calibrate.measure.bench import step_case
from sparda.calibrate.measure.validate import ROUNDS, SAMPLES, WARMUP
from sparda.calibrate.profile import SHIPPED
from sparda.calibrate.store import Row, Store
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read_json
from tests.calibrate.measure_fakes import SHAPE, Gpu, install


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return install(monkeypatch)


def shipped(*indices: int) -> dict[str, Any]:
    """The shipped cells file with these cells, for a smaller model."""
    data: dict[str, Any] = dict(read_json(SHIPPED / "h200-sxm.measured" / "validation.json"))
    return {**data, "model": SHAPE.name, "cells": [data["cells"][i] for i in indices]}


def cell(workload: Mapping[str, object], *configs: Mapping[str, object]) -> dict[str, object]:
    return {"workload": workload, "runs": [{"config": c} for c in configs]}


def run(folder: Path, data: object, budget_s: float = 600.0) -> dict[str, object]:
    path = folder / "cells.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return validate.run(path, folder / "out", budget_s)


def test_every_run_of_the_shipped_cells_leaves_one_row(gpu: Gpu, tmp_path: Path) -> None:
    data = shipped(0, 1, 5)
    result = run(tmp_path, data)
    expected = [
        Row(
            "validation",
            str(r["config"]["policy"]),
            "",
            "",
            step_case(Workload(**c["workload"]), Config(**r["config"])),
            (),
        ).key
        for c in data["cells"]
        for r in c["runs"]
    ]
    rows = Store(tmp_path / "out").rows("validation")
    assert [r.key for r in rows] == expected
    assert (result["rows"], result["ended"]) == ({"validation": len(rows)}, "complete")
    for r in rows:
        assert len(r.samples_us) == ROUNDS * SAMPLES
        assert dict(r.values) == {"misses_per_layer": 2.5, "pool_aliased": 1.0, "rounds": ROUNDS}
    replays = len(gpu.replayed)
    assert run(tmp_path, data)["rows"] == {}
    assert len(gpu.replayed) == replays, "cells measured already are not repeated"


@pytest.mark.parametrize("count", [2, 3, 5, 7, 11, 14])
def test_every_round_measures_every_run_in_another_order(gpu: Gpu, tmp_path: Path, count: int) -> None:
    run(tmp_path, {"model": SHAPE.name, "cells": [cell({}, *({"prefetch_ctas": 1 + i} for i in range(count)))]})
    warm, times = gpu.replayed[:3], gpu.replayed[3:]
    assert len(set(map(id, warm))) == 1, "the tiers' first steps, by whichever run"
    each = WARMUP + SAMPLES
    runs = [id(times[i]) for i in range(0, len(times), each)]
    assert [id(g) for g in times] == [r for r in runs for _ in range(each)]
    rounds = [runs[i : i + count] for i in range(0, len(runs), count)]
    assert len(rounds) == ROUNDS
    assert all(len(set(r)) == count for r in rounds)
    assert all(before != after for before, after in pairwise(rounds)) or count == 2
    followed = [{r[r.index(one) - 1] for r in rounds if r[0] != one} for one in rounds[0]]
    assert count == 2 or all(len(before) > 1 for before in followed), "no run always follows the same one"


def test_tiers_stay_for_like_cells_and_are_given_back_for_others(gpu: Gpu, tmp_path: Path) -> None:
    few: tuple[dict[str, object], ...] = ({}, {"prefetch_ctas": 8}, {"lookahead": 2}, {"policy": "sparse-resident"})
    like = ({"batch": 4, "miss_rate": 0.03}, {"batch": 4, "miss_rate": 0.06}, {"batch": 16, "miss_rate": 0.06})
    run(tmp_path, {"model": SHAPE.name, "cells": [cell(w, *few) for w in like[:2]]})
    assert (len(gpu.tiers), gpu.emptied) == (3, 0), "one each for lookahead 1 and 2 and for a resident cache"
    assert [t.seeded for t in gpu.tiers] == [1, 1, 1]
    assert [t.resets for t in gpu.tiers] == [2, 2, 2], "made at the context length, and put back there"
    gpu.tiers.clear()
    run(tmp_path, {"model": SHAPE.name, "cells": [cell(w, *few[:1]) for w in (like[2], {"batch": 8})]})
    assert ([t.workload.batch for t in gpu.tiers], gpu.emptied) == ([16, 8], 1)


def test_a_cell_that_the_budget_cuts_short_leaves_no_row(gpu: Gpu, tmp_path: Path) -> None:
    assert run(tmp_path, shipped(0), budget_s=0.0)["ended"] == "budget spent"
    assert Store(tmp_path / "out").rows() == []


def test_a_cell_with_more_runs_than_there_is_room_for_is_refused(gpu: Gpu, tmp_path: Path) -> None:
    configs = ({"prefetch_ctas": 1 + i} for i in range(25))
    with pytest.raises(SpardaError, match="25 runs in one cell need 528 tokens, room is for 512"):
        run(tmp_path, {"model": SHAPE.name, "cells": [cell({}, *configs)]})
    assert [p["ended"] for p in Store(tmp_path / "out").provenance.values()] == ["failed"]


@pytest.mark.parametrize(
    "damaged",
    [
        "{",
        "[]",
        {"model": SHAPE.name},
        {"cells": []},
        {"model": SHAPE.name, "cells": 3},
        {"model": SHAPE.name, "cells": ["workload"]},
        {"model": SHAPE.name, "cells": [{"workload": {}, "runs": [{}]}]},
        {"model": SHAPE.name, "cells": [{"workload": {}, "runs": None}]},
        {"model": SHAPE.name, "cells": [{"workload": [], "runs": []}]},
        {"model": SHAPE.name, "cells": [cell({"batch": 0})]},
        {"model": SHAPE.name, "cells": [cell({}, {"ctas": 3})]},
        {"model": "none-7b", "cells": []},
    ],
)
def test_a_damaged_cells_file_is_refused_before_anything_is_measured(gpu: Gpu, tmp_path: Path, damaged: object) -> None:
    with pytest.raises(SpardaError):
        run(tmp_path, damaged)
    assert not (tmp_path / "out").exists()
