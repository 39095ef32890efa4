"""What a device is, in figures: bandwidths, latencies, what its accelerator computes and at which
rate, and where each figure is from.

A spec is a YAML file (docs/device-specs.md). Specs of devices that papers measured are here by name
(`presets`); a figure that nobody has published is None, and none is made up. Loading one imports no
torch.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib import resources
from types import MappingProxyType, NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from ... import errors
from .spec_file import Keys, Place, Row, Scalar, Tree, parse_yaml, read_file
from .units import QUANTITIES

SCHEMA_VERSION = 1
SUFFIXES = (".yaml", ".yml")
#: How a figure is known, from best to worst: measured by whoever wrote the spec, or in the source;
#: printed by the maker; stated by a paper; computed from other figures; known from memory, and not
#: looked up; taken because something had to be taken.
CONFIDENCES = ("measured", "datasheet", "paper", "derived", "recalled", "assumed")
#: What a device may compute beside its data.
VERBS = ("attend", "maxsim", "distances", "search", "walk", "scan", "encode")
SET_UPS = ("synchronous", "asynchronous")

#: Of a spec.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
NAME_WORDS = "small letters, digits, '.', '_' and '-', at most 64"
_TEXT_MAX = 2000
_LARGEST = 1e21  # bytes, FLOP/s, ...; nothing real is above it
_SMALLEST = 1e-21

S = TypeVar("S")


@dataclass(frozen=True)
class Figure:
    """One number of a spec.

    Attributes:
        value: in bytes, bytes/s, seconds, FLOP/s, requests/s, Hz, W, J/bit or $.
        number, unit: the same as the file has it.
        source: where it is from.
        confidence: one of `CONFIDENCES`.
    """

    value: float
    number: float
    unit: str
    source: str
    confidence: str

    def __str__(self) -> str:
        number = f"{self.number:,.10g}"
        return number if self.unit == "1" else f"{number} {self.unit}"


# What a figure is of says which units it may have (`QUANTITIES`).
Size = Annotated[Figure, "size"]
Rate = Annotated[Figure, "rate"]
Time = Annotated[Figure, "time"]
Compute = Annotated[Figure, "compute"]
Requests = Annotated[Figure, "requests"]
Frequency = Annotated[Figure, "frequency"]
Watts = Annotated[Figure, "power"]
BitEnergy = Annotated[Figure, "energy of a bit"]
Dollars = Annotated[Figure, "price"]
HourlyDollars = Annotated[Figure, "price of an hour"]
Writes = Annotated[Figure, "endurance"]
Count = Annotated[Figure, "count"]
Negative = Annotated[Figure, "number below 0"]


@dataclass(frozen=True)
class Flash:
    """Where bytes are kept.

    Attributes:
        read_bandwidth: of large reads into the device's memory (or, where it has none, its link),
            all channels together.
        write_bandwidth: of large writes.
        page: the unit of reading inside.
        channels, dies_per_channel: of flash.
        channel_bandwidth: of one channel's bus.
        cell_read_time, cell_program_time, cell_erase_time: tR, tPROG, tBERS.
        read_latency, write_latency: of 4 KiB, alone, as the host sees it.
        random_reads, random_writes: of 4 KiB, in a second.
    """

    read_bandwidth: Rate
    write_bandwidth: Rate | None = None
    page: Size | None = None
    channels: Count | None = None
    dies_per_channel: Count | None = None
    channel_bandwidth: Rate | None = None
    cell_read_time: Time | None = None
    cell_program_time: Time | None = None
    cell_erase_time: Time | None = None
    read_latency: Time | None = None
    write_latency: Time | None = None
    random_reads: Requests | None = None
    random_writes: Requests | None = None


@dataclass(frozen=True)
class Links:
    """The way to the host. Bandwidths are of one direction; both are there at once.

    Attributes:
        device: between the device and what it is plugged into.
        switch_port: shared by `devices_per_port` devices, or None.
        uplink: between the switch and the host, shared by all, or None.
        latency: of a request over the device's link.
    """

    device: Rate
    switch_port: Rate | None = None
    devices_per_port: Count | None = None
    uplink: Rate | None = None
    latency: Time | None = None


@dataclass(frozen=True)
class Memory:
    """The device's own.

    Attributes:
        size, bandwidth: of its DRAM.
        on_chip: beside its processor.
    """

    size: Size | None = None
    bandwidth: Rate | None = None
    on_chip: Size | None = None


@dataclass(frozen=True)
class Accelerator:
    """What computes beside the data.

    Attributes:
        verbs: of `VERBS`, what it computes.
        rates: by how many query heads share a pass over K and V (d_group), for each number that
            there is a kernel for.
        peak: of all its units, for what has no rate of its own.
        stream_bandwidth: of bytes that pass through it and are compared on the way.
        block_tokens: that attention takes in at a time.
        head_dim: of K and V rows.
        pad_tokens: sequences are padded to a multiple of so many.
        mask_value: what padding scores.
        clock: its frequency.
        units: that multiply and add.
        set_up: whether a command is prepared while the one before it runs (``asynchronous``), or
            not.
        set_up_time: of a command.
    """

    verbs: tuple[Annotated[str, VERBS], ...]
    rates: Mapping[int, Compute] = field(default_factory=dict)
    peak: Compute | None = None
    stream_bandwidth: Rate | None = None
    block_tokens: Count | None = None
    head_dim: Count | None = None
    pad_tokens: Count | None = None
    mask_value: Negative | None = None
    clock: Frequency | None = None
    units: Count | None = None
    set_up: Annotated[str, SET_UPS] | None = None
    set_up_time: Time | None = None

    @property
    def max_group(self) -> int:
        """The most query heads that share a pass; 0: it does not attend."""
        return max(self.rates, default=0)

    def flops_per_s(self, group: int = 1) -> float:
        """Of a pass that `group` query heads share: of the smallest kernel for so many, which takes
        as long as if all its heads were there. Without kernels it is `peak`, and infinite where
        that is not known either. Raises InvalidInputError."""
        if not self.rates:
            return self.peak.value if self.peak else math.inf
        kernel = min((heads for heads in self.rates if heads >= group), default=None)
        if kernel is None or group < 1:
            raise errors.InvalidInputError(
                "query heads that share a pass", got=group, expected=f"1 to {self.max_group}"
            )
        return self.rates[kernel].value * group / kernel


@dataclass(frozen=True)
class Power:
    """Attributes:
    device: all of it, at work.
    limit: what it may take.
    accelerator: at work, by d_group.
    link_energy: of a bit over its link.
    """

    device: Watts | None = None
    limit: Watts | None = None
    accelerator: Mapping[int, Watts] = field(default_factory=dict)
    link_energy: BitEnergy | None = None


@dataclass(frozen=True)
class Price:
    """Attributes:
    device: to buy.
    hour: to rent.
    """

    device: Dollars | None = None
    hour: HourlyDollars | None = None


@dataclass(frozen=True)
class DeviceSpec:
    """A device. Sections and figures that are not known are None, or empty.

    Attributes:
        name: short; what it is opened by.
        title: what it is, in words.
        capacity: bytes that it keeps.
        endurance: bytes that may be written to it.
    """

    name: Annotated[str, NAME]
    title: str
    flash: Flash
    links: Links
    memory: Memory = field(default_factory=Memory)
    accelerator: Accelerator | None = None
    capacity: Size | None = None
    endurance: Writes | None = None
    power: Power = field(default_factory=Power)
    price: Price = field(default_factory=Price)

    def has(self, verb: str) -> bool:
        """Whether it computes that beside the data."""
        return self.accelerator is not None and verb in self.accelerator.verbs


def presets() -> tuple[str, ...]:
    """Names of the specs that come with the package."""
    folder = resources.files(__package__) / "presets"
    return tuple(
        sorted(
            each.name.removesuffix(".yaml")
            for each in folder.iterdir()
            if each.name.endswith(".yaml")
        )
    )


@functools.cache
def load_preset(name: str) -> DeviceSpec:
    """Raises InvalidInputError for a name that is none of `presets`."""
    if name not in presets():
        raise errors.InvalidInputError(
            f"device spec {name!r}", expected=", ".join(presets()), fix=_nearest(name, presets())
        )
    file = resources.files(__package__) / "presets" / f"{name}.yaml"
    return parse_spec(file.read_bytes(), str(file))


def load_spec(source: str | os.PathLike[str]) -> DeviceSpec:
    """A preset by its name, or the spec in a file (a name that ends in ``.yaml`` or ``.yml``, or a
    `pathlib.Path`).

    Raises:
        InvalidInputError: a name that is none.
        FileMissingError, ReadError: as it says.
        FormatError: the file is no spec; says which field, what it has, what it should have.
    """
    if isinstance(source, str) and not source.endswith(SUFFIXES):
        return load_preset(source)
    return parse_spec(read_file(source), os.fspath(source))


def parse_spec(data: bytes, path: str) -> DeviceSpec:
    """The spec that a YAML text holds; `path` is for errors. Raises FormatError."""
    tree = parse_yaml(data, path)
    version = tree.items.pop("schema_version", None)
    if (
        not isinstance(version, Scalar)
        or version.kind != "int"
        or version.text != str(SCHEMA_VERSION)
    ):
        got = "nothing" if version is None else version.shown
        place = Place(path, ("schema_version",), version.place.line if version else 0)
        raise place.wrong("a device spec is of another version", got=got, expected=SCHEMA_VERSION)
    spec = _section(tree, DeviceSpec)
    _check_whole_spec(spec, tree)
    return spec


def _check_whole_spec(spec: DeviceSpec, tree: Keys) -> None:
    """What no field can say alone."""
    if spec.links.switch_port is not None and spec.links.devices_per_port is None:
        raise _missing(
            tree.place, ("links", "devices_per_port"), "how many devices share a switch port"
        )
    if spec.has("attend"):
        for name in ("rates", "block_tokens", "head_dim", "pad_tokens", "mask_value"):
            if not getattr(spec.accelerator, name):
                raise _missing(tree.place, ("accelerator", name), "given, as its verbs name attend")


def _missing(place: Place, keys: tuple[str, ...], expected: str) -> errors.FormatError:
    return Place(place.path, keys).wrong(
        "a device spec lacks a field", got="nothing", expected=expected
    )


def _nearest(name: str, known: Collection[str]) -> str | None:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else None


def _keys(tree: Tree, known: Collection[str] | None = None) -> Keys:
    if not isinstance(tree, Keys):
        raise tree.place.wrong(
            "not what a device spec has here", got=tree.shown, expected="a mapping"
        )
    for key, each in tree.items.items():
        if known is not None and key not in known:
            raise each.place.wrong(
                "a device spec has no such field",
                expected=", ".join(known),
                fix=_nearest(key, known),
            )
    return tree


def _section(tree: Tree, kind: type[S]) -> S:
    """A dataclass, of the keys that are its fields."""
    own = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind, include_extras=True)
    section = _keys(tree, own)
    found = {}
    for name, each in own.items():
        value = section.items.get(name)
        if value is not None and not (isinstance(value, Scalar) and value.kind == "null"):
            found[name] = _value(value, hints[name])
        elif each.default is MISSING and each.default_factory is MISSING:
            raise _missing(section.place, (*section.place.keys, name), "given")
    return kind(**found)


def _value(tree: Tree, hint: Any) -> Any:
    """What a field of that type holds."""
    if NoneType in get_args(hint):
        hint = next(each for each in get_args(hint) if each is not NoneType)
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _read_figure(tree, parts[1]) if parts[0] is Figure else _read_text(tree, parts[1])
    if origin is tuple:
        return _read_words(tree, get_args(parts[0])[1])
    if origin is Mapping:
        return _read_groups(tree, get_args(parts[1])[1])
    return _read_text(tree) if hint is str else _section(tree, hint)


def _read_text(tree: Tree, rule: Collection[str] | re.Pattern[str] | None = None) -> str:
    """`rule`: the words that it may be, or the pattern that it has."""
    if not isinstance(tree, Scalar) or tree.kind in ("null", "bool"):
        raise tree.place.wrong("not what a device spec has here", got=tree.shown, expected="text")
    if isinstance(rule, re.Pattern):
        if not rule.fullmatch(tree.text):
            raise tree.place.wrong(
                "a name that is none", got=repr(tree.text[:80]), expected=NAME_WORDS
            )
    elif rule is not None and tree.text not in rule:
        fix = _nearest(tree.text, rule)
        raise tree.place.wrong(
            "an unknown word", got=repr(tree.text[:80]), expected=", ".join(rule), fix=fix
        )
    if not tree.text.strip() or len(tree.text) > _TEXT_MAX or not tree.text.isprintable():
        raise tree.place.wrong(
            "a text that is none",
            got=repr(tree.text[:80]),
            expected=f"1 to {_TEXT_MAX} printable characters",
        )
    return tree.text


def _read_words(tree: Tree, known: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(tree, Row) or not tree.items:
        raise tree.place.wrong(
            "not what a device spec has here",
            got=tree.shown,
            expected=f"a list of {', '.join(known)}",
        )
    found = tuple(_read_text(each, known) for each in tree.items)
    if len(set(found)) != len(found):
        raise tree.place.wrong("a word stands twice", got=", ".join(found), expected="each once")
    return found


def _read_groups(tree: Tree, quantity: str) -> Mapping[int, Figure]:
    found = {}
    for key, each in _keys(tree).items.items():
        if not re.fullmatch("[1-9][0-9]{0,3}", key):
            raise each.place.wrong(
                "a group that is none",
                got=repr(key),
                expected="a whole number of query heads, 1 or more",
            )
        found[int(key)] = _read_figure(each, quantity)
    return MappingProxyType(found)


def _read_figure(tree: Tree, quantity: str) -> Figure:
    parts = _keys(tree, ("value", "unit", "source", "confidence")).items
    for name in ("value", "unit", "source", "confidence"):
        if name not in parts:
            raise _missing(
                tree.place, (*tree.place.keys, name), "given: value, unit, source and confidence"
            )
    unit = _read_text(parts["unit"], QUANTITIES[quantity])
    number = _read_number(parts["value"])
    value, sign = number * QUANTITIES[quantity][unit], -1 if quantity == "number below 0" else 1
    at, got = parts["value"].place, f"{number:g} {unit}"
    if not _SMALLEST < sign * value < _LARGEST:
        raise at.wrong(
            "a figure out of range",
            got=got,
            expected="below 0, and real" if sign < 0 else "above 0, and real",
        )
    if quantity == "count" and value != int(value):
        raise at.wrong("a figure out of range", got=got, expected="a whole number")
    confidence = _read_text(parts["confidence"], CONFIDENCES)
    return Figure(value, number, unit, _read_text(parts["source"]), confidence)


def _read_number(tree: Tree) -> float:
    found = None
    # to YAML, 1e4 is text
    if isinstance(tree, Scalar) and tree.kind in ("int", "float", "str") and not tree.is_quoted:
        try:
            found = float(tree.text.replace(".nan", "nan").replace(".inf", "inf"))
        except ValueError:
            pass
    if found is None or not math.isfinite(found):
        raise tree.place.wrong(
            "a figure that is no number",
            got=tree.shown,
            expected="a finite number",
            fix="null in place of the figure where it is not known",
        )
    return found
