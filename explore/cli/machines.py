"""The machines whose profiles come with the package: measured ones, and those carried over by datasheet. No GPU."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING

from sparda.explore.cli.common import Output, add_json

if TYPE_CHECKING:
    from sparda.explore.machines import Entry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="one machine in full, by its name or its profile's")
    parser.add_argument("--sources", action="store_true", help="where each machine's values were read")
    add_json(parser)


def run(args: argparse.Namespace) -> Output:
    """List. Raises SpardaError for a name that no machine has."""
    from sparda.explore.machines import entries, entries_named

    if args.name:
        found = entries_named(args.name)
        text = "\n\n".join(_in_full(e) for e in found)
    else:
        found = entries()
        text = _table(found)
        if args.sources:
            text += "\n\n" + "\n\n".join(f"{e.profile}:\n{_sources(e)}" for e in found)
    return Output({"name": args.name, "machines": [e.to_dict() for e in found]}, text)


def _table(found: list[Entry]) -> str:
    from sparda.explore.text import columns, wrapped

    rows = [
        [e.machine, e.tier, str(e.sms), f"{e.hbm_gb_s:.0f}", e.link, f"{e.link_gb_s:.1f}", f"{e.hbm_gib:.1f}"]
        for e in found
    ]
    note = (
        "Bandwidths: as measured in the measured tier, peaks in the datasheet tier; of the link one direction. Give "
        "--profile MACHINE.TIER. Nothing of the datasheet tier was measured; --sources says where it was read."
    )
    headers = ["machine", "tier", "SMs", "HBM GB/s", "link", "GB/s", "GiB"]
    return columns(headers, rows, left=2) + "\n\n" + wrapped(note)


def _in_full(e: Entry) -> str:
    from sparda.explore.text import wrapped

    lines = [
        f"{e.profile} ({e.tier})",
        f"GPU: {e.gpu}, {e.sms} SMs",
        f"Memory: {e.hbm_gib:.1f} GiB, {e.hbm_gb_s:g} GB/s",
        f"Link: {e.link}, {e.link_gb_s:g} GB/s from the host",
    ]
    if s := e.sheet:
        round_trip = f"{s.link.round_trip_us:g} us" if s.link.round_trip_us else "as measured on the base"
        lines += [
            f"Link is: {s.link.about}; round trip {round_trip}",
            f"Variant: {s.variant}",
            f"Compute capability: {s.compute_capability}, boost clock {s.boost_clock_mhz} MHz",
            f"On the chip: L2 {s.l2_mib:g} MiB, shared memory {s.shared_kib_per_sm} KiB per SM",
            f"BF16 without sparsity: {s.bf16_dense_tflops:g} TFLOPS",
        ]
    return "\n".join(map(wrapped, [*lines, "Sources:"])) + f"\n{_sources(e)}"


def _sources(e: Entry) -> str:
    from sparda.explore.text import WIDTH

    # An address is to be copied: it stays whole even where it is too long for a line.
    lines = [
        textwrap.wrap(
            source,
            WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for source in e.sources
    ]
    return "\n".join("\n".join(part) for part in lines)
