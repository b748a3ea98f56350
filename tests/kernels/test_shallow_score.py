"""The block scores of the shallow scorer: its value, when it is taken anew, and the reserve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from sparda.kernels.shallow_score import reserve_of, shallow_reference, shallow_scores  # noqa: E402

INF = float("inf")


@dataclass
class Case:
    """Inputs of one call, with the geometry; scratch and results start as NaN."""

    inputs: dict[str, Any]
    geometry: dict[str, Any]
    out: torch.Tensor
    base: torch.Tensor
    sums: torch.Tensor
    step: torch.Tensor
    state: torch.Tensor

    def score(self, step: int, every: int = 16, reserve: float = 0.0) -> torch.Tensor:
        self.step.fill_(step)
        hidden_sum = self.inputs["hidden"].float().sum(1)
        scratch: dict[str, Any] = {
            "step": self.step,
            "state": self.state,
            "base": self.base,
            "sums": self.sums,
            "out": self.out,
        }
        shallow_scores(**self.inputs, hidden_sum=hidden_sum, **scratch, every=every, reserve=reserve, **self.geometry)
        return self.out

    def expected(self, reserve: float = 0.0) -> torch.Tensor:
        return shallow_reference(**self.inputs, blocks=self.out.shape[2], reserve=reserve, **self.geometry)


def _case(
    device: str,
    positions: list[int],
    *,
    heads: int = 2,
    group: int = 3,
    dim: int = 32,
    d_model: int = 96,
    units: int = 64,
    blocks: int = 13,
    geometry: tuple[int, int, int] = (16, 8, 4),
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    random = torch.Generator().manual_seed(sum(positions) + dim + heads)
    block, kernel, stride = geometry
    batch, width = len(positions), d_model + heads * dim

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*size, generator=random) * scale

    inputs = {
        # A mean well away from zero, which LayerNorm must take out.
        "h": (normal(batch, d_model) + 0.7).to(dtype),
        "q": normal(batch, heads * group, dim, scale=2.0).to(dtype),
        "keys": normal(batch, heads, blocks * block // stride, dim).to(dtype),
        "positions": torch.tensor(positions, dtype=torch.int32),
        "hidden": normal(units, width, scale=2 * width**-0.5).to(dtype),
        "hidden_bias": normal(units, scale=0.5),
        "output": normal(units),
    }

    def empty(*size: int) -> torch.Tensor:
        return torch.full(size, float("nan"), device=device)

    return Case(
        {name: tensor.to(device) for name, tensor in inputs.items()},
        {"block": block, "kernel": kernel, "stride": stride},
        empty(batch, heads, blocks),
        empty(batch, units),
        empty(batch, 2),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.zeros(2, batch, dtype=torch.int32, device=device),
    )


def _assert_scores(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Equal infinities, and all else within a share of the scores' spread."""
    assert torch.equal(got.isinf(), expected.isinf())
    finite = expected.isfinite()
    spread = float(expected[finite].std()) if int(finite.sum()) > 1 else 1.0
    assert float((got - expected)[finite].abs().max()) <= tolerance * spread
    assert torch.equal(got[~finite], expected[~finite])


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"heads": 1, "group": 1, "dim": 16},
        {"heads": 3, "group": 5, "d_model": 130, "units": 16},
        {"heads": 2, "group": 16, "dim": 128, "d_model": 256, "units": 256, "geometry": (64, 32, 16), "blocks": 40},
        {"geometry": (16, 16, 16)},
    ],
)
def test_scores_are_those_of_the_network(device: str, shape: dict[str, object]) -> None:
    block = shape.get("geometry", (16, 8, 4))[0]  # type: ignore[index]
    positions = [7 * block + 9, 12 * block + 15, 5 * block, 3]
    exact = _case(device, positions, dtype=torch.float32, **shape)  # type: ignore[arg-type]
    _assert_scores(exact.score(0), exact.expected(), 1e-3)
    rounded = _case(device, positions, **shape)  # type: ignore[arg-type]
    _assert_scores(rounded.score(0), rounded.expected(), 0.05)


def test_every_kv_head_has_the_same_scores(device: str) -> None:
    out = _case(device, [100, 60], heads=3).score(0)
    assert torch.equal(out, out[:, :1].expand_as(out))


def test_more_sequences_than_one_tile_of_rows(device: str) -> None:
    case = _case(device, list(range(20, 20 + 9 * 18, 9)), dtype=torch.float32)
    _assert_scores(case.score(0), case.expected(), 1e-3)


@pytest.mark.parametrize("every", [0, 1, 4])
def test_scores_are_taken_in_the_steps_that_are_due_and_stand_in_the_others(device: str, every: int) -> None:
    case = _case(device, [100, 60])
    first = case.score(0, every).clone()
    for step in range(1, 10):
        case.inputs["h"] = torch.roll(case.inputs["h"], 1, dims=1) * 1.5
        before = case.out.clone()
        after = case.score(step, every)
        due = every > 0 and step % every == 0
        assert torch.equal(after, before) != due
    assert torch.equal(case.out, first) == (every == 0)


def test_the_first_call_scores_whatever_the_step(device: str) -> None:
    case = _case(device, [100])
    first = case.score(7).clone()
    _assert_scores(first, case.expected(), 0.05)
    case.inputs["h"] = -case.inputs["h"]
    assert torch.equal(case.score(8), first)
    assert not torch.equal(case.score(0), first)


@pytest.mark.parametrize("every", [0, 4])
def test_a_sequence_that_is_new_is_scored_in_the_next_step_and_the_others_are_not(device: str, every: int) -> None:
    case = _case(device, [100, 60, 90])
    first = case.score(0, every).clone()
    case.inputs["h"] = -case.inputs["h"]
    case.state[0, 1] = 0
    out = case.score(5, every).clone()
    assert torch.equal(out[::2], first[::2])
    _assert_scores(out[1], case.expected()[1], 0.05)
    case.inputs["h"] = -case.inputs["h"]
    assert torch.equal(case.score(6, every), out)


def test_the_reserve_is_infinite_and_includes_blocks_to_come(device: str) -> None:
    case = _case(device, [60, 100], blocks=40)
    reserve = reserve_of(2, 40, 0.2)
    out = case.score(0, reserve=0.2)
    assert torch.equal((out == INF).cpu(), reserve[:, None].expand(2, 2, 40))
    _assert_scores(out, case.expected(0.2), 0.05)
    assert bool(reserve[:, 10:].any())


@pytest.mark.parametrize("reserve", [0.0, 0.01, 0.25, 1.0])
def test_the_reserve_is_about_its_share_of_the_blocks_and_differs_between_sequences(reserve: float) -> None:
    kept = reserve_of(64, 2048, reserve)
    assert float(kept.float().mean()) == pytest.approx(reserve, abs=0.003)
    assert torch.equal(kept, reserve_of(64, 4096, reserve)[:, :2048])
    if 0.0 < reserve < 1.0:
        assert len({tuple(row) for row in kept.tolist()}) == 64
        assert float((kept[:, 1:] & kept[:, :-1]).float().mean()) == pytest.approx(reserve**2, abs=0.004)


def test_what_does_not_fit_is_refused(device: str) -> None:
    case = _case(device, [100])
    with pytest.raises(ValueError, match="kernel, every, reserve: given 8, -1"):
        case.score(0, every=-1)
    with pytest.raises(ValueError, match=r"reserve: given 8, 16, 1\.5"):
        case.score(0, reserve=1.5)
    case.inputs["q"] = case.inputs["q"].float()
    with pytest.raises(ValueError, match="q: given"):
        case.score(0)
    case = _case(device, [100])
    case.inputs["hidden"] = case.inputs["hidden"][:, :-1]
    with pytest.raises(ValueError, match="hidden: given"):
        case.score(0)
    case = _case(device, [100])
    case.geometry["kernel"] = 32
    with pytest.raises(ValueError, match=r"allowed: 1\.\.16"):
        case.score(0)
