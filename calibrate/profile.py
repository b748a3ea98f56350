"""A profile: a machine, its fitted costs, the errors they were held to, and where all that was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from sparda.calibrate.costs import CHUNK_BYTES, FittedCosts
from sparda.calibrate.datasheet import Datasheet, datasheet_named, datasheets, refuse_other_vendor
from sparda.calibrate.interval import Intervals
from sparda.calibrate.judged import UNJUDGED, ErrorBand, Judged
from sparda.calibrate.leave_one_out import Errors
from sparda.calibrate.store import Store
from sparda.engine.config import Config
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, read_json
from sparda.engine.plan import Plan
from sparda.sim.costs import Machine

SHIPPED = Path(__file__).parent / "profiles"
SCHEMA = 2

MEASURED, WHAT_IF, DATASHEET = "measured", "what-if", "datasheet"
"""Tiers: fitted to rows of the GPU itself; that with something changed; or carried over from the base by what a
datasheet prints."""

BASE = "h200-sxm.measured"
"""The shipped profile from which those of the datasheet tier are built."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A calibrated machine. ``tier`` is "measured" or "datasheet" and stands in every output."""

    name: str
    tier: str
    machine: Machine
    model: str
    """The model whose kernels were measured."""
    band: ErrorBand
    errors: Errors
    """Of the tables in ``costs``, kind by kind."""
    envelope: Mapping[str, tuple[float, float]]
    """Measured range of each axis: batch, context_tokens, top_k, miss_rate, prefetch_ctas..."""
    sessions: tuple[str, ...]
    costs: FittedCosts
    folder: Path
    judged: Judged = UNJUDGED
    """What else the measured steps and rows say about the predictions."""
    carried: tuple[str, ...] = ()
    """What was changed about it, of tier "what-if"; then ``band`` is that of the rules which carried the costs over."""

    @property
    def intervals(self) -> Intervals | None:
        """What tells the interval of a prediction; None where nothing was left to judge by."""
        left = self.judged.residuals
        return Intervals(self.costs, left) if left.layers else None

    def band_of(self, config: Config) -> ErrorBand:
        """Held-out errors of steps like that of ``config``; those that the host has work in are held by themselves."""
        return self.band if config.path in ("", "uva") or self.carried else self.judged.by_host

    def band_says(self, config: Config) -> str:
        """What a band is a percentile of, in words."""
        count = self.band_of(config).count
        if not self.carried:
            return f"the p90 error of {count} held-out steps"
        return f"the p90 error of the rules behind it ({'; '.join(self.carried)}), as far as they were tried"

    @property
    def label(self) -> str:
        return f"{self.name} ({self.tier})"

    @property
    def store(self) -> Store:
        return Store(self.folder)

    def outside(self, plan: Plan) -> list[str]:
        """Why a prediction of ``plan`` leaves the measured envelope; empty when it lies inside."""
        w, c = plan.workload, plan.config
        reasons = [f"costs carried over from {BASE} by datasheet"] if self.tier == DATASHEET else list(self.carried)
        if plan.shape.name != self.model:
            reasons.append(f"model {plan.shape.name}, measured {self.model}")
        values = {
            "batch": w.batch,
            "context_tokens": w.context_tokens,
            "miss_rate": w.miss_rate,
            "top_k": c.top_k,
            "lookahead": c.lookahead,
            "prefetch_ctas": c.prefetch_ctas,
            "prefetch_warps": c.prefetch_warps,
            "prefetch_stages": c.prefetch_stages,
        }
        for axis, value in values.items():
            low, high = self.envelope.get(axis, (value, value))
            if not low <= value <= high:
                reasons.append(f"{axis} {value:g}, measured {low:g} to {high:g}")
        # A KiB of every thread block's share is the system's.
        room, chunk = self.machine.shared_kib_per_sm - 1, CHUNK_BYTES // 1024
        # A pipeline has a chunk on its way per stage, all but one.
        needed = (c.prefetch_stages - 1) * chunk
        if self.machine.shared_kib_per_sm and needed > room and c.path == "uva":
            reasons.append(
                f"a copy of {c.prefetch_stages} stages needs {needed} KiB of shared memory, a thread block there has "
                f"{room}: give at most {room // chunk + 1}"
            )
        return reasons


def measured_names() -> list[str]:
    """Measured profiles that come with the package."""
    return sorted(p.parent.name for p in SHIPPED.glob("*/profile.json"))


def profile_names() -> list[str]:
    """Every name that ``load_profile`` knows: measured profiles, then those built from a datasheet."""
    return measured_names() + [sheet.profile_name for sheet in datasheets().values()]


def load_profile(name: str) -> Profile:
    """A shipped profile by name, or one in a folder by path; ``MACHINE.datasheet`` is built from ``BASE``.

    Raises SpardaError for an unknown GPU or a missing or damaged file: another GPU's numbers are never used.
    """
    folder = SHIPPED / name
    if not (folder / "profile.json").exists():
        folder = Path(name)
    if (folder / "profile.json").exists():
        return _stored(folder)
    machine = name.removesuffix(f".{DATASHEET}")
    if machine != name and Path(name).name == name:
        return _from_datasheet(datasheet_named(machine))
    raise _unknown(name)


def _from_datasheet(sheet: Datasheet) -> Profile:
    # Not above: carrying costs over is written in terms of profiles.
    from sparda.calibrate.transfer import transferred

    return transferred(_stored(SHIPPED / BASE), sheet)


def _unknown(name: str) -> SpardaError:
    if Path(name).name == name:
        refuse_other_vendor(name)
    known = ", ".join(profile_names()) or "none"
    sheet = datasheets().get(name.removesuffix(f".{MEASURED}"))
    built = f"That machine was not measured; what its datasheet gives is {sheet.profile_name}. " if sheet else ""
    return SpardaError(
        f"no profile {name!r}: it is neither shipped (known: {known}) nor a folder with a profile.json. {built}"
        "Measure this GPU with `sparda profile new FOLDER`; another GPU's numbers are never used."
    )


def _stored(folder: Path) -> Profile:
    """The profile in a folder's profile.json. Raises SpardaError where that is damaged."""
    path = folder / "profile.json"
    data = read_json(path)
    if data.get("schema") != SCHEMA:
        raise SpardaError(f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA}; calibrate again.")
    try:
        machine = read(Machine, cast(Mapping[str, object], data["machine"]), where=f"{path}: machine")
        band = read(ErrorBand, cast(Mapping[str, object], data["band"]), where=f"{path}: band")
        errors = read(Errors, cast(Mapping[str, object], data["errors"]), where=f"{path}: errors")
        envelope = {k: (float(v[0]), float(v[1])) for k, v in cast(dict[str, list[float]], data["envelope"]).items()}
        return Profile(
            name=str(data["name"]),
            tier=str(data["tier"]),
            machine=machine,
            model=str(data["model"]),
            band=band,
            errors=errors,
            envelope=envelope,
            sessions=tuple(cast(list[str], data["sessions"])),
            costs=FittedCosts.from_plain(machine, cast(dict[str, object], data["costs"]), where=f"{path}: costs"),
            folder=folder,
            judged=read(Judged, cast(Mapping[str, object], data["judged"]), where=f"{path}: judged"),
        )
    except KeyError as e:
        raise SpardaError(f"{path}: key {e} is missing; calibrate again with `sparda calibrate`.") from None
    except (LookupError, AttributeError, TypeError, ValueError) as e:
        raise SpardaError(f"{path} is damaged ({e}); calibrate again with `sparda calibrate`.") from None


def profile_json(profile: Profile) -> str:
    """The profile as the text of its profile.json."""
    from sparda.engine.loader import to_plain

    data = {
        "schema": SCHEMA,
        "name": profile.name,
        "tier": profile.tier,
        "machine": to_plain(profile.machine),
        "model": profile.model,
        "band": to_plain(profile.band),
        "errors": to_plain(profile.errors),
        "envelope": {k: list(v) for k, v in profile.envelope.items()},
        "sessions": list(profile.sessions),
        "costs": profile.costs.to_plain(),
        "judged": to_plain(profile.judged),
    }
    return json.dumps(data, indent=1) + "\n"
