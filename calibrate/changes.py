"""What-ifs about the measured machine: some of its values changed, its costs carried over by the rules of transfer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from sparda.calibrate.profile import Profile
from sparda.calibrate.transfer import as_what_if, carried
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import model_named


@dataclass(frozen=True, slots=True)
class MachineChange:
    """Values of the profile's machine to change; 0 leaves one as it is. Bandwidths in GB/s, as they are reached.

    ``link_h2d_gb_s`` is what copying thread blocks get of the link. Copy engines and, unless ``link_d2h_gb_s`` is given
    too, the other direction change with it. ``hbm_gib`` is the GPU's memory in GiB; ``clock`` the multiprocessors'
    clock over the measured one's; ``sm_read_gb_s`` what one multiprocessor reads of GPU memory, which otherwise goes
    with the clock.
    """

    sms: int = 0
    hbm_gb_s: float = 0.0
    hbm_gib: float = 0.0
    link_h2d_gb_s: float = 0.0
    link_d2h_gb_s: float = 0.0
    clock: float = 0.0
    sm_read_gb_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in self.given:
            if value < 0:
                raise SpardaError(f"machine.{name} is {value:g}; give a number above 0, or 0 to leave it as measured.")
        if self.sms > 1024 or self.clock > 10:
            raise SpardaError(
                f"machine.sms is {self.sms} and machine.clock {self.clock:g}; allowed are at most 1024 multiprocessors "
                "and at most 10 times the measured clock (clock is a ratio, not MHz)."
            )

    @property
    def given(self) -> list[tuple[str, float]]:
        """Names and values of what is changed."""
        return [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name)]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value:g}" for name, value in self.given)


def changed(base: Profile, change: MachineChange) -> Profile:
    """``base`` on a machine with these values: tier "what-if", its band that of the rules.

    Raises SpardaError where the link would be faster than the memory behind it.
    """
    if not change.given:
        return base
    m, clock = base.machine, change.clock or 1.0
    h2d = change.link_h2d_gb_s or m.link_h2d_gb_s
    ratio = h2d / m.link_h2d_gb_s
    target = replace(
        m,
        name=f"{m.name}, {change}",
        sms=change.sms or m.sms,
        hbm_gb_s=change.hbm_gb_s or m.hbm_gb_s,
        hbm_capacity_bytes=int(change.hbm_gib * 2**30) or m.hbm_capacity_bytes,
        link_h2d_gb_s=h2d,
        link_d2h_gb_s=change.link_d2h_gb_s or round(m.link_d2h_gb_s * ratio, 2),
        engine_h2d_gb_s=round(m.engine_h2d_gb_s * ratio, 2),
        sm_read_gb_s=change.sm_read_gb_s or round(m.sm_read_gb_s * clock, 1),
    )
    if target.link_h2d_gb_s >= target.hbm_gb_s:
        raise SpardaError(
            f"machine.link_h2d_gb_s is {target.link_h2d_gb_s:g} and the GPU's own memory gives {target.hbm_gb_s:g} "
            "GB/s; a link is slower than the memory behind it: check the units (GB/s, one direction)."
        )
    costs = carried(base.costs, target, model_named(base.model), clock)
    return as_what_if(base, f"{base.name}, {change}", costs, f"machine changed: {change}", base.judged.by_machine)
