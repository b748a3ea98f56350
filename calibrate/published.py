"""Decode figures that others published, read strictly from a file that says where each was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sparda.engine.config import POLICIES
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, read_toml

FILE = Path(__file__).parent / "published.toml"


@dataclass(frozen=True, slots=True)
class PublishedCell:
    """One published figure: tokens per second of a whole batch."""

    machine: str
    context_tokens: int
    batch: int
    policy: str
    tokens_per_s: float
    source: str

    @property
    def step_us(self) -> float:
        """Microseconds of a step, since a step makes one token for each sequence."""
        return self.batch * 1e6 / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A cell that was published as out of GPU memory."""

    machine: str
    context_tokens: int
    batch: int
    policy: str
    source: str


@dataclass(frozen=True, slots=True)
class Most:
    """The largest published ratio of two policies' tokens/s over a table whose cells are not all known."""

    machine: str
    policy: str
    over: str
    ratio: float
    source: str


@dataclass(frozen=True, slots=True)
class CtaRule:
    """Prefetch CTAs that the public launcher gives a machine up to a batch."""

    machine: str
    batch: int
    ctas: int
    source: str


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches that the public engine's host makes for a layer, by policy; ``host_us``: what one may take, in words."""

    source: str
    host_us: str
    per_layer: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Published:
    """What was published of one paper and its code. ``headings``: the policies by the paper's names."""

    paper: str
    code: str
    model: str
    hardware: Mapping[str, str]
    headings: Mapping[str, str]
    launches: Launches
    ctas: tuple[CtaRule, ...]
    cells: tuple[PublishedCell, ...]
    no_room: tuple[NoRoom, ...]
    most: tuple[Most, ...]

    def __post_init__(self) -> None:
        for policy in self.headings:
            _require(policy in POLICIES, f"headings has {policy!r}; policies are {', '.join(POLICIES)}.")
            _require(self.launches.per_layer.get(policy, 0) > 0, f"launches.per_layer has no count for {policy!r}.")
        places = [(c.machine, c.policy) for c in self.cells]
        places += [(n.machine, n.policy) for n in self.no_room]
        places += [(m.machine, p) for m in self.most for p in (m.policy, m.over)]
        for machine, policy in places:
            _require(policy in self.headings, f"{policy!r} has no heading; headings are {', '.join(self.headings)}.")
            _require(machine in self.hardware, f"{machine!r} has no hardware; known: {', '.join(self.hardware)}.")
            _require(bool([r for r in self.ctas if r.machine == machine]), f"{machine!r} has no rule in ctas.")
        for value in (*(c.tokens_per_s for c in self.cells), *(m.ratio for m in self.most)):
            _require(value > 0, f"a published figure is {value:g}; give a number above 0.")
        keys = [(c.machine, c.context_tokens, c.batch, c.policy) for c in self.cells]
        twice = next((k for k in keys if keys.count(k) > 1), None)
        _require(twice is None, f"the cell {twice} is there twice; keep one.")

    def cell(self, machine: str, context_tokens: int, batch: int, policy: str) -> PublishedCell | None:
        """The published cell, None where it is not known."""
        key = (machine, context_tokens, batch, policy)
        return next((c for c in self.cells if (c.machine, c.context_tokens, c.batch, c.policy) == key), None)

    def public_ctas(self, machine: str, batch: int) -> int:
        """Prefetch CTAs of the public launcher's rule."""
        rules = sorted((r.batch, r.ctas) for r in self.ctas if r.machine == machine)
        return next((ctas for most, ctas in rules if batch <= most), rules[-1][1])


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise SpardaError(message)


def load_published(path: Path = FILE) -> Published:
    """The figures of a TOML file. Raises SpardaError, naming file and key, for whatever is not as it should be."""
    return read(Published, read_toml(path), where=str(path))


@cache
def published() -> Published:
    """The shipped figures."""
    return load_published()
