"""The style rules as functions from a file's text to a list of complaints. Used by test_style.py
alone."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator

from tests.layers import statements

LINE_MAX = 100
SHELL_LINE_MAX = 140  # a command stays a line
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 90
HELD_LINES_MAX, PRIVATE_METHODS_MAX = 300, 6  # of a class that everything hangs on
#: A shorter file that one other imports may be a part of that one: its docstring says why it is "a
#: file of its own".
SMALL_LINES = 60
#: Those whose reason stands here: what an op is made of has the same files in every op; a case's
#: tables are beside it.
SMALL_FILES = {
    "espnx.device.cost.distances": "of a verb",
    "espnx.device.cost.maxsim": "of a verb",
    "espnx.device.cost.scan": "of a verb",
    "espnx.device.cost.search": "of a verb",
    "espnx.device.sums": "checksums of blocks, which the format of rows names",
    "espnx.ops.crc32c.cuda": "of an op",
    "espnx.ops.crc32c.shifts": "of an op",
    "espnx.ops.distances.api": "of an op",
    "espnx.ops.distances.reference": "of an op",
    "espnx.ops.maxsim.reference": "of an op",
    "espnx.retrieval.search.explain": "why a document scores what it scores",
    "espnx.retrieval.search.lookup": "documents by id",
    "espnx.benchmarks.io.table": "of a case",
}

# Written in two halves so that this file does not complain about itself.
WORKPLACE = re.compile(r"(?<![\w.~/-])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me/\w+)/")
UNANCHORED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b(?!\([\w./#-]+\))")
BANNER = re.compile(r"^[^\S\n]*(?:#|//|/\*+)[^\S\n]*(?:[#=*~-][^\S\n]?){8,}", re.MULTILINE)
TORCH_HEADER = re.compile(r'^\s*#\s*include\s*[<"](?:torch|ATen|c10)/', re.MULTILINE)
PYTHON_HEADER = re.compile(r'^\s*#\s*include\s*[<"](?:pybind11/|Python\.h)', re.MULTILINE)

SCOPE = re.compile(r"\b(?:namespace|class|struct|union|enum|extern)\b")
AFTER_PARAMETERS = re.compile(r"\)\s*(?:const|noexcept|override)?$")

#: Text in columns, and two commands: what a reflow leaves where it takes a table, or commands that
#: have a line each, for a paragraph.
COLUMN = re.compile(r"\S\s{3,}(\S)")
WORD = re.compile(r"(?<!\S)\S")
TWO_COMMANDS = re.compile(r"\bpython \S+/.*\bpython \S+/")

#: A docstring that begins so only finishes the name above it ("Of each sequence.").
FRAGMENT = re.compile(r"(?:Of|Where|As|For|That|In|By|From|With|Than|To|On|At|Until)\b")
#: Not English, or not any more: what all of them have, in small letters, which is looked for
#: first; and what to say instead.
PHRASES = {
    re.compile(r"\bfor" + r" ever\b", re.I): ("r ev" + "er", "forever"),
    re.compile(r"\b(?:go|goes|going|gone|went) on" + r" with\b", re.I): (
        " on wi" + "th",
        "continue",
    ),
    re.compile(r"\b(?:is|are) vo" + r"id\b"): (" vo" + "id", "invalid"),
    re.compile(r"\bin va" + r"in\b"): ("in va" + "in", "for nothing"),
    re.compile(r"\b(?:that|which) (?:\w+ )?\w+ (?:has|have)" + r" not[.,;]"): (
        " not",
        "does not have",
    ),
    re.compile(r"\bthat there (?:is|are)" + r" not\b"): ("that there ", "unknown"),
}

#: What tells a linter or a type checker something about its line stands behind it, however long.
PRAGMA = re.compile(r"\s+#\s*(?:type: ignore|noqa)\b.*$")

#: Without which no call of theirs is in a file.
TORCH_LOAD, PRINT = re.compile(r"\btorch\s*\.\s*load\b"), re.compile(r"\bprint\s*\(")

#: Nodes that a rule is about: most are none of these.
DEFINITIONS = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
LOOKED_AT = frozenset(
    (*DEFINITIONS, ast.ExceptHandler, ast.Import, ast.ImportFrom, ast.Assert, ast.Call)
)

Complaint = tuple[int, str]


def text_complaints(text: str, *, line_max: int | None = LINE_MAX) -> Iterator[Complaint]:
    """Rules for any text file: no long lines, no banners, no loose ends, no paths of the machine it
    was written on."""
    lines = text.splitlines()
    names_workplace, is_unanchored = WORKPLACE.search(text), UNANCHORED.search(text)
    is_long = line_max is not None and max(map(len, lines), default=0) > line_max
    has_white = any(map(operator.ne, lines, map(str.rstrip, lines)))
    looked_at = lines if names_workplace or is_unanchored or is_long or has_white else []
    for number, line in enumerate(looked_at, 1):
        if line_max is not None and len(line) > line_max:
            length = len(PRAGMA.sub("", line))
            if length > line_max:
                yield number, f"{length} characters, at most {line_max}"
        if names_workplace and WORKPLACE.search(line):
            yield number, "a path of one particular machine"
        if is_unanchored and UNANCHORED.search(line):
            yield number, "a loose end without an anchor"
        if line != line.rstrip():
            yield number, "white space at the end of the line"
    lowered = text.lower()
    for phrase, (part, instead) in PHRASES.items():
        for match in phrase.finditer(text) if part in lowered else ():
            line = text.count("\n", 0, match.start()) + 1
            yield line, f"{match.group()!r}: say {instead!r}"


def source_complaints(text: str) -> Iterator[Complaint]:
    """Rules for any source file, beyond those for text."""
    n_lines = len(text.splitlines())
    if n_lines > FILE_LINES_MAX:
        yield FILE_LINES_MAX, f"{n_lines} lines, at most {FILE_LINES_MAX}"
    for match in BANNER.finditer(text):
        yield text.count("\n", 0, match.end()) + 1, "a banner comment"


def python_complaints(
    text: str, *, package: bool, may_print: bool, is_test: bool = False
) -> Iterator[Complaint]:
    """Rules for a Python file. ``package``: it belongs to espnx/ or kernels/, where input is judged
    by exceptions, never by assert."""
    tree = ast.parse(text)
    if ast.get_docstring(tree) is None:
        yield 1, "no docstring that says what the file is"
    # calls stand in expressions, which most files need not be looked through for
    has_calls = TORCH_LOAD.search(text) or (not may_print and PRINT.search(text))
    for node in ast.walk(tree) if has_calls else statements(tree):
        if type(node) not in LOOKED_AT:
            continue
        if isinstance(node, DEFINITIONS):
            yield from _docstring(node, is_test=is_test)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - _body(node).lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name} has {length} lines, at most {FUNCTION_LINES_MAX}"
        elif isinstance(node, ast.ExceptHandler):
            yield from _handler(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                {alias.name for alias in node.names}
                if isinstance(node, ast.Import)
                else {node.module or ""}
            )
            if names & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}:
                yield node.lineno, "pickle and its relatives run code from a file"
        elif isinstance(node, ast.Assert) and package:
            yield node.lineno, "assert vanishes under -O: raise a class of espnx.errors"
        elif isinstance(node, ast.Call):
            name = _last_name(node.func)
            if (
                name == "load"
                and ast.unparse(node.func) == "torch.load"
                and "weights_only=True" not in ast.unparse(node)
            ):
                yield node.lineno, "torch.load unpickles what it finds without weights_only=True"
            if name == "print" and isinstance(node.func, ast.Name) and not may_print:
                yield node.lineno, "print outside the command line"


def is_small_part(module: str, text: str, importers: int) -> bool:
    """Whether a file looks like a part of the only one that imports it, and does not say why it is
    none."""
    return (
        len(text.splitlines()) < SMALL_LINES
        and importers == 1
        and module not in SMALL_FILES
        and "file of its own" not in (ast.get_docstring(ast.parse(text)) or "")
    )


def _last_name(function: ast.expr) -> str:
    """What is called, without what it is taken from."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _handler(node: ast.ExceptHandler) -> Iterator[Complaint]:
    if node.type is None:
        yield node.lineno, "a bare except also swallows Ctrl-C"
        return
    broad = {"Exception", "BaseException"} & {
        ast.unparse(part) for part in ast.walk(node.type) if isinstance(part, ast.Name)
    }
    idle = all(
        isinstance(statement, ast.Pass | ast.Continue | ast.Break)
        or (
            isinstance(statement, ast.Return)
            and (statement.value is None or isinstance(statement.value, ast.Constant))
        )
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in node.body
    )
    if broad and idle:
        yield node.lineno, "every failure is swallowed without a word"


def _docstring(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, *, is_test: bool
) -> Iterator[Complaint]:
    """Rules for a docstring: it begins with what the thing is or does (in tests the name is the
    sentence's beginning), what stands in columns lines up with the line before it or behind it, and
    a command has a line of its own."""
    docstring = ast.get_docstring(node, clean=False)
    if docstring is None:
        return
    first = node.body[0].lineno
    if not is_test and not isinstance(node, ast.Module) and FRAGMENT.match(docstring):
        yield first, "a docstring that only finishes the name"
    lines = docstring.splitlines()
    for number, line in enumerate(lines):
        columns = {match.start(1) for match in COLUMN.finditer(line)}
        if columns and not line.lstrip().startswith((">>>", "...")):
            beside = lines[max(0, number - 1) : number] + lines[number + 1 :][:1]
            if columns - {match.start() for each in beside for match in WORD.finditer(each)}:
                yield first + number, "columns that line up with nothing: a table run together?"
        if TWO_COMMANDS.search(line):
            yield first + number, "two commands on a line"


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    """A function's first statement after its docstring: arguments and what is said of them are no
    code to be cut."""
    has_docstring = ast.get_docstring(node, clean=False) is not None
    return node.body[1] if has_docstring and len(node.body) > 1 else node.body[0]


def cpp_complaints(
    text: str, *, may_use_python: bool, has_header: bool = False
) -> Iterator[Complaint]:
    """Rules for C++ and CUDA: no torch, Python in the bindings alone, functions stay short, the
    file (or its header) says what it is."""
    if not has_header and not text.lstrip().startswith(("//", "/*")):
        yield 1, "no opening comment that says what the file is"
    if match := TORCH_HEADER.search(text):
        yield (
            text.count("\n", 0, match.start()) + 1,
            "what is compiled against one torch serves no other: csrc/bindings/tensor/tensor.hpp",
        )
    if not may_use_python and (match := PYTHON_HEADER.search(text)):
        yield text.count("\n", 0, match.start()) + 1, "Python stays in csrc/bindings"
    for name, first, last in cpp_functions(text):
        if last - first + 1 > FUNCTION_LINES_MAX:
            yield first, f"{name} has {last - first + 1} lines, at most {FUNCTION_LINES_MAX}"


def blank_comments_and_strings(text: str) -> str:
    """The text with comments, strings and preprocessor lines emptied, lines kept."""
    token = re.compile(
        r'R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"'  # raw strings
        r"|//[^\n]*|/\*.*?\*/"
        r'|"(?:\\.|[^"\\\n])*"'
        r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'"  # characters, not the marks inside 1'000
        r"|^[ \t]*#(?:\\\n|[^\n])*",
        re.DOTALL | re.MULTILINE,
    )
    return token.sub(lambda match: "\n" * match.group().count("\n"), text)


def cpp_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """(name, first line, last line) of each function body, by counting braces.

    A brace opens a scope after namespace, class, struct, union, enum or extern; it opens a function
    after a closing parenthesis. What is nested inside a function counts as part of it.
    """
    text = blank_comments_and_strings(text)
    stack: list[tuple[str, str, int]] = []
    header_start, line = 0, 1
    for position, character in enumerate(text):
        if character == "\n":
            line += 1
        elif character == "{":
            header = " ".join(text[header_start:position].split())
            inside = any(kind == "function" for kind, _, _ in stack)
            scope = SCOPE.search(header) and not AFTER_PARAMETERS.search(header)
            kind = "block" if inside else "scope" if scope or "(" not in header else "function"
            stack.append((kind, header, line - header.count("\n")))
            header_start = position + 1
        elif character == "}" and stack:
            kind, header, first = stack.pop()
            if kind == "function":
                match = re.search(r"([~\w:]+)\s*\(", header)
                yield (match.group(1) if match else header[:40]), first, line
            header_start = position + 1
        elif character == ";":
            header_start = position + 1
