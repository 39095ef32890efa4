"""COSMOS+ OpenSSD as the thesis on in-storage distance calculation configures it: a processing
element on each flash channel that is set up synchronously or asynchronously, or none.

A cluster begins at a page of 16 KiB, and the flash controller moves that page whole, whatever the
cluster fills of it (thesis, sections 3.6.2 and 5.4). A die keeps its page until the channel has
taken it. An element has places for the arguments of one command (synchronous), or of two, of which
one is set up while the other streams (the ping-pong buffer, section 4.2.1): that is all in which
the two differ. Without elements the controller queues transfers, and clusters pass the link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..device.model.reader import Figure
from ..device.model.spec import load_preset
from ..device.vectors.interface import REPLY
from ..errors import InvalidInputError
from .figures import Range, rounded
from .system import ROOT, Leg, PartGroup, System

#: What computes, and the preset of that machine.
ELEMENTS = {
    "asynchronous": "cosmos-async-pe",
    "synchronous": "cosmos-sync-pe",
    "conventional": "cosmos-conventional",
}
#: Places for arguments in an element.
ARGUMENTS = {"asynchronous": 2, "synchronous": 1}
CHANNELS, WAYS = 8, 8  # of the board's 8ch8way design
CHANNELS_MAX = 64
OUTSTANDING = 32  # commands in the device
MANY = 4096  # places of what is never waited for
#: What can be switched off: the time of a set-up; that pages are moved whole; that a die keeps its
#: page until the channel has taken it; that the link is slow.
MECHANISMS = ("set-up", "whole pages", "kept pages", "link")
VECTOR_BYTES, ID_BYTES = 128, 4
ENTRY_BYTES = VECTOR_BYTES + ID_BYTES
MB_PER_S = 1e6
US = 1e-6


def _printed(figure: Figure) -> Range:
    return rounded(figure.value, MB_PER_S, figure.source, figure.confidence)


def ranges() -> dict[str, Range]:
    """All figures of the model but the time of a set-up, which is calibrated."""
    spec = load_preset(ELEMENTS["conventional"])
    return {
        "flash_bytes_per_s": _printed(spec.flash.read_bandwidth),
        "link_bytes_per_s": _printed(spec.links.device),
        "cell_read_s": Range(
            25 * US,
            70 * US,
            "tR of SLC and MLC NAND as published simulators and data sheets have it; the board's "
            "is not published",
            "assumed",
        ),
        "firmware_s": Range(
            3 * US,
            12 * US,
            "some thousand cycles of an ARM Cortex-A9 at 1 GHz a command; not published",
            "assumed",
        ),
        "host_s": Range(
            5 * US, 20 * US, "a system call and an NVMe completion on the host", "assumed"
        ),
        "host_bytes_per_s": Range(
            1e9, 4e9, "distances of bytes on one core of the host, of its thread alone", "assumed"
        ),
    }


@dataclass(frozen=True)
class Cosmos:
    """A board.

    Attributes:
        element: of `ELEMENTS`.
        figures: by the names of `ranges`.
        set_up_s: of an element, between two commands of which one waits for the firmware.
        channels: of flash; all of them together have the same bandwidth.
        without: of `MECHANISMS`, what it does not have: for the question what that makes.
    """

    element: str
    figures: Mapping[str, float]
    set_up_s: float = 0.0
    channels: int = CHANNELS
    without: str | None = None

    def __post_init__(self) -> None:
        if self.element not in ELEMENTS:
            raise InvalidInputError(
                "a processing element", got=self.element, expected=", ".join(ELEMENTS)
            )
        if not 1 <= self.channels <= CHANNELS_MAX:
            raise InvalidInputError(
                "channels of flash", got=self.channels, expected=f"1 to {CHANNELS_MAX}"
            )
        if self.without is not None and self.without not in MECHANISMS:
            raise InvalidInputError("a mechanism", got=self.without, expected=", ".join(MECHANISMS))

    @property
    def page_bytes(self) -> int:
        page = load_preset(ELEMENTS[self.element]).flash.page
        if page is None:
            raise InvalidInputError(f"the spec {ELEMENTS[self.element]}", got="no page")
        return int(page.value)

    @property
    def dies(self) -> int:
        return self.channels * WAYS

    def system(self) -> System:
        """Its parts, and the one verb that it serves."""
        known, n = self.figures, self.channels
        bus_bytes_per_s = known["flash_bytes_per_s"] / n
        link_bytes_per_s = None if self.without == "link" else known["link_bytes_per_s"]
        set_up_s = 0.0 if self.without == "set-up" else self.set_up_s
        kept = None if self.without == "kept pages" else "channel"
        groups = [
            PartGroup(ROOT, None, 1, MANY, known["host_s"]),
            PartGroup("queue", ROOT, 1, OUTSTANDING),
            PartGroup("link in", "queue", 1, 1, 0.0, link_bytes_per_s),
            PartGroup("link out", "queue", 1, 1, 0.0, link_bytes_per_s),
            PartGroup("firmware", "queue", 1, 1, known["firmware_s"]),
            PartGroup("channel", "firmware", n, 1, 0.0, bus_bytes_per_s),
            PartGroup("die", "channel", self.dies, 1, known["cell_read_s"]),
        ]
        legs = [Leg("queue", until="link out"), Leg("die", until=kept), Leg("channel", "page")]
        if self.element == "conventional":
            groups.append(PartGroup("host cores", ROOT, 1, MANY, 0.0, known["host_bytes_per_s"]))
            way = [Leg(ROOT), legs[0], Leg("firmware"), *legs[1:], Leg("link out", "cluster")]
            way.append(Leg("host cores", "cluster"))
        else:
            groups += [
                PartGroup("arguments", "channel", n, ARGUMENTS[self.element]),
                PartGroup("set-up", "firmware", n, ARGUMENTS[self.element], set_up_s),
            ]
            way = [Leg(ROOT), legs[0], Leg("link in", "query"), Leg("firmware"), legs[1]]
            way += [Leg("arguments", until="channel"), Leg("set-up"), legs[2]]
            way.append(Leg("link out", "reply"))
        name = ELEMENTS[self.element]
        return System(name, tuple(groups), {"distances": tuple(way)})

    def sizes(self, cluster_bytes: int) -> dict[str, float]:
        """The sizes of a command about one cluster. Raises InvalidInputError: it is larger than a
        page."""
        if not 0 < cluster_bytes <= self.page_bytes:
            raise InvalidInputError(
                "a cluster", got=f"{cluster_bytes} bytes", expected=f"1 to {self.page_bytes}"
            )
        return {
            "cluster": cluster_bytes,
            "page": cluster_bytes if self.without == "whole pages" else self.page_bytes,
            "query": VECTOR_BYTES,
            "reply": cluster_bytes // ENTRY_BYTES * REPLY.itemsize,
        }

    def members(self, die: int) -> dict[str, int]:
        """Which parts the command about a page of that die passes: consecutive pages lie on
        consecutive channels."""
        channel = die % self.channels
        return {"die": die, "channel": channel, "arguments": channel, "set-up": channel}
