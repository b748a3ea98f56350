"""Datasheets: read strictly, sourced value by value, plausible, and found by name; profiles built from them."""

from __future__ import annotations

import sys
import tomllib
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparda.calibrate.datasheet import (
    MACHINES,
    Datasheet,
    Link,
    datasheet_named,
    datasheets,
    load_datasheets,
    refuse_other_vendor,
)
from sparda.calibrate.profile import BASE, Profile, load_profile, measured_names, profile_names
from sparda.engine.errors import SpardaError
from sparda.engine.loader import read, to_plain

SHEETS = list(datasheets().values())
each_sheet = pytest.mark.parametrize("sheet", SHEETS, ids=lambda s: s.name)

LINK = '[links.wire]\nabout = "a wire"\nraw_gb_s = 50.0\nsources = ["a page: 50 GB/s"]\n'
GPU = """[machines.x1]
gpu = "NVIDIA X1"
variant = "the only one"
sms = 100
boost_clock_mhz = 1500
hbm_gb_s = 2000.0
hbm_gib = 80.0
l2_mib = 40.0
shared_kib_per_sm = 100
bf16_dense_tflops = 300.0
compute_capability = "9.0"
link = "wire"
sources = ["a page: all of it"]
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "machines.toml"
    path.write_text(text)
    return path


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> list[Datasheet]:
    """Carrying costs over, put aside: the base under another name; which datasheets it was asked for."""
    asked: list[Datasheet] = []

    def transferred(base: Profile, sheet: Datasheet) -> Profile:
        asked.append(sheet)
        machine = replace(base.machine, name=sheet.profile_name, gpu=sheet.gpu, sms=sheet.sms)
        return replace(base, name=sheet.profile_name, tier="datasheet", machine=machine)

    module: Any = types.ModuleType("sparda.calibrate.transfer")
    module.transferred = transferred
    monkeypatch.setitem(sys.modules, "sparda.calibrate.transfer", module)
    return asked


@each_sheet
def test_a_datasheet_survives_being_written_and_read(sheet: Datasheet) -> None:
    assert read(Datasheet, to_plain(sheet), where="again") == sheet


@each_sheet
def test_every_machine_and_link_says_where_it_was_read(sheet: Datasheet) -> None:
    for source in (*sheet.sources, *sheet.link.sources):
        # A page or document that was read, a machine of this file, or the admission that nothing was read.
        assert any(
            word in source for word in ("http", "MLPerf", "not re-read", "as of the", "shipped measured profile")
        )
        assert len(source) > 20


@each_sheet
def test_every_machine_is_plausible(sheet: Datasheet) -> None:
    assert sheet.hbm_gb_s > 5 * sheet.link_gb_s
    assert 16 <= sheet.hbm_gib <= 300
    assert 50 <= sheet.sms <= 200
    assert 1000 <= sheet.boost_clock_mhz <= 3000
    # A tensor core of these generations does 256 to 4096 multiply-adds in a clock of one SM.
    per_clock = sheet.bf16_dense_tflops * 1e12 / (sheet.sms * sheet.boost_clock_mhz * 1e6) / 2
    assert 200 <= per_clock <= 5000
    assert float(sheet.compute_capability) >= 8.0


def test_the_links_stand_in_the_order_of_their_generations() -> None:
    links = tomllib.loads(MACHINES.read_text())["links"]
    rates = [links[name]["raw_gb_s"] for name in ("pcie4-x16", "pcie5-x16", "pcie6-x16", "nvlink-c2c")]
    assert rates == sorted(rates)
    assert links["nvlink-c2c-half"]["raw_gb_s"] * 2 == links["nvlink-c2c"]["raw_gb_s"]


def test_a_later_product_of_a_line_is_not_slower() -> None:
    for earlier, later in (("a100-sxm", "h100-sxm"), ("h100-sxm", "h200-sxm"), ("h200-sxm", "b200"), ("b200", "gb200")):
        a, b = datasheet_named(earlier), datasheet_named(later)
        assert a.hbm_gb_s <= b.hbm_gb_s
        assert a.bf16_dense_tflops <= b.bf16_dense_tflops


def test_the_machines_that_were_asked_for_are_there() -> None:
    wanted = "h200-sxm h100-sxm h100-pcie a100-sxm a100-pcie l40s rtx-4090 rtx-5090 rtx-pro-6000 gh200 b200 gb200"
    assert set(wanted.split()) <= set(datasheets())


def test_a_file_of_ones_own_is_read_with_its_links(tmp_path: Path) -> None:
    sheets = load_datasheets(written(tmp_path, LINK + GPU))
    assert sheets["x1"].link == Link("a wire", 50.0, ("a page: 50 GB/s",), "wire")
    assert sheets["x1"].link_gb_s == 50.0
    assert sheets["x1"].profile_name == "x1.datasheet"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("sms = 100", "sm = 100", r"machines\.x1: unknown key 'sm'; did you mean 'sms'"),
        ("sms = 100\n", "", r"machines\.x1: key 'sms' is missing"),
        ("sms = 100", "sms = 0", r"machines\.x1: sms is 0; give a number above 0"),
        ("sms = 100", "sms = 100.5", r"machines\.x1: key 'sms' is 100\.5; an integer"),
        ("hbm_gb_s = 2000.0", 'hbm_gb_s = "2 TB/s"', r"key 'hbm_gb_s' is '2 TB/s'"),
        ("hbm_gb_s = 2000.0", "hbm_gb_s = 2.0", r"slower than the memory behind it: check the units"),
        ('capability = "9.0"', 'capability = "sm_90"', r"compute_capability is 'sm_90'"),
        ('link = "wire"', 'link = "string"', r"key 'link' is 'string'; links in this file: wire"),
        ('link = "wire"\n', "", r"key 'link' is None; links in this file: wire"),
        ('sources = ["a page: all of it"]', "sources = []", r"machines\.x1: sources is empty"),
        ('sources = ["a page: 50 GB/s"]', 'sources = [" "]', r"links\.wire: sources is empty"),
        ("raw_gb_s = 50.0", "raw_gb_s = -1.0", r"links\.wire: raw_gb_s is -1"),
        ("raw_gb_s = 50.0", "raw_gb_s = 50.0\nround_trip_us = 0.0", r"links\.wire: round_trip_us is 0"),
        ('gpu = "NVIDIA X1"', 'gpu = "NVIDIA X1"\nname = "x2"', r"machines\.x1: key 'name' is 'x2'"),
        ("[machines.x1]", "[machine.x1]", r"unknown key 'machine'; did you mean 'machines'"),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_refused_by_key(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    assert old in LINK + GPU
    with pytest.raises(SpardaError, match=r"machines\.toml: .*" + complaint):
        load_datasheets(written(tmp_path, (LINK + GPU).replace(old, new)))


def test_an_unknown_gpu_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(SpardaError, match=r"no datasheet 'h100'; did you mean 'h100-sxm'\? Known machines: h200-sxm, "):
        datasheet_named("h100")


@pytest.mark.parametrize("name", ["mi300x", "MI250", "amd-instinct-mi355x", "Radeon RX 7900", "gfx942"])
def test_an_amd_gpu_is_out_of_scope_and_the_error_says_so(name: str) -> None:
    with pytest.raises(SpardaError, match="is an AMD GPU, and these are out of scope"):
        datasheet_named(name)
    for profile in (name, f"{name}.datasheet"):
        with pytest.raises(SpardaError, match="is an AMD GPU, and these are out of scope"):
            load_profile(profile)


@pytest.mark.parametrize("name", ["rtx-4090", "rtx-pro-6000", "l40s", "mini-9"])
def test_no_other_name_is_taken_for_an_amd_gpu(name: str) -> None:
    refuse_other_vendor(name)


def test_both_tiers_are_listed_measured_ones_first() -> None:
    names = profile_names()
    assert names[: len(measured_names())] == measured_names()
    assert names[len(measured_names()) :] == [f"{name}.datasheet" for name in datasheets()]
    assert BASE in measured_names()


def test_a_profile_of_a_datasheet_is_carried_over_from_the_base(transfer: list[Datasheet]) -> None:
    profile = load_profile("h100-sxm.datasheet")
    assert (profile.name, profile.tier, profile.machine.gpu) == ("h100-sxm.datasheet", "datasheet", "NVIDIA H100 SXM5")
    assert profile.costs.fitted == load_profile(BASE).costs.fitted
    assert transfer == [datasheet_named("h100-sxm")]


def test_a_folder_of_that_name_is_read_and_nothing_built(
    transfer: list[Datasheet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "h100-sxm.datasheet"
    folder.mkdir()
    (folder / "profile.json").write_text('{"schema": 0}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpardaError, match=r"schema 0"):
        load_profile("h100-sxm.datasheet")
    assert transfer == []


def test_a_machine_that_was_not_measured_points_to_its_datasheet() -> None:
    for name in ("h100-sxm", "h100-sxm.measured"):
        with pytest.raises(SpardaError, match=r"was not measured; what its datasheet gives is h100-sxm\.datasheet"):
            load_profile(name)


def test_a_datasheet_of_no_known_machine_names_those_there_are() -> None:
    with pytest.raises(SpardaError, match=r"no datasheet 'h900-sxm'; .*Known machines: "):
        load_profile("h900-sxm.datasheet")
