"""GPUs as their datasheets describe them, with where each value was read. Nothing here was measured."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, read_toml, to_plain

MACHINES = Path(__file__).parent / "machines.toml"

_OTHER_VENDOR = re.compile(r"(^|[^a-z])(amd|instinct|radeon|mi\d{2,3}[a-z]?|gfx\d+|rx[ -]?\d{4})([^a-z]|$)")
"""Names of AMD's GPUs: the kernels are Triton's for CUDA, and no rule carries their costs over to another vendor."""


@dataclass(frozen=True, slots=True)
class Link:
    """What lies between a GPU and its host's memory. ``raw_gb_s`` is of one direction, before any protocol's share.

    ``round_trip_us``: of a read of host memory by the GPU; None where no source has it, and then it is taken as
    measured on the base.
    """

    about: str
    raw_gb_s: float
    sources: tuple[str, ...]
    name: str = ""
    round_trip_us: float | None = None

    def __post_init__(self) -> None:
        _positive(self, "raw_gb_s")
        if self.round_trip_us is not None:
            _positive(self, "round_trip_us")
        _sourced(self.sources)


@dataclass(frozen=True, slots=True)
class Datasheet:
    """A GPU by its datasheet. Bandwidths in GB/s (1e9 B/s), memories in KiB, MiB and GiB.

    ``hbm_gb_s`` and ``bf16_dense_tflops`` are peaks; ``hbm_gib`` is what the driver reports in total. ``variant`` says
    which of several products of the name this is.
    """

    name: str
    gpu: str
    variant: str
    sms: int
    boost_clock_mhz: int
    hbm_gb_s: float
    hbm_gib: float
    l2_mib: float
    shared_kib_per_sm: int
    bf16_dense_tflops: float
    compute_capability: str
    link: Link
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        _positive(
            self, "sms", "boost_clock_mhz", "hbm_gb_s", "hbm_gib", "l2_mib", "shared_kib_per_sm", "bf16_dense_tflops"
        )
        if not re.fullmatch(r"\d+\.\d", self.compute_capability):
            raise SpardaError(f"compute_capability is {self.compute_capability!r}; give it as CUDA does, as in '9.0'.")
        if self.link.raw_gb_s >= self.hbm_gb_s:
            raise SpardaError(
                f"link {self.link.name!r} has {self.link.raw_gb_s:g} GB/s, the GPU's own memory {self.hbm_gb_s:g}; a "
                "link is slower than the memory behind it: check the units (GB/s, one direction)."
            )
        _sourced(self.sources)

    @property
    def link_gb_s(self) -> float:
        """The link's raw GB/s, one direction."""
        return self.link.raw_gb_s

    @property
    def profile_name(self) -> str:
        """The name under which ``load_profile`` builds a profile of it."""
        return f"{self.name}.datasheet"


def _positive(sheet: Link | Datasheet, *names: str) -> None:
    for name in names:
        value = getattr(sheet, name)
        if value <= 0:
            raise SpardaError(f"{name} is {value:g}; give a number above 0.")


def _sourced(sources: tuple[str, ...]) -> None:
    if not sources or not all(s.strip() for s in sources):
        raise SpardaError("sources is empty; say where the values were read, or that they were not re-read.")


@dataclass(frozen=True, slots=True)
class _File:
    """The two tables of a machines file, before links are put in the machines' places."""

    links: Mapping[str, Mapping[str, object]]
    machines: Mapping[str, Mapping[str, object]]


def load_datasheets(path: Path = MACHINES) -> dict[str, Datasheet]:
    """The machines of a TOML file by name, in its order.

    Raises SpardaError, naming file and key, for an unknown or missing key, a wrong type, an impossible value, a link
    that the file does not describe, or a value without a source.
    """
    file = read(_File, read_toml(path), where=str(path))
    links = _links(file, path)
    sheets: dict[str, Datasheet] = {}
    for name, table in file.machines.items():
        where = f"{path}: machines.{name}"
        link = table.get("link")
        if not isinstance(link, str) or link not in links:
            raise SpardaError(f"{where}: key 'link' is {link!r}; links in this file: {', '.join(links)}.")
        plain = {**_unnamed(table, where), "name": name, "link": to_plain(links[link])}
        sheets[name] = read(Datasheet, plain, where=where)
    return sheets


def _unnamed(table: Mapping[str, object], where: str) -> dict[str, object]:
    """The table, refused where it names itself: its heading is its name."""
    if "name" in table:
        raise SpardaError(f"{where}: key 'name' is {table['name']!r}; the table's heading is its name: remove the key.")
    return dict(table)


def _links(file: _File, path: Path) -> dict[str, Link]:
    found: dict[str, Link] = {}
    for name, table in file.links.items():
        where = f"{path}: links.{name}"
        found[name] = read(Link, {**_unnamed(table, where), "name": name}, where=where)
    return found


@cache
def links() -> Mapping[str, Link]:
    """The shipped links by name, also those that none of the shipped machines has."""
    return _links(read(_File, read_toml(MACHINES), where=str(MACHINES)), MACHINES)


@cache
def datasheets() -> Mapping[str, Datasheet]:
    """The shipped datasheets by name."""
    return load_datasheets()


def datasheet_named(name: str) -> Datasheet:
    """The shipped datasheet of that name.

    Raises SpardaError with the known names where there is none; for an AMD GPU it says that these are out of scope.
    """
    sheet = datasheets().get(name)
    if sheet is None:
        refuse_other_vendor(name)
        known = list(datasheets())
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SpardaError(
            f"no datasheet {name!r}; {hint}Known machines: {', '.join(known)}. Another GPU's numbers are never used."
        )
    return sheet


def refuse_other_vendor(name: str) -> None:
    """Raises SpardaError where ``name`` is that of an AMD GPU."""
    if _OTHER_VENDOR.search(name.lower()):
        raise SpardaError(
            f"{name!r} is an AMD GPU, and these are out of scope: kernels and costs are of NVIDIA GPUs, and nothing "
            f"carries them over. Known machines: {', '.join(datasheets())}."
        )
