"""The topology of a spec, drawn: as a tree of text, and as an SVG in which an edge is as wide as it
is fast. Pure: figures in, text out."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ...checks import check_whole
from ...sizes import format_size
from .reader import Figure
from .spec import DeviceSpec

#: That a picture has; more are cut short.
_DRAWN_MAX = 16
_ROW, _TOP = 30, 64  # pixels
_WIDEST, _ALIKE = 14.0, 4.0  # edge, of several kinds and of one
# Left ends of the host, the switch, the ports and the drives, and widths of what stands there.
_HOST, _SWITCH, _PORT, _DRIVE = (20, 70), (210, 14), (344, 8), (470, 430)
_WIDTH = _DRIVE[0] + _DRIVE[1] + 20
_STYLE = """
    text { fill: #1f2328; font: 12px Helvetica, Arial, sans-serif }
    .head { font-weight: bold } .mid { text-anchor: middle }
    .small { font-size: 11px; fill: #57606a }
    .edge { fill: none; stroke: #8c959f } .box { fill: none; stroke: #57606a; stroke-width: 1.2 }
    .near { fill: #b3541e; fill-opacity: .16; stroke: #b3541e }
    .flash { fill: #17607a; fill-opacity: .14; stroke: #17607a }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 } .small { fill: #9da7b1 }
      .edge { stroke: #6e7681 } .box { stroke: #9da7b1 }
      .near { fill: #f0883e; stroke: #f0883e } .flash { fill: #58a6ff; stroke: #58a6ff }
    }"""


@dataclass(frozen=True)
class _Way:
    """The way from so many drives to the host.

    Attributes:
        ports: switch ports; 0: there are none.
        per_port: drives of a port.
        flash_per_s, host_per_s: bytes/s that all drives read beside their data, and that of it
            reach the host.
        neck: what bounds the latter.
    """

    spec: DeviceSpec
    drives: int
    ports: int
    per_port: int
    flash_per_s: float
    host_per_s: float
    neck: str

    @classmethod
    def of(cls, spec: DeviceSpec, drives: int) -> _Way:
        links = spec.links
        per_port = int(links.devices_per_port.value) if links.devices_per_port else 1
        ports = -(-drives // per_port) if links.switch_port else 0
        flash_per_s = drives * spec.flash.read_bandwidth.value
        full, rest = divmod(drives, per_port)
        behind_port = (
            [min(count * links.device.value, links.switch_port.value) for count in (per_port, rest)]
            if links.switch_port
            else []
        )
        necks = [(flash_per_s, "all links"), (drives * links.device.value, "the drives' links")]
        if behind_port:
            necks.append((full * behind_port[0] + behind_port[1], "the switch ports"))
        if links.uplink:
            necks.append((links.uplink.value, "the lanes of the uplink"))
        host_per_s, neck = min(necks, key=lambda each: each[0])
        return cls(spec, drives, ports, per_port, flash_per_s, host_per_s, neck)

    @property
    def finding(self) -> str:
        """What bounds the way, in words."""
        drives = f"{self.drives} drives read" if self.drives > 1 else "The drive reads"
        near = (
            f"{drives} {_per_s(self.flash_per_s)} beside {'their' if self.drives > 1 else 'its'} "
            "data"
        )
        if self.host_per_s >= self.flash_per_s:
            return f"{near}, and the links of the spec carry all of it to the host"
        return f"{near}; {self.neck} carry {_per_s(self.host_per_s)} of it to the host"


def topology_text(spec: DeviceSpec, drives: int) -> str:
    """A tree of lines, from the host to the flash. Raises InvalidInputError for fewer drives than
    1, or more than 4,096."""
    check_whole("devices", drives, 1, 4096)
    way, links = _Way.of(spec, drives), spec.links
    lines, depth = ["host"], 0

    def under(text: str) -> None:
        nonlocal depth
        lines.append(f"{'   ' * depth}└─ {text}")
        depth += 1

    if links.uplink:
        under(f"uplink {_per_s(links.uplink)}" + (f", shared by {drives}" if drives > 1 else ""))
    if links.switch_port:
        shared = f", shared by {way.per_port}" if way.per_port > 1 else ""
        under(
            (f"{way.ports} switch ports, each " if way.ports > 1 else "switch port ")
            + _per_s(links.switch_port)
            + shared
        )
    under(
        (f"{drives} drives, each on a link of " if drives > 1 else "drive on a link of ")
        + _per_s(links.device)
    )
    parts = [f"{name}: {said}" for name, said in _parts(spec)]
    lines += [f"{'   ' * depth}{'└─' if part is parts[-1] else '├─'} {part}" for part in parts]
    return "\n".join([*lines, f"{way.finding}."])


def topology_svg(spec: DeviceSpec, drives: int) -> str:
    """The same as an SVG, transparent, in the colours that the reader's system is set to. Raises as
    `topology_text`."""
    check_whole("devices", drives, 1, 4096)
    way, links = _Way.of(spec, drives), spec.links
    shown = min(drives, _DRAWN_MAX)
    middles = [_TOP + 24 + _ROW * row + _ROW / 2 for row in range(shown)]
    bottom = _TOP + 24 + _ROW * shown
    widest = max(
        each.value for each in (links.device, links.switch_port, links.uplink) if each is not None
    )
    draw = _Drawing((_WIDEST if links.uplink or links.switch_port else _ALIKE) / widest)
    ends = (
        [middles[begin : begin + way.per_port] for begin in range(0, shown, way.per_port)]
        if way.ports
        else [[y] for y in middles]
    )
    hub = _SWITCH if links.uplink else (_HOST[0] + _HOST[1], 0)
    if links.uplink:
        draw.edge(_HOST, _SWITCH, (middles[0] + middles[-1]) / 2, links.uplink)
        draw.column(_SWITCH, middles[0], middles[-1], "switch")
    for rows in ends:
        middle = (rows[0] + rows[-1]) / 2
        if links.switch_port:
            draw.edge(hub, _PORT, middle, links.switch_port)
            draw.column(_PORT, rows[0], rows[-1], "port" if rows is ends[0] else "")
        for y in rows:
            draw.edge(_PORT if links.switch_port else hub, _DRIVE, y, links.device)
    host = ((middles[0] + middles[-1]) / 2,) * 2 if links.uplink else (middles[0], middles[-1])
    draw.host(*host)
    for y in middles:
        draw.drive(y, spec)
    rest = f"and {drives - shown:,} more such drives" if drives > shown else ""
    draw.text(_DRIVE[0] + _DRIVE[1] / 2, bottom + 14, rest, "mid small")
    title = f"{drives} x {spec.name}" if drives > 1 else spec.name
    height = bottom + (26 if rest else 10)
    head = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}">'
        ),
        f"  <title>{escape(title)}: {escape(way.finding)}</title>",
        f"  <style>{_STYLE}\n  </style>",
        (
            f'  <text x="{_HOST[0]}" y="22" class="head" style="font-size: '
            f'15px">{escape(title)}</text>'
        ),
        f'  <text x="{_HOST[0]}" y="42">{escape(way.finding)}.</text>',
    ]
    return "\n".join([*head, *draw.lines, "</svg>"]) + "\n"


class _Drawing:
    """Lines of an SVG.

    Args:
        wide: pixels of an edge for each byte/s.
    """

    def __init__(self, wide: float):
        self._wide, self.lines = wide, list[str]()

    def text(self, x: float, y: float, said: str, kind: str = "") -> None:
        if said:
            self.lines.append(f'  <text x="{x:g}" y="{y:g}" class="{kind}">{escape(said)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        self.lines.append(
            f'  <rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'class="{kind}"/>'
        )

    def edge(self, left: tuple[int, int], right: tuple[int, int], y: float, rate: Figure) -> None:
        begin, end, wide = left[0] + left[1], right[0], max(1.0, self._wide * rate.value)
        self.lines.append(
            f'  <path class="edge" stroke-width="{wide:.2g}" d="M{begin} {y:g}H{end}"/>'
        )
        self.text((begin + end) / 2, y - wide / 2 - 3, _per_s(rate), "mid small")

    def column(self, place: tuple[int, int], first: float, last: float, name: str) -> None:
        """Draws what several edges end at."""
        self.box(place[0], first - 12, place[1], last - first + 24)
        self.text(place[0] + place[1] / 2, _TOP + 12, name, "mid head")

    def host(self, first: float, last: float) -> None:
        self.box(_HOST[0], first - 22, _HOST[1], last - first + 44)
        self.text(_HOST[0] + _HOST[1] / 2, (first + last) / 2 + 4, "host", "mid head")

    def drive(self, y: float, spec: DeviceSpec) -> None:
        x, cells = _DRIVE[0], _parts(spec)
        letters = [len(said) + 4 for _, said in cells]
        left = float(x)
        for (name, said), share in zip(cells, letters, strict=True):
            width = round(_DRIVE[1] * share / sum(letters), 1)
            self.box(
                left, y - 12, width - 4, 24, {"flash": "flash", "memory": "box"}.get(name, "near")
            )
            self.text(left + width / 2 - 2, y + 4, said, "mid small")
            if y < _TOP + 24 + _ROW:
                self.text(left + width / 2 - 2, _TOP + 12, name, "mid head")
            left += width


def _parts(spec: DeviceSpec) -> list[tuple[str, str]]:
    """The parts of a drive, from its link to its flash: what each is, in words."""
    found, accelerator, memory, flash = (
        list[tuple[str, str]](),
        spec.accelerator,
        spec.memory,
        spec.flash,
    )
    if accelerator is not None:
        fastest = max(
            accelerator.rates.values(), key=lambda rate: rate.value, default=accelerator.peak
        )
        found.append(
            ("accelerator", ", ".join(accelerator.verbs) + (f" at {fastest}" if fastest else ""))
        )
    if memory.size or memory.bandwidth:
        said = [format_size(memory.size.value)] if memory.size else []
        found.append(
            (
                "memory",
                ", ".join([*said, *([_per_s(memory.bandwidth)] if memory.bandwidth else [])]),
            )
        )
    alone = f", {flash.read_latency} alone" if flash.read_latency else ""
    return [*found, ("flash", f"reads {_per_s(flash.read_bandwidth)}{alone}")]


def _per_s(rate: Figure | float) -> str:
    value = rate.value if isinstance(rate, Figure) else rate
    return f"{value / 1e9:.3g} GB/s" if value >= 1e9 else f"{value / 1e6:.3g} MB/s"
