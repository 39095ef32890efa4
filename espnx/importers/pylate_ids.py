"""The ids of a PyLate index's documents, which PyLate keeps in a pickle. The pickle is read and not
run.

The file holds one dict from PLAID's numbers to ids. Of all that a pickle may do, only what writes
such a dict is understood here; a file that wants anything else is refused.
"""

from __future__ import annotations

import pickletools
from pathlib import Path
from typing import IO, Any

from ..errors import FormatError
from ..storage.documents.ids import DocumentId

IDS = "plaid_ids_to_documents_ids.pkl"
_VALUES = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
}
_IGNORED = {"PROTO", "FRAME", "STOP"}
_REMEMBER = {"BINPUT", "LONG_BINPUT"}
_RECALL = {"BINGET", "LONG_BINGET"}


def read_ids(path: Path, documents: int) -> list[DocumentId]:
    """Ids of the documents numbered from 0. Raises FormatError unless there is exactly one for
    each."""
    try:
        with path.open("rb") as file:
            held = _read_dict(file)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise FormatError(
            "ids of a PyLate index",
            path=path,
            got=str(error) or type(error).__name__,
            expected="a dict of ids",
        ) from error
    if sorted(held, key=str) != sorted(range(documents), key=str):
        got = f"{len(held)} ids"
        raise FormatError(
            "ids of a PyLate index",
            path=path,
            got=got,
            expected=f"one for each of {documents} documents",
        )
    ids = [held[number] for number in range(documents)]
    bad = next(
        (value for value in ids if not isinstance(value, (str, int)) or isinstance(value, bool)),
        None,
    )
    if bad is not None:
        raise FormatError(
            "ids of a PyLate index", path=path, got=repr(bad), expected="ids that are str or int"
        )
    return ids


def _read_dict(file: IO[bytes]) -> dict[Any, Any]:
    """A dict of ints and strings from a pickle of protocol 2 to 5. Raises ValueError for anything
    else in it."""
    mark = object()
    stack: list[Any] = []
    memory: list[Any] = []
    argument: Any
    for opcode, argument, _ in pickletools.genops(file):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "MARK":
            stack.append(mark)
        elif name == "MEMOIZE":
            memory.append(stack[-1])
        elif name in _REMEMBER:
            if argument != len(memory):
                raise ValueError(f"memory cell {argument} out of turn")
            memory.append(stack[-1])
        elif name in _RECALL:
            stack.append(memory[argument])
        elif name == "SETITEMS":
            begin = len(stack) - 1 - stack[::-1].index(mark)
            items = stack[begin + 1 :]
            del stack[begin:]
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        elif name not in _IGNORED:
            raise ValueError(f"the pickle wants {name}")
    if len(stack) != 1 or not isinstance(stack[0], dict):
        raise ValueError(f"{len(stack)} objects")
    return stack[0]
