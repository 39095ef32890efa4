"""Drawings of topologies: what they show is what the spec says, and the one in the documentation is
today's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from espnx import errors
from espnx.device.emulation.topology import Topology
from espnx.device.model.picture import topology_svg, topology_text
from espnx.device.model.spec import load_spec, presets

DOCS = Path(__file__).resolve().parents[3] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("drives", [1, 2, 3, 16, 17, 4096])
@pytest.mark.parametrize("name", presets())
def test_every_preset(name: str, drives: int) -> None:
    """An edge for each link of the topology of so many drives (one way), as far as they are
    drawn."""
    spec = load_spec(name)
    shown = min(drives, 16)
    with Topology(spec, shown, stretch=0) as topology:
        links = [link for link in topology.links if link.endswith(" in")]
    drawn = ElementTree.fromstring(topology_svg(spec, drives))
    assert len(list(drawn.iter(f"{SVG}path"))) == len(links)
    assert ("more such drives" in " ".join(texts(topology_svg(spec, drives)))) == (drives > shown)
    assert topology_text(spec, drives).startswith("host\n└─ ")


@pytest.mark.parametrize(
    ("drives", "words"),
    [
        (
            1,
            (
                "The drive reads 3 GB/s beside its data, and the links of the spec carry all of it "
                "to the host"
            ),
        ),
        (
            8,
            (
                "8 drives read 24 GB/s beside their data, and the links of the spec carry all of "
                "it to the host"
            ),
        ),
        (
            16,
            (
                "16 drives read 48 GB/s beside their data; the lanes of the uplink carry 31.5 GB/s "
                "of it to the host"
            ),
        ),
    ],
)
def test_the_finding(drives: int, words: str) -> None:
    """By hand, and as the emulated topology has it: large reads of all drives take so long to the
    host."""
    spec = load_spec("smartssd")
    assert f"{words}." in texts(topology_svg(spec, drives))
    assert topology_text(spec, drives).endswith(f"{words}.")
    with Topology(spec, drives, stretch=0) as topology:
        took_s = topology.wait(
            [topology.transfer(each, "flash_to_host", 10**12) for each in range(drives)]
        )
    assert drives * 10**12 / took_s == pytest.approx(min(3e9 * drives, 31.508e9), rel=1e-6)


def test_what_holds_them_back() -> None:
    spec = load_spec("smartssd")
    narrow = replace(
        spec, links=replace(spec.links, switch_port=replace(spec.links.device, value=4e9))
    )
    assert (
        "3 drives read 9 GB/s beside their data; the switch ports carry 7.94 GB/s of it"
        in topology_text(narrow, 3)
    )
    assert (
        "4 drives read 2.14 GB/s beside their data; the drives' links carry 532 MB/s"
        in topology_text(load_spec("cosmos-async-pe"), 4)
    )


def test_titles_are_escaped() -> None:
    spec = replace(load_spec("pm983"), name="a<b>&c")
    assert "a<b>&c" in texts(topology_svg(spec, 1))


@pytest.mark.parametrize("drives", [0, -1, 4097, 1.5, True])
def test_drives_out_of_range(drives: object) -> None:
    for draw in (topology_text, topology_svg):
        with pytest.raises(errors.InvalidInputError, match="devices"):
            draw(load_spec("smartssd"), drives)  # type: ignore[arg-type]


def test_the_one_in_the_documentation_is_current() -> None:
    """`espnx device info smartssd --devices 16 --svg docs/smartssd-16.svg` writes it."""
    assert (DOCS / "smartssd-16.svg").read_text() == topology_svg(load_spec("smartssd"), 16)
    assert "](smartssd-16.svg)" in (DOCS / "device-specs.md").read_text()
