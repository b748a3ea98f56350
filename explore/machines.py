"""Every machine that a profile can be had of: measured ones and those of datasheets, in one list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparda.calibrate.datasheet import Datasheet, datasheet_named, datasheets
from sparda.calibrate.profile import DATASHEET, MEASURED, load_profile, measured_names
from sparda.engine.loader import to_plain
from sparda.explore.text import GIB, count


@dataclass(frozen=True, slots=True)
class Entry:
    """One machine in one tier. Bandwidths in GB/s: of the measured tier as measured, of the other peaks.

    ``profile``: the name to give as --profile. ``link_gb_s``: from host to device. ``sheet``: None where the machine
    is measured only.
    """

    profile: str
    machine: str
    tier: str
    gpu: str
    sms: int
    hbm_gb_s: float
    hbm_gib: float
    link: str
    link_gb_s: float
    sources: tuple[str, ...]
    sheet: Datasheet | None = None

    def to_dict(self) -> dict[str, object]:
        return to_plain(self)


def entries() -> list[Entry]:
    """Measured machines first, then datasheets in the order of their file."""
    return [*_measured(), *map(_of_sheet, datasheets().values())]


def entries_named(name: str) -> list[Entry]:
    """The tiers of a machine, or the one that ``name`` as a profile's name means.

    Raises SpardaError with the known names where there is none.
    """
    found = [e for e in entries() if name in (e.profile, e.machine)]
    # What is left is no machine at all; the error that says which there are is the datasheets'.
    return found or [_of_sheet(datasheet_named(name.removesuffix(f".{DATASHEET}").removesuffix(f".{MEASURED}")))]


def _measured() -> Iterator[Entry]:
    for name in measured_names():
        profile = load_profile(name)
        machine = name.removesuffix(f".{MEASURED}")
        sheet = datasheets().get(machine)
        sessions = count(len(profile.sessions), "session")
        yield Entry(
            profile=name,
            machine=machine,
            tier=profile.tier,
            gpu=profile.machine.gpu,
            sms=profile.machine.sms,
            hbm_gb_s=profile.machine.hbm_gb_s,
            hbm_gib=profile.machine.hbm_capacity_bytes / GIB,
            link=sheet.link.name if sheet else "-",
            link_gb_s=profile.machine.link_h2d_gb_s,
            sources=(f"Measured on this GPU in {sessions}; rows beside its profile.json",),
        )


def _of_sheet(sheet: Datasheet) -> Entry:
    return Entry(
        profile=sheet.profile_name,
        machine=sheet.name,
        tier=DATASHEET,
        gpu=sheet.gpu,
        sms=sheet.sms,
        hbm_gb_s=sheet.hbm_gb_s,
        hbm_gib=sheet.hbm_gib,
        link=sheet.link.name,
        link_gb_s=sheet.link_gb_s,
        sources=(*sheet.sources, *(f"Link {sheet.link.name}: {source}" for source in sheet.link.sources)),
        sheet=sheet,
    )
