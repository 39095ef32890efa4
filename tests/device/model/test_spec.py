"""Specs of devices: what a file may say, and what is said of one that may not."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from espnx import errors
from espnx.device.model.reader import CONFIDENCES, Figure
from espnx.device.model.spec import (
    Accelerator,
    DeviceSpec,
    load_preset,
    load_spec,
    parse_spec,
    presets,
)
from espnx.device.model.spec_file import SIZE_MAX_BYTES
from espnx.device.model.units import QUANTITIES

LEAST = """\
schema_version: 1
name: drive
title: a drive
flash:
  read_bandwidth: {value: 3.0, unit: GB/s, source: a test, confidence: assumed}
links:
  device: {value: 4, unit: GB/s, source: a test, confidence: assumed}
"""
RANGED = LEAST.replace("schema_version: 1", "schema_version: 2").replace(
    "value: 3.0", "value: 3.0, low: 2, high: 4"
)
FIGURE = "{value: 3.0, unit: GB/s, source: a test, confidence: assumed}"
ATTENDS = """\
accelerator:
  verbs: [attend]
  rates: {1: {value: 11.9, unit: GFLOPS, source: a test, confidence: paper}}
  block_tokens: {value: 128, unit: "1", source: a test, confidence: paper}
  head_dim: {value: 128, unit: "1", source: a test, confidence: paper}
  pad_tokens: {value: 32, unit: "1", source: a test, confidence: paper}
  mask_value: {value: -1e4, unit: "1", source: a test, confidence: paper}
"""


def parsed(text: str) -> DeviceSpec:
    return parse_spec(text.encode(), "drive.yaml")


def test_a_figure_with_a_range() -> None:
    figure = parsed(RANGED).flash.read_bandwidth
    assert (figure.low, figure.value, figure.high) == (2e9, 3e9, 4e9)
    assert str(figure) == "3 (2 to 4) GB/s"
    without = parsed(LEAST).flash.read_bandwidth
    assert (without.low, without.high) == (None, None)


def figures(of: Any, at: str = "") -> dict[str, Figure]:
    """All of a spec, by where they stand."""
    if isinstance(of, Figure):
        return {at: of}
    if is_dataclass(of):
        of = {each.name: getattr(of, each.name) for each in fields(of)}
    if not hasattr(of, "items"):
        return {}
    return {
        key: figure
        for name, each in of.items()
        for key, figure in figures(each, f"{at}.{name}".lstrip(".")).items()
    }


def test_the_least() -> None:
    spec = parsed(LEAST)
    assert spec.flash.read_bandwidth == Figure(3e9, 3.0, "GB/s", "a test", "assumed")
    assert (
        spec.accelerator,
        spec.capacity,
        spec.memory.size,
        spec.power.device,
        spec.price.hour,
    ) == (None,) * 5
    assert not spec.has("attend")
    assert str(spec.flash.read_bandwidth) == "3 GB/s"


def test_an_accelerator() -> None:
    spec = parsed(LEAST + ATTENDS)
    assert spec.has("attend")
    assert not spec.has("search")
    assert spec.accelerator is not None
    assert spec.accelerator.max_group == 1
    assert spec.accelerator.flops_per_s(1) == 11.9e9
    assert spec.accelerator.mask_value is not None
    assert spec.accelerator.mask_value.value == -1e4
    for group in (0, 2):
        with pytest.raises(errors.InvalidInputError, match="1 to 1"):
            spec.accelerator.flops_per_s(group)


def test_what_is_null_is_not_known() -> None:
    assert parsed(LEAST + "capacity: null\naccelerator: ~\npower:\n").capacity is None


@pytest.mark.parametrize(
    ("quantity", "number", "unit", "value"),
    [
        ("rate", 20, "Gbps", 2.5e9),
        ("rate", 2000, "MT/s", 2e9),
        ("rate", 1, "GiB/s", 2**30),
        ("rate", 8, "Gb/s", 1e9),
        ("size", 4, "GiB", 2**32),
        ("size", 3.84, "TB", 3.84e12),
        ("time", 85, "us", 85e-6),
        ("compute", 11.9, "GFLOPS", 11.9e9),
        ("requests", 540, "KIOPS", 540_000),
        ("frequency", 296.05, "MHz", 296.05e6),
        ("power", 1130, "mW", 1.13),
        ("energy of a bit", 1.93, "pJ/bit", 1.93e-12),
        ("price", 2400, "$", 2400),
        ("endurance", 7.008, "PBW", 7.008e15),
    ],
)
def test_units(quantity: str, number: float, unit: str, value: float) -> None:
    assert number * QUANTITIES[quantity][unit] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("name", presets())
def test_presets(name: str) -> None:
    """Each is named as its file; a figure says where it is from; a path to its file gives the
    same."""
    spec = load_spec(name)
    assert spec.name == name
    found = figures(spec)
    assert found
    assert all(each.source.strip() and each.confidence in CONFIDENCES for each in found.values())
    folder = Path(sys.modules[DeviceSpec.__module__].__file__ or "").parent / "presets"
    assert load_spec(folder / f"{name}.yaml") == spec == load_spec(str(folder / f"{name}.yaml"))


def test_presets_are_these() -> None:
    assert set(presets()) == {
        "smartssd",
        "cosmos-conventional",
        "cosmos-sync-pe",
        "cosmos-async-pe",
        "ragx",
        "hilos-isp",
        "pm9a3",
        "pm983",
        "970-evo",
        "990-pro",
        "cd8p",
        "cpu-dram",
    }


def test_figures_of_papers() -> None:
    """As HILOS, RAGX and the thesis print them; and what one computes from them agrees with what
    they say."""
    smart = load_preset("smartssd")
    assert isinstance(smart.accelerator, Accelerator)
    assert {group: rate.value for group, rate in smart.accelerator.rates.items()} == {
        1: 11.9e9,
        4: 46.8e9,
        5: 56.3e9,
    }
    assert {group: watts.value for group, watts in smart.power.accelerator.items()} == {
        1: 11.25,
        4: 15.39,
        5: 16.08,
    }
    assert smart.accelerator.flops_per_s(2) == pytest.approx(23.4e9)
    found = figures(smart)
    assert found["memory.bandwidth"].value * 4 == 52e9
    assert found["endurance"].value == pytest.approx(3.84e12 * 5 * 365)
    isp = figures(load_preset("hilos-isp"))
    assert (
        isp["flash.channels"].value * isp["flash.channel_bandwidth"].value
        == isp["flash.read_bandwidth"].value
        == 16e9
    )
    cosmos = load_preset("cosmos-async-pe")
    assert cosmos.flash.read_bandwidth.value / cosmos.links.device.value == pytest.approx(
        4, rel=0.01
    )
    for kind in ("sync", "async"):
        element = load_preset(f"cosmos-{kind}-pe").accelerator
        assert element is not None
        assert element.set_up == f"{kind}hronous"
    ragx = load_preset("ragx")
    assert ragx.flash.read_bandwidth.value == 2.5e9
    assert "20 Gbps" in ragx.flash.read_bandwidth.source
    lanes = {"smartssd": (8, 4), "pm9a3": (16, 4), "cd8p": (32, 4)}
    for name, (gigatransfers, n_lanes) in lanes.items():
        assert load_preset(name).links.device.value == pytest.approx(
            gigatransfers * n_lanes * 1e9 / 8 * 128 / 130, rel=1e-3
        )


def test_nothing_of_torch_is_imported() -> None:
    code = (
        "import sys, espnx.device.model.spec as it; it.load_preset('smartssd'); print([x for x in "
        "('torch', 'numpy') if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_a_name_that_is_none() -> None:
    with pytest.raises(errors.InvalidInputError, match="did you mean smartssd") as raised:
        load_spec("smart-ssd")
    assert "pm983" in str(raised.value)


WRONG = {
    "misspelt key": (
        LEAST.replace("read_bandwidth", "read_bandwith"),
        r"flash\.read_bandwith, line 5.*did you mean read_bandwidth",
    ),
    "unknown key": (LEAST + "colour: red\n", r"no such field: colour, line 8"),
    "unknown part": (
        LEAST.replace("source:", "sauce:"),
        r"no such field: flash\.read_bandwidth\.sauce",
    ),
    "missing section": (LEAST.partition("links")[0], r"lacks a field: links"),
    "missing field": (LEAST.replace("  device:", "  uplink:"), r"lacks a field: links\.device"),
    "null field": (LEAST.replace("  device:", "  device: null #"), r"lacks a field: links\.device"),
    "missing value": (LEAST.replace("value: 4, ", ""), r"lacks a field: links\.device\.value"),
    "missing unit": (
        LEAST.replace(", unit: GB/s", "", 1),
        r"lacks a field: flash\.read_bandwidth\.unit",
    ),
    "missing source": (
        LEAST.replace(", source: a test", "", 1),
        r"lacks a field: flash\.read_bandwidth\.source",
    ),
    "missing confidence": (
        LEAST.replace(", confidence: assumed", "", 1),
        r"lacks a field: flash\.read_bandwidth\.confidence",
    ),
    "empty source": (LEAST.replace("a test", "' '", 1), r"flash\.read_bandwidth\.source"),
    "misspelt unit": (
        LEAST.replace("GB/s", "GBs", 1),
        r"unit, line 5.*got 'GBs'.*did you mean GB/s",
    ),
    "unit of another kind": (LEAST.replace("GB/s", "GFLOPS", 1), r"flash\.read_bandwidth\.unit"),
    "unit of a time": (LEAST.replace("GB/s", "us", 1), r"flash\.read_bandwidth\.unit"),
    "unknown confidence": (
        LEAST.replace("assumed", "certain", 1),
        r"confidence.*expected measured, datasheet, paper, derived",
    ),
    "zero": (
        LEAST.replace("3.0", "0", 1),
        r"out of range: flash\.read_bandwidth\.value, line 5.*got 0 GB/s.*above 0",
    ),
    "negative": (LEAST.replace("3.0", "-3", 1), r"got -3 GB/s.*above 0"),
    "NaN": (LEAST.replace("3.0", ".nan", 1), r"no number: flash\.read_bandwidth\.value.*'\.nan'"),
    "nan": (LEAST.replace("3.0", "nan", 1), r"no number"),
    "infinite": (LEAST.replace("3.0", "-.inf", 1), r"no number"),
    "too large": (LEAST.replace("3.0", "1e300", 1), r"out of range"),
    "beyond numbers": (LEAST.replace("3.0", "1e999", 1), r"no number"),
    "of too many digits": (LEAST.replace("3.0", "9" * 5000, 1), r"no number"),
    "too small": (LEAST.replace("3.0", "1e-300", 1), r"out of range"),
    "text for a number": (LEAST.replace("3.0", "fast", 1), r"no number.*'fast'"),
    "truth for a number": (LEAST.replace("3.0", "yes", 1), r"no number.*'yes'"),
    "base sixty": (LEAST.replace("3.0", "1:30", 1), r"no number"),
    "a date": (LEAST.replace("3.0", "2020-01-01", 1), r"no plain kind"),
    "list for a number": (LEAST.replace("3.0", "[3]", 1), r"no number.*a list"),
    "number for a figure": (
        LEAST.replace(FIGURE, "3.0", 1),
        r"flash\.read_bandwidth.*expected a mapping",
    ),
    "list for a section": (
        LEAST.replace("flash:\n  read_bandwidth", "flash:\n  - read_bandwidth", 1),
        r"flash.*expected a mapping",
    ),
    "a name that is none": (LEAST.replace("drive", "../drive", 1), r"a name that is none: name"),
    "a title that is none": (
        LEAST.replace("a drive", '"\\e[31m"', 1),
        r"a text that is none: title",
    ),
    "a list for a title": (LEAST.replace("a drive", "[a]", 1), r"title.*expected text"),
    "a key twice": (LEAST + "title: again\n", r"a key stands twice: title, line 8"),
    "a deep key twice": (
        LEAST.replace("value: 4", "value: 4, value: 5"),
        r"a key stands twice: links\.device\.value",
    ),
    "a version in quotes": (
        LEAST.replace("schema_version: 1", 'schema_version: "1"'),
        r"another version: schema_version, line 1.*got '1'",
    ),
    "a number in quotes": (
        LEAST.replace("3.0", '"3.0"'),
        r"no number: flash\.read_bandwidth\.value, line 5.*got '3.0",
    ),
    "another version": (
        LEAST.replace("schema_version: 1", "schema_version: 3"),
        r"another version: schema_version, line 1.*got '3'; expected 1 or 2",
    ),
    "a range in version 1": (
        LEAST.replace("value: 3.0", "value: 3.0, low: 2, high: 4"),
        r"no such field: flash\.read_bandwidth\.low",
    ),
    "half a range": (RANGED.replace(", high: 4", ""), r"a range that is none"),
    "a range beside its value": (
        RANGED.replace("low: 2", "low: 3.5"),
        r"a range that is none: flash\.read_bandwidth, line 5",
    ),
    "a range upside down": (RANGED.replace("high: 4", "high: 2.5"), r"a range that is none"),
    "a range from 0": (RANGED.replace("low: 2", "low: 0"), r"out of range"),
    "no version": (LEAST.partition("\n")[2], r"another version.*got nothing"),
    "a tag": (
        LEAST.replace("a drive", "!!python/object/apply:os.getpid []"),
        r"reference or a tag",
    ),
    "a plain tag": (LEAST.replace("a drive", "!!str drive"), r"reference or a tag"),
    "an alias": (LEAST.replace("title: a drive", "title: &a [*a]"), r"reference or a tag"),
    "a merge": (LEAST + "power:\n  <<: {device: null}\n", r"a key is no name"),
    "a list as a key": (LEAST + "? [1]\n: 2\n", r"a key is no name"),
    "a directive": ("%YAML 1.1\n---\n" + LEAST, r"reference or a tag"),
    "two documents": (LEAST + "---\n" + LEAST, r"no YAML"),
    "no YAML": ("name: [", r"no YAML"),
    "a tab": ("name:\n\t- 1", r"no YAML"),
    "a list": ("- 1", r"no mapping"),
    "a text": ("hello", r"no mapping"),
    "nothing": ("", r"no mapping.*got nothing"),
    "deep": ("[" * 30_000, r"nested too deeply"),
    "deep and closed": ("a: " + "[" * 3000 + "]" * 3000, r"nested too deeply"),
    "deep lists": ("a:\n" + "- " * 3000 + "1", r"nested too deeply"),
    "deep mappings": ("{a: " * 3000 + "1" + "}" * 3000, r"nested too deeply"),
    "control characters": ("name: \x00", r"no YAML"),
    "no verbs": (LEAST + "accelerator: {verbs: []}\n", r"accelerator\.verbs.*a list of attend"),
    "a verb that is none": (
        LEAST + "accelerator: {verbs: [attent]}\n",
        r"accelerator\.verbs\.0.*did you mean attend",
    ),
    "a verb twice": (
        LEAST + "accelerator: {verbs: [search, search]}\n",
        r"a word stands twice: accelerator\.verbs",
    ),
    "verbs as text": (LEAST + "accelerator: {verbs: attend}\n", r"accelerator\.verbs.*a list"),
    "a set-up that is none": (
        LEAST + "accelerator: {verbs: [search], set_up: async}\n",
        r"did you mean asynchronous|accelerator\.set_up",
    ),
    "attends without a block": (
        LEAST + ATTENDS.replace("block_tokens", "units"),
        r"lacks a field: accelerator\.block_tokens",
    ),
    "attends without kernels": (
        LEAST + ATTENDS.replace("{1: {", "{} #"),
        r"lacks a field: accelerator\.rates",
    ),
    "no group": (
        LEAST + ATTENDS.replace("rates: {1:", "rates: {0:"),
        r"a group that is none: accelerator\.rates\.0",
    ),
    "half a token": (
        LEAST + ATTENDS.replace("value: 128", "value: 128.5", 1),
        r"block_tokens\.value.*a whole number",
    ),
    "a mask above zero": (LEAST + ATTENDS.replace("-1e4", "1e4"), r"mask_value\.value.*below 0"),
    "a port of how many": (
        LEAST.replace("links:", f"links:\n  switch_port: {FIGURE}"),
        r"lacks a field: links\.devices_per_port",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_specs_that_are_none(what: str) -> None:
    text, says = WRONG[what]
    with pytest.raises(errors.FormatError, match=says) as raised:
        parsed(text)
    assert "drive.yaml" in str(raised.value)
    assert raised.value.path == "drive.yaml"


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(errors.FormatError, match="no YAML"):
        parse_spec(b"name: \xff\xfe", "drive.yaml")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "drive.yaml"
    with pytest.raises(errors.FileMissingError):
        load_spec(path)
    path.write_text(LEAST)
    assert load_spec(path) == load_spec(str(path)) == parsed(LEAST)
    path.write_text(LEAST + "#" * SIZE_MAX_BYTES)
    with pytest.raises(errors.FormatError, match="too large"):
        load_spec(path)
    for name in (tmp_path, tmp_path / "pipe.yaml"):
        if name != tmp_path:
            os.mkfifo(name)
        with pytest.raises((errors.FormatError, errors.ReadError)):
            load_spec(name)
    with pytest.raises(errors.InvalidInputError):
        load_spec("a\0.yaml")


def test_damage_is_a_typed_error() -> None:
    """Whatever happens to a good file: a spec, or an error of ours."""
    rng = random.Random(1)
    text = LEAST + ATTENDS
    for _ in range(400):
        place = rng.randrange(len(text))
        piece = rng.choice(
            [
                "",
                "\n",
                " ",
                ":",
                "{",
                "]",
                "'",
                "&a ",
                "!!int ",
                "-",
                "1e99",
                "\t",
                "null",
                "?",
                "%",
                "é",
            ]
        )
        damaged = text[:place] + piece + text[place + rng.randrange(4) :]
        try:
            parsed(damaged)
        except errors.FormatError:
            pass
