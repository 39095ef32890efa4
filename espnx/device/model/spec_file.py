"""The YAML of a spec as a tree of plain values that know their line. Nothing in such a file
is believed: its size is limited before it is read, no tag makes an object, a key stands once, and
nothing refers to another part of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from ... import errors
from ...checks import check_path

SIZE_MAX_BYTES = 64 << 10
_DEPTH_MAX = 8
_OPENING = (
    yaml.FlowMappingStartToken,
    yaml.FlowSequenceStartToken,
    yaml.BlockMappingStartToken,
    yaml.BlockSequenceStartToken,
)
_CLOSING = (yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken, yaml.BlockEndToken)
_PLAIN = {
    f"tag:yaml.org,2002:{kind}": kind
    for kind in ("null", "bool", "int", "float", "str", "map", "seq")
}


@dataclass(frozen=True)
class Place:
    """A place in a file: the keys that lead there, and the line."""

    path: str
    keys: tuple[str, ...] = ()
    line: int = 0

    def wrong(
        self, problem: str, *, got: object = None, expected: object = None, fix: str | None = None
    ) -> errors.FormatError:
        name = ".".join(self.keys)
        at = f"line {self.line}" if self.line else ""
        what = ", ".join(part for part in (f"{problem}: {name}" if name else problem, at) if part)
        return errors.FormatError(what, path=self.path, got=got, expected=expected, fix=fix)


@dataclass(frozen=True)
class Scalar:
    """A text, a number as it is written, a truth value, or null (`kind`). What stands in quotes is
    text, whatever it looks like."""

    place: Place
    kind: str
    text: str
    is_quoted: bool = False

    @property
    def shown(self) -> str:
        return "null" if self.kind == "null" else repr(self.text)


@dataclass(frozen=True)
class Row:
    place: Place
    items: tuple[Tree, ...]
    shown = "a list"


@dataclass(frozen=True)
class Keys:
    place: Place
    items: dict[str, Tree]
    shown = "a mapping"


Tree = Scalar | Row | Keys


def read_file(path: str | os.PathLike[str], what: str = "a device spec") -> bytes:
    """`what` it is, for errors. Raises FileMissingError, FormatError where it is no plain file or
    too large, ReadError; InvalidInputError for what is no path."""
    name = check_path(what, path)
    if "\0" in name:
        raise errors.InvalidInputError(what, got=repr(name), expected="a path")
    try:
        # a pipe without a writer does not hold us up
        with open(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise errors.FormatError(
                    f"{what} is no plain file", path=name, expected="a YAML file"
                )
            data = file.read(SIZE_MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise errors.FileMissingError(
            f"there is no such {what.removeprefix('a ')}", path=name, errno=error.errno
        ) from error
    except OSError as error:
        if isinstance(error, errors.EspnxError):
            raise
        raise errors.ReadError(f"cannot read {what}", path=name, errno=error.errno) from error
    if len(data) > SIZE_MAX_BYTES:
        raise errors.FormatError(
            f"{what} is too large",
            path=name,
            got=f"more than {SIZE_MAX_BYTES} bytes",
            expected=f"at most {SIZE_MAX_BYTES} bytes",
        )
    return data


def parse_yaml(data: bytes, path: str, what: str = "a device spec") -> Keys:
    """The mapping that a YAML text holds; `what` it is, for errors. Raises FormatError."""
    place = Place(path)
    try:
        text = data.decode()
        _check_tokens(text, path, what)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise place.wrong(
            f"{what} is no YAML", got=" ".join(str(error).split()), expected="YAML in UTF-8"
        ) from error
    tree = _tree(root, place) if root is not None else None
    if not isinstance(tree, Keys):
        raise place.wrong(
            f"{what} is no mapping",
            got=tree.shown if tree else "nothing",
            expected="`name: ...` and so on",
        )
    return tree


def _check_tokens(text: str, path: str, what: str) -> None:
    """Counts tokens before anything is made of them: the reader of YAML takes time that grows with
    the square of the depth."""
    depth = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        place = Place(path, line=token.start_mark.line + 1)
        if isinstance(
            token, yaml.AnchorToken | yaml.AliasToken | yaml.TagToken | yaml.DirectiveToken
        ):
            got = type(token).__name__.removesuffix("Token").lower()
            raise place.wrong(
                f"{what} has a reference or a tag",
                got=got,
                expected="plain values",
                fix="write it out",
            )
        depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
        if depth > _DEPTH_MAX:
            raise place.wrong(
                f"{what} is nested too deeply", expected=f"at most {_DEPTH_MAX} levels"
            )


def _tree(node: yaml.Node, place: Place) -> Tree:
    place = Place(place.path, place.keys, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Tree] = {}
        for key, each in _entries(node, place):
            if key in found:
                at = Place(place.path, (*place.keys, key), each.start_mark.line + 1)
                raise at.wrong("a key stands twice", expected="once", fix="keep one of them")
            found[key] = _tree(each, Place(place.path, (*place.keys, key)))
        return Keys(place, found)
    if isinstance(node, yaml.SequenceNode):
        items = enumerate(node.value)
        return Row(
            place,
            tuple(
                _tree(each, Place(place.path, (*place.keys, str(number)))) for number, each in items
            ),
        )
    kind = _PLAIN.get(node.tag)
    if kind is None:
        got = f"{node.value!r} ({node.tag.rpartition(':')[2]})"
        raise place.wrong(
            "a value is of no plain kind",
            got=got,
            expected="text or a number",
            fix="put it in quotes",
        )
    return Scalar(place, kind, node.value, node.style is not None)


def _entries(node: yaml.MappingNode, place: Place) -> Iterator[tuple[str, yaml.Node]]:
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or _PLAIN.get(key.tag) not in ("str", "int"):
            raise place.wrong(
                "a key is no name",
                got=repr(key.value) if isinstance(key, yaml.ScalarNode) else "a list",
                expected="a name",
            )
        yield key.value, value
