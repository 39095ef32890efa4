"""espnx/_C.pyi says what is compiled: the same names, parameters and types, so that mypy sees
through to the extension."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx.storage.native import load_native

#: What pybind11 writes in docstrings, and the words of stubs for it.
_WORDS = {
    "typing.SupportsInt | typing.SupportsIndex": "int",
    "typing.SupportsFloat | typing.SupportsIndex": "float",
    "espnx::python::": "",
    "espnx._C.": "",
    "collections.abc.": "",
    "typing_extensions.": "",
    "typing.": "",
    "torch.": "",
    "str | bytes": "str",
    # not known to pybind11 yet
    "dict[str, Any]": "dict",
    "(anonymous namespace)::": "",
    "PyRecordTicket": "RecordTicket",
}
#: Types of which pybind11 does not say what is in them.
_BARE = ("dict", "tuple", "Callable", "object")
Described = tuple[list[tuple[str, str, bool, str]], str]


def _plain(text: str) -> str:
    for word, plain in _WORDS.items():
        text = text.replace(word, plain)
    return re.sub(r"\b_(?=[A-Z])", "", text)  # aliases of the stub


def _described(node: ast.FunctionDef) -> Described:
    """((kind, name, has a default, type) of each parameter but self, type of the result)."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = len(positional) - len(arguments.defaults)
    found = [
        ("by position or name", each, number >= defaults) for number, each in enumerate(positional)
    ]
    found += [
        ("by name", each, default is not None)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    only = {each.arg for each in arguments.posonlyargs}
    parameters = [
        ("by position", "", is_optional, each)
        if each.arg in only or re.fullmatch(r"arg\d+", each.arg)
        else (kind, each.arg, is_optional, each)
        for kind, each, is_optional in found
        if each.arg != "self"
    ]
    return (
        [
            (kind, name, is_optional, _plain(ast.unparse(each.annotation or each)))
            for kind, name, is_optional, each in parameters
        ],
        _plain(ast.unparse(node.returns or node)),
    )


def _compiled(member: Any) -> Described | None:
    """From the signature that pybind11 puts at the beginning of a docstring; None: it is no
    function of ours."""
    is_property = isinstance(member, property)
    member = member.__func__ if isinstance(member, staticmethod) else member
    text = (member.fget.__doc__ if is_property else member.__doc__) or ""
    signature = _plain(text.strip().partition("\n")[0])
    if re.match(r"\w*\(", signature) is None or "->" not in signature:
        return None
    signature = re.sub(r"<[^>]*>", "None", signature)  # the values of defaults that are objects
    if is_property:
        signature = f"get{signature.replace('arg0', 'self', 1)}"
    node = ast.parse(f"def {signature}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    return _described(node)


def _agrees(stub: Described, compiled: Described) -> bool:
    def fits(ours: str, theirs: str) -> bool:
        # pybind11 does not say that a pointer may be null
        if ours == f"{theirs} | None" and theirs.endswith("Stream"):
            return True
        return ours == theirs or any(
            theirs == bare and (ours.startswith(bare) or bare == "object") for bare in _BARE
        )

    if len(stub[0]) != len(compiled[0]) or not fits(stub[1], compiled[1]):
        return False
    return all(
        ours[:3] == theirs[:3] and fits(ours[3], theirs[3])
        for ours, theirs in zip(stub[0], compiled[0], strict=True)
    )


def _stub() -> dict[str, dict[str, Described | None]]:
    """The members of each class; None for those that are no functions. Functions of the module are
    members of ``Extension``."""
    tree = ast.parse(Path(espnx.__file__).with_name("_C.pyi").read_text())
    found: dict[str, dict[str, Described | None]] = {}
    for each in tree.body:
        if isinstance(each, ast.ClassDef):
            members = found[each.name] = {}
            for node in each.body:
                if isinstance(node, ast.FunctionDef):
                    members[node.name] = _described(node)
                elif isinstance(node, ast.AnnAssign):
                    members[ast.unparse(node.target)] = None
    return found


def test_the_stub_says_what_is_compiled() -> None:
    module, stub = load_native(), _stub()
    owners = {name: member for name, member in vars(module).items() if inspect.isclass(member)} | {
        "Extension": module
    }
    assert stub.keys() == owners.keys()
    wrong = []
    for name, owner in owners.items():
        members = {
            key: None if inspect.isclass(member) else _compiled(member)
            for key, member in vars(owner).items()
            if key == "__init__" or not key.startswith("_")
        }
        if members.get("__init__") is None:
            members.pop("__init__", None)  # made by others alone
        for key in sorted(members.keys() | stub[name].keys()):
            ours, theirs = stub[name].get(key), members.get(key)
            if key not in stub[name] or key not in members or (ours is None) != (theirs is None):
                wrong.append(f"{name}.{key}: stub {ours}, compiled {theirs}")
            elif ours is not None and theirs is not None and not _agrees(ours, theirs):
                wrong.append(f"{name}.{key}:\n  stub     {ours}\n  compiled {theirs}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "other",
    [
        "def f(b: int) -> int: ...",
        "def f(a: float) -> int: ...",
        "def f(a: int) -> str: ...",
        "def f(*, a: int) -> int: ...",
        "def f(a: int=0) -> int: ...",
        "def f(a: int, b: int) -> int: ...",
        "def f(a: int, /) -> int: ...",
    ],
)
def test_a_difference_is_seen(other: str) -> None:
    known, changed = (ast.parse(text).body[0] for text in ("def f(a: int) -> int: ...", other))
    assert isinstance(known, ast.FunctionDef)
    assert isinstance(changed, ast.FunctionDef)
    assert not _agrees(_described(changed), _described(known))
