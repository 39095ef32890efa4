"""What is alike in all files of figures, whatever they describe: a figure has a unit, a source, a
confidence and perhaps a range; a dataclass is read from the keys that are its fields; what is not
right is said with its place.

Whoever has files of a kind of their own declares a dataclass and calls `read_spec`.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from types import MappingProxyType, NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from ... import errors
from .spec_file import Keys, Place, Row, Scalar, Tree, parse_yaml
from .units import QUANTITIES

#: Of files; those of version 1 know no ranges.
SCHEMA_VERSION, SCHEMA_VERSIONS = 2, (1, 2)
SUFFIXES = (".yaml", ".yml")
#: How a figure is known, from best to worst: measured by whoever wrote the spec, or in the source;
#: printed by the maker; stated by a paper; computed from other figures; known from memory, and not
#: looked up; taken because something had to be taken.
CONFIDENCES = ("measured", "datasheet", "paper", "derived", "recalled", "assumed")

#: Of a spec.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
NAME_WORDS = "small letters, digits, '.', '_' and '-', at most 64"
#: Of a key in a mapping of figures.
NUMBER = re.compile("[1-9][0-9]{0,5}")
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
        low, high: between which it is known to lie, in the units of `value`; None: as it stands.
    """

    value: float
    number: float
    unit: str
    source: str
    confidence: str
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        number = f"{self.number:,.10g}"
        if self.low is not None and self.high is not None:
            per_unit = self.value / self.number
            number += f" ({self.low / per_unit:,.6g} to {self.high / per_unit:,.6g})"
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
Share = Annotated[Figure, "share"]
Negative = Annotated[Figure, "number below 0"]


def names_in(package: str, folder: str) -> tuple[str, ...]:
    """The names of the specs that come in that folder of a package."""
    return tuple(
        sorted(
            each.name.removesuffix(".yaml")
            for each in (resources.files(package) / folder).iterdir()
            if each.name.endswith(".yaml")
        )
    )


def read_spec(
    data: bytes,
    path: str | os.PathLike[str],
    kind: type[S],
    what: str = "a device spec",
    versions: Collection[int] = SCHEMA_VERSIONS,
) -> tuple[S, Keys]:
    """The dataclass that a YAML text holds, and its tree for what no field can say alone.

    Args:
        path, what: for errors.
        versions: of which it may be.

    Raises:
        FormatError: it is none; says which field, what it has, what it should have.
    """
    tree = parse_yaml(data, os.fspath(path), what)
    version = tree.items.pop("schema_version", None)
    known = {str(each): each for each in versions}
    if not isinstance(version, Scalar) or version.kind != "int" or version.text not in known:
        got = "nothing" if version is None else version.shown
        place = Place(tree.place.path, ("schema_version",), version.place.line if version else 0)
        expected = " or ".join(known)
        raise place.wrong(f"{what} is of another version", got=got, expected=expected)
    return _Reader(what, has_ranges=known[version.text] >= 2).section(tree, kind), tree


def missing(
    place: Place, keys: tuple[str, ...], expected: str, what: str = "a device spec"
) -> errors.FormatError:
    return Place(place.path, keys).wrong(f"{what} lacks a field", got="nothing", expected=expected)


def meant(name: str, known: Collection[str]) -> str | None:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else None


@dataclass(frozen=True)
class _Reader:
    what: str
    has_ranges: bool

    def section(self, tree: Tree, kind: type[S]) -> S:
        """A dataclass, of the keys that are its fields."""
        own = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
        hints = get_type_hints(kind, include_extras=True)
        section = self._keys(tree, own)
        found = {}
        for name, each in own.items():
            value = section.items.get(name)
            if value is not None and not (isinstance(value, Scalar) and value.kind == "null"):
                found[name] = self._value(value, hints[name])
            elif each.default is MISSING and each.default_factory is MISSING:
                keys = (*section.place.keys, name)
                raise missing(section.place, keys, "given", self.what)
        return kind(**found)

    def _keys(self, tree: Tree, known: Collection[str] | None = None) -> Keys:
        if not isinstance(tree, Keys):
            raise self._misplaced(tree, "a mapping")
        for key, each in tree.items.items():
            if known is not None and key not in known:
                raise each.place.wrong(
                    f"{self.what} has no such field",
                    expected=", ".join(known),
                    fix=meant(key, known),
                )
        return tree

    def _misplaced(self, tree: Tree, expected: str) -> errors.FormatError:
        return tree.place.wrong(f"not what {self.what} has here", got=tree.shown, expected=expected)

    def _value(self, tree: Tree, hint: Any) -> Any:
        """What a field of that type holds."""
        if NoneType in get_args(hint):
            hint = next(each for each in get_args(hint) if each is not NoneType)
        origin, parts = get_origin(hint), get_args(hint)
        if origin is Annotated:
            if parts[0] is Figure:
                return self._figure(tree, parts[1])
            return self._text(tree, parts[1])
        if origin is tuple:
            return self._words(tree, get_args(parts[0])[1])
        if origin is Mapping:
            return self._groups(tree, *get_args(parts[1])[1:])
        return self._text(tree) if hint is str else self.section(tree, hint)

    def _text(self, tree: Tree, rule: Collection[str] | re.Pattern[str] | None = None) -> str:
        """`rule`: the words that it may be, or the pattern that it has."""
        if not isinstance(tree, Scalar) or tree.kind in ("null", "bool"):
            raise self._misplaced(tree, "text")
        if isinstance(rule, re.Pattern):
            if not rule.fullmatch(tree.text):
                raise tree.place.wrong(
                    "a name that is none", got=repr(tree.text[:80]), expected=NAME_WORDS
                )
        elif rule is not None and tree.text not in rule:
            fix = meant(tree.text, rule)
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

    def _words(self, tree: Tree, known: tuple[str, ...]) -> tuple[str, ...]:
        if not isinstance(tree, Row) or not tree.items:
            raise self._misplaced(tree, f"a list of {', '.join(known)}")
        found = tuple(self._text(each, known) for each in tree.items)
        if len(set(found)) != len(found):
            raise tree.place.wrong(
                "a word stands twice", got=", ".join(found), expected="each once"
            )
        return found

    def _groups(
        self, tree: Tree, quantity: str, key_is: str = "query heads"
    ) -> Mapping[int, Figure]:
        """`key_is`: in words, what the keys count."""
        found = {}
        for key, each in self._keys(tree).items.items():
            if not NUMBER.fullmatch(key):
                raise each.place.wrong(
                    "a group that is none",
                    got=repr(key),
                    expected=f"a whole number of {key_is}, 1 or more",
                )
            found[int(key)] = self._figure(each, quantity)
        return MappingProxyType(found)

    def _figure(self, tree: Tree, quantity: str) -> Figure:
        needed, ranged = ("value", "unit", "source", "confidence"), ("low", "high")
        parts = self._keys(tree, needed + ranged if self.has_ranges else needed).items
        for name in needed:
            if name not in parts:
                raise missing(
                    tree.place,
                    (*tree.place.keys, name),
                    "given: value, unit, source and confidence",
                    self.what,
                )
        unit = self._text(parts["unit"], QUANTITIES[quantity])
        number, value = self._number(parts["value"], unit, quantity)
        low, high = (
            self._number(parts[name], unit, quantity)[1] if name in parts else None
            for name in ranged
        )
        if (low is None) != (high is None) or (
            low is not None and high is not None and not low <= value <= high
        ):
            raise tree.place.wrong(
                "a range that is none",
                got=f"{low} to {high} for {value}",
                expected="low and high, with the value between them",
            )
        confidence = self._text(parts["confidence"], CONFIDENCES)
        return Figure(value, number, unit, self._text(parts["source"]), confidence, low, high)

    def _number(self, tree: Tree, unit: str, quantity: str) -> tuple[float, float]:
        """The figure as it is written, and in the quantity's own unit."""
        number = _read_number(tree)
        value, sign = number * QUANTITIES[quantity][unit], -1 if quantity == "number below 0" else 1
        got = f"{number:g} {unit}"
        if not _SMALLEST < sign * value < _LARGEST:
            raise tree.place.wrong(
                "a figure out of range",
                got=got,
                expected="below 0, and real" if sign < 0 else "above 0, and real",
            )
        if quantity == "count" and value != int(value):
            raise tree.place.wrong("a figure out of range", got=got, expected="a whole number")
        if quantity == "share" and value > 1:
            raise tree.place.wrong("a figure out of range", got=got, expected="at most all of it")
        return number, value


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
