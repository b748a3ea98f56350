"""Published figures beside what the model gives for the same machines, under assumptions that are all stated.

The published engine is not ours: what is carried over is the machine and the order of a step, what is assumed is in
``Assumptions``, and nothing is fitted to the figures. Where a value is not known it is a range, and so is the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import product

from sparda.calibrate.profile import DATASHEET, Profile, load_profile
from sparda.calibrate.published import Published, PublishedCell
from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.loader import to_plain
from sparda.engine.memory import memory_of
from sparda.engine.plan import Plan
from sparda.engine.policies import make_plan
from sparda.engine.shapes import ModelShape, SparseSpec, model_named
from sparda.explore.scaled import scaled
from sparda.explore.text import GIB
from sparda.sim.player import play

HOSTED = 0.95
"""Share of a step from which on its launches are what sets its time."""

Combination = tuple[float, float]
"""(miss rate, microseconds per launch)."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What has to be assumed of the public engine, each to be switched on its own; ranges are played at every value.

    ``miss_rates``: shares of top-k that a step fetches; no public figure has them.
    ``same_misses``: both sides of a ratio miss alike; without it, any of the rates may meet any other.
    ``launch_us``: microseconds of the host per launch; ``eager``: it launches every kernel, False: one CUDA graph.
    ``public_ctas``: the public launcher's CTA rule, False: two CTAs, as this project's default.
    ``prefetch_warps``, ``prefetch_stages``: the public copy kernel is staged through registers, one piece at a time.
    ``blocking_ctas``: CTAs of a copy on the main stream; the public one has a CTA for each slot, so all it can use.
    ``kernel_factor``: its kernels' time over ours; ``copy_factor``: its copy's rate over ours. Both unknown, so 1.
    """

    miss_rates: tuple[float, ...] = (0.03, 0.06, 0.12, 0.15)
    same_misses: bool = True
    launch_us: tuple[float, ...] = (5.0, 10.0)
    eager: bool = True
    public_ctas: bool = True
    prefetch_warps: int = 8
    prefetch_stages: int = 1
    blocking_ctas: int = 32
    kernel_factor: float = 1.0
    copy_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("miss_rates", "launch_us"):
            values = getattr(self, name)
            if not values or min(values) < 0 or (name == "miss_rates" and max(values) > 1):
                most = "; shares of top-k, at most 1" if name == "miss_rates" else ""
                raise SpardaError(f"{name} is {list(values)}; give at least one number, none below 0{most}.")
        for name in ("kernel_factor", "copy_factor"):
            if not 0.01 <= getattr(self, name) <= 100:
                raise SpardaError(f"{name} is {getattr(self, name):g}; give a factor of 0.01 to 100, 1 for ours.")

    @property
    def combinations(self) -> list[Combination]:
        """Every miss rate with every time per launch."""
        return list(product(self.miss_rates, self.launch_us if self.eager else (0.0,)))

    @property
    def pairs(self) -> list[tuple[Combination, Combination]]:
        """Which combinations the two sides of a ratio may have: always one host, and one miss rate if so assumed."""
        every = self.combinations
        return [(a, b) for a, b in product(every, every) if a[1] == b[1] and (a[0] == b[0] or not self.same_misses)]

    @property
    def changed(self) -> dict[str, object]:
        """What differs from the defaults."""
        usual = Assumptions()
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(usual, f.name)}


def step_us(plan: Plan, profile: Profile, issue_ns: int) -> float:
    """Microseconds of a step whose host takes ``issue_ns`` to issue an operation; 0 for a step in one graph."""
    return play(plan, profile.costs, issue_ns=issue_ns).step_us


def issue_ns(plan: Plan, launches_per_layer: int, launch_us: float) -> int:
    """Nanoseconds for the host to issue one of the plan's operations, where the engine issues more of them than it has.

    An operation here stands for several launches there; their time is spread evenly.
    """
    return round(launch_us * 1e3 * launches_per_layer * plan.shape.layers / len(plan.ops))


@dataclass(slots=True)
class Model:
    """The modelled machine of one published machine, remembering what it has played."""

    name: str
    profile: Profile
    published: Published
    assumptions: Assumptions
    spec: SparseSpec = field(default_factory=SparseSpec)
    _known: dict[tuple[int, int, str, Combination], float] = field(default_factory=dict)

    @property
    def shape(self) -> ModelShape:
        return model_named(self.published.model)

    def config(self, policy: str, batch: int) -> Config:
        """The public engine's configuration in our terms."""
        a = self.assumptions
        ctas = self.published.public_ctas(self.name, batch) if a.public_ctas else Config().prefetch_ctas
        if policy != "sparda":
            ctas = a.blocking_ctas
        return Config(
            policy=policy,
            prefetch_ctas=ctas,
            prefetch_warps=a.prefetch_warps,
            prefetch_stages=a.prefetch_stages,
        )

    def step_us(self, context_tokens: int, batch: int, policy: str, combination: Combination) -> float:
        """Microseconds of a step under one combination of what is not known."""
        key = (context_tokens, batch, policy, combination)
        if key not in self._known:
            misses, launch_us = combination
            workload = Workload(batch, context_tokens, misses)
            plan = make_plan(self.shape, self.spec, workload, self.config(policy, batch))
            per_layer = self.published.launches.per_layer[policy]
            self._known[key] = step_us(plan, self.profile, issue_ns(plan, per_layer, launch_us))
        return self._known[key]

    def host_us(self, policy: str, combination: Combination) -> float:
        """Microseconds that the host takes to issue all of a step's launches."""
        return self.published.launches.per_layer[policy] * self.shape.layers * combination[1]

    def tokens_per_s(self, context_tokens: int, batch: int, policy: str, combination: Combination) -> float:
        return batch * 1e6 / self.step_us(context_tokens, batch, policy, combination)

    def gpu_gib(self, context_tokens: int, batch: int, policy: str) -> float:
        """GPU memory that our engine needs for a cell, GiB."""
        workload = Workload(batch, context_tokens)
        return memory_of(self.shape, self.spec, workload, self.config(policy, batch)).gpu_bytes / GIB

    @property
    def room_gib(self) -> float:
        return self.profile.machine.hbm_capacity_bytes / GIB

    def hidden_misses(self, without: PublishedCell, with_prefetch: PublishedCell) -> float | None:
        """The miss rate if all time that prefetching saved was the link's, at the link's whole rate.

        An estimate from two published cells, played by nothing; None where prefetching saved no time.
        """
        saved_us = without.step_us - with_prefetch.step_us
        if saved_us <= 0:
            return None
        moved = saved_us * 1e3 * self.profile.machine.link_h2d_gb_s
        blocks = (self.shape.layers - 1) * without.batch * self.shape.kv_heads * Config().top_k
        return moved / (blocks * self.shape.block_bytes(self.spec))


def models(published: Published, assumptions: Assumptions, profile: str | None = None) -> list[Model]:
    """A model of every published machine, from its datasheet's profile, or all on the profile of that name."""
    found = []
    for machine in published.hardware:
        base = load_profile(profile or f"{machine}.{DATASHEET}")
        made = scaled(base, assumptions.kernel_factor, assumptions.copy_factor)
        found.append(Model(machine, made, published, assumptions))
    return found


@dataclass(frozen=True, slots=True)
class Compared:
    """One published cell and the model's range for it, tokens/s.

    In ``hosted`` of ``plays`` the host's launches are HOSTED of the step or more.
    """

    cell: PublishedCell
    low: float
    high: float
    hosted: int
    plays: int

    @property
    def inside(self) -> bool:
        return self.low <= self.cell.tokens_per_s <= self.high

    @property
    def ratio_low(self) -> float:
        """Published over the model's fastest."""
        return self.cell.tokens_per_s / self.high

    @property
    def ratio_high(self) -> float:
        """Published over the model's slowest."""
        return self.cell.tokens_per_s / self.low

    def to_dict(self) -> dict[str, object]:
        more = {"inside": self.inside, "ratio_low": self.ratio_low, "ratio_high": self.ratio_high}
        return {**to_plain(self), **more}


def compared(model: Model) -> list[Compared]:
    """The published cells of the model's machine, in their order."""
    return [_compared(model, cell) for cell in model.published.cells if cell.machine == model.name]


def _compared(model: Model, cell: PublishedCell) -> Compared:
    combinations = model.assumptions.combinations
    steps = [model.step_us(cell.context_tokens, cell.batch, cell.policy, c) for c in combinations]
    hosts = [model.host_us(cell.policy, c) for c in combinations]
    hosted = sum(host >= HOSTED * step for host, step in zip(hosts, steps, strict=True))
    return Compared(cell, cell.batch * 1e6 / max(steps), cell.batch * 1e6 / min(steps), hosted, len(steps))
