"""Costs carried over from a measured GPU to one that was not: explicit rules, and what they rest on.

The rules are the same for a datasheet and for a measured GPU with part of it taken away, which is how they were tried:
see ``calibrate.handicap``.

1. Of a kernel's time, what its bytes take at the measured GPU's HBM rate changes with the HBM's; the rest (launch,
   latency, the ends of pipelines) changes with the clock alone. No kernel of decoding is bound by arithmetic.
2. HBM gives the measured share of its datasheet rate, and no more than the multiprocessors together can read.
3. The link gives thread blocks the measured share of its raw rate; one CTA moves what it moves on the measured link
   (bytes under way over the round trip), so few CTAs may not fill a wider link. Of a copy engine's time, what its
   bytes take at the engine's own rate changes with the link, and the rest stays.
4. What copies and compute do to each other stays as it is, in shares, for as many CTAs.
5. Kernels are cut for the target's multiprocessors, and take as many turns as that makes (``calibrate.waves``); what
   scoring takes beyond its bytes' part is work that they all share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sparda.calibrate.costs import (
    ATTENTIONS,
    Beside,
    BlockCurve,
    CtaCurve,
    Fitted,
    FittedCosts,
    KernelCost,
    PathCosts,
    at_depth,
)
from sparda.calibrate.datasheet import Datasheet, datasheets, links
from sparda.calibrate.judged import NO_BAND, UNJUDGED, ErrorBand
from sparda.calibrate.leave_one_out import Errors
from sparda.calibrate.profile import DATASHEET, WHAT_IF, Profile
from sparda.calibrate.waves import LINEARS, attention_turns, linear_ns
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import ModelShape, SparseSpec, model_named
from sparda.sim.costs import Machine

SCORES = ("score", "headscore", "partial_score")
"""Kinds whose time beyond their bytes' is work of all multiprocessors alike."""

ENGINES = ("upload", "blocks", "batch")
"""Kinds of copies that an engine makes."""

RULES = (
    "of a kernel's time, the bytes' part changes with HBM and the rest with the clock",
    "HBM and link give the share of their datasheet rates that was measured on the base",
    "a copying thread block moves what it moves on the base; compute and copies slow each other as there",
    "of a copy engine's time, the bytes' part changes with the link; what the host does takes it as long",
    "linears and attention take as many turns as the target's multiprocessors make of them; scoring is shared by all",
)


def carried(costs: FittedCosts, target: Machine, shape: ModelShape, clock: float = 1.0) -> FittedCosts:
    """``costs`` of decoding ``shape`` on ``target``. ``clock``: the target's over that of the measured GPU."""
    machine, fitted = costs.machine, costs.fitted
    target = replace(target, hbm_gb_s=hbm_of(target))
    kernels = {kind: _kernel(kind, cost, machine, target, shape, clock) for kind, cost in fitted.kernels.items()}
    transfer = tuple(_on_link(curve, machine, target) for curve in fitted.transfer)
    made = Fitted(
        kernels=kernels,
        transfer=transfer,
        beside=_in_shares(fitted.beside, fitted.transfer, transfer),
        in_order=_in_shares({"": fitted.in_order}, fitted.transfer, transfer)[""],
        start_ns=fitted.start_ns,
        lanes=tuple((batch, ns / clock) for batch, ns in fitted.lanes),
        launches=tuple((batch, ns / clock) for batch, ns in fitted.launches),
        step_ns=fitted.step_ns,
        paths=fitted.paths and _by_engine(fitted.paths, machine, target, shape.block_bytes(SparseSpec())),
    )
    return FittedCosts(target, made)


def hbm_of(machine: Machine) -> float:
    """GB/s that its multiprocessors can read together, at most what its memory gives."""
    if not machine.sm_read_gb_s:
        return machine.hbm_gb_s
    return min(machine.hbm_gb_s, machine.sms * machine.sm_read_gb_s)


def _kernel(
    kind: str, cost: KernelCost, machine: Machine, target: Machine, shape: ModelShape, clock: float
) -> KernelCost:
    def ns_at(batch: float, second: float, ns: float, moved: float) -> float:
        by_bytes = min(ns, moved / machine.hbm_gb_s)
        scaled = by_bytes * machine.hbm_gb_s / target.hbm_gb_s + (ns - by_bytes) / clock
        if kind in LINEARS:
            # The bytes' part is in these turns.
            turns = [linear_ns(kind, int(batch), shape, m) for m in (target, machine)]
            even = [moved / m.hbm_gb_s for m in (target, machine)]
            return scaled + (turns[0] - even[0]) - (turns[1] - even[1])
        if kind in ATTENTIONS:
            turns_then, turns_now = (attention_turns(int(batch), int(second), shape, m.sms) for m in (machine, target))
            return max(scaled, ns / clock * turns_now / turns_then)
        if kind in SCORES:
            return scaled + (ns - by_bytes) / clock * (machine.sms / target.sms - 1)
        return scaled

    def line(batch: float, ns: tuple[float, ...], moved: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(ns_at(batch, *at) for at in zip(cost.seconds, ns, moved, strict=True))

    table = zip(cost.batches, cost.ns, cost.hbm_bytes, strict=True)
    return replace(cost, ns=tuple(line(*at) for at in table))


def _on_link(curve: CtaCurve, machine: Machine, target: Machine) -> CtaCurve:
    """A copy's rates on the target's link: in proportion to the CTAs until that is full."""
    per_cta = max(value / ctas for ctas, value in zip(curve.ctas, curve.values, strict=True))
    wider = target.link_h2d_gb_s > machine.link_h2d_gb_s

    def rate(ctas: int, value: float) -> float:
        return min(target.link_h2d_gb_s, ctas * per_cta if wider else value)

    return replace(curve, values=tuple(map(rate, curve.ctas, curve.values)))


def _by_engine(paths: PathCosts, machine: Machine, target: Machine, block_bytes: int) -> PathCosts:
    """Copy engines on the target's link; as they were where an engine's own rate is not known."""
    old, new = machine.engine_h2d_gb_s, target.engine_h2d_gb_s
    if not old or not new:
        return paths

    def curve(c: BlockCurve) -> BlockCurve:
        parts = [min(ns, blocks * block_bytes / old) for blocks, ns in zip(c.blocks, c.ns, strict=True)]
        return replace(c, ns=tuple(ns + part * (old / new - 1) for ns, part in zip(c.ns, parts, strict=True)))

    by_blocks = {kind: curve(c) if kind in ENGINES else c for kind, c in paths.by_blocks.items()}
    return replace(paths, by_blocks=by_blocks)


def _in_shares(
    beside: Mapping[str, tuple[Beside, ...]], old: tuple[CtaCurve, ...], new: tuple[CtaCurve, ...]
) -> dict[str, tuple[Beside, ...]]:
    """The copy's rates beside each kind: the same share of what it moves alone."""

    def curve(c: CtaCurve) -> CtaCurve:
        shares = [min(1.0, v / at_depth(old, c.stages, n)) for n, v in zip(c.ctas, c.values, strict=True)]
        return replace(c, values=tuple(s * at_depth(new, c.stages, n) for n, s in zip(c.ctas, shares, strict=True)))

    return {kind: tuple(replace(b, gb_s=tuple(map(curve, b.gb_s))) for b in rows) for kind, rows in beside.items()}


def transferred(base: Profile, sheet: Datasheet) -> Profile:
    """A profile of the datasheet's machine, of tier "datasheet": ``base`` carried over. Its error is not known.

    Raises SpardaError where the base has no datasheet to compare to.
    """
    known = _described(base)
    measured, clock = base.machine, sheet.boost_clock_mhz / known.boost_clock_mhz
    target = replace(
        _linked(measured, sheet.link_gb_s / known.link_gb_s),
        name=sheet.profile_name,
        gpu=sheet.gpu,
        sms=sheet.sms,
        hbm_gb_s=round(measured.hbm_gb_s * sheet.hbm_gb_s / known.hbm_gb_s, 1),
        hbm_capacity_bytes=int(sheet.hbm_gib * 2**30),
        sm_read_gb_s=round(measured.sm_read_gb_s * clock, 1),
        shared_kib_per_sm=sheet.shared_kib_per_sm,
    )
    return _unmeasured(base, carried(base.costs, target, model_named(base.model), clock))


def _unmeasured(base: Profile, costs: FittedCosts) -> Profile:
    """A profile of costs carried over from ``base``, without anything that was found out about the base itself."""
    return replace(
        base,
        name=costs.machine.name,
        tier=DATASHEET,
        machine=costs.machine,
        band=NO_BAND,
        errors=Errors({}, {}, ()),
        sessions=(),
        # Rows in the base's folder are of the base: here they would confirm what was never run.
        folder=base.folder.parent / costs.machine.name,
        judged=UNJUDGED,
        costs=costs,
    )


def as_what_if(base: Profile, name: str, costs: FittedCosts, about: str, band: ErrorBand) -> Profile:
    """``base`` with something about it changed: ``about`` says what, ``band`` is that of the rule that changed it.

    The bands of several changes add up; with one that is not known, nothing is known of the error.
    """
    if base.carried and not base.band.count:
        band = NO_BAND
    elif base.carried and band.count:
        band = replace(band, count=min(band.count, base.band.count), p90=band.p90 + base.band.p90)
    made = _unmeasured(base, costs)
    return replace(
        made,
        name=name,
        tier=DATASHEET if base.tier == DATASHEET else WHAT_IF,
        band=NO_BAND if base.tier == DATASHEET else band,
        carried=(*base.carried, about),
        folder=base.folder.parent / f"{base.folder.name} ({WHAT_IF})",
        # Carried over once more, a machine and a shape still have the rules' own errors.
        judged=replace(UNJUDGED, by_machine=base.judged.by_machine, by_shape=base.judged.by_shape),
    )


def on_link(base: Profile, name: str) -> Profile:
    """``base`` on another link of machines.toml, by rule 3: a what-if, its band that of the rules.

    Raises SpardaError for an unknown link, or where the base's own is not known.
    """
    wanted = links().get(name)
    if wanted is None:
        raise SpardaError(f"link is {name!r}; known links: {', '.join(links())}.")
    target = _linked(base.machine, wanted.raw_gb_s / _described(base).link_gb_s)
    target = replace(target, name=f"{base.name}, {name}")
    costs = carried(base.costs, target, model_named(base.model))
    return as_what_if(base, target.name, costs, f"on link {name}", base.judged.by_machine)


def _described(base: Profile) -> Datasheet:
    """The datasheet of a profile's machine. Raises SpardaError where it has none."""
    sheet = datasheets().get(base.name.rpartition(".")[0])
    if sheet is None:
        raise SpardaError(
            f"{base.name} has no datasheet in machines.toml, so no share of its rates can be carried over; add one."
        )
    return sheet


def _linked(machine: Machine, ratio: float) -> Machine:
    """``machine`` on a link of ``ratio`` times the raw rate."""
    return replace(
        machine,
        link_h2d_gb_s=round(machine.link_h2d_gb_s * ratio, 2),
        link_d2h_gb_s=round(machine.link_d2h_gb_s * ratio, 2),
        engine_h2d_gb_s=round(machine.engine_h2d_gb_s * ratio, 2),
    )
