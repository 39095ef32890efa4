"""The corpus of docstrings: on a small tree that holds every case, and on the standard library."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "docstrings.py"
spec = importlib.util.spec_from_file_location("docstrings_script", SCRIPT)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

LONG = "A sentence that is quite a bit longer than forty characters"


@pytest.fixture
def tree(tmp_path):
    def write(path, content):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content if isinstance(content, bytes) else content.encode())

    write(
        "pkg/__init__.py",
        f'"""{LONG}: the package."""\n'
        f'class A:\n    """{LONG}: A.\n\n        indented\n    """\n'
        f'    @property\n    def x(self):\n        """{LONG}: getter."""\n'
        f'    @x.setter\n    def x(self, v):\n        """{LONG}: setter."""\n'
        '    async def y(self):\n        """too short"""\n        def z():\n'
        f'            """{LONG}: nested."""\n'
        f'try:\n    import q\nexcept ImportError:\n    def q():\n        """{LONG}: fallback."""\n'
        f'else:\n    def r():\n        r"""{LONG}: \\d raw."""\n',
    )
    write(
        "pkg/b.py",
        f'"""{LONG}: b \\ud800 surrogate."""\ndef same():\n    """{LONG}: A.\n\n    indented\n    '
        '"""\n',
    )
    write("pkg/sub/__init__.py", "")
    write("pkg/sub/c.py", f'"\\d {LONG}: invalid escape"\n')
    write("pkg/latin.py", f'# coding: latin-1\n"""{LONG}: caf\xe9"""\n'.encode("latin-1"))
    write("pkg/undecodable.py", b'"""\xff\xfe ' + LONG.encode() + b'"""\n')
    write("pkg/python2.py", f'"""{LONG}"""\nprint "x"\n')
    write("pkg/null.py", f'"""{LONG}"""\n\0')
    write("pkg/deep.py", f'"""{LONG}: deep"""\nx = ' + "(" * 3000 + ")" * 3000)
    write("pkg/chain.py", f'"""{LONG}: chain"""\nif x: pass\n' + "elif x: pass\n" * 5000)
    write("pkg/huge.py", f'"""{LONG}: huge"""\n' + "#" * module.SOURCE_SIZE_BYTES_MAX)
    write("pkg/tests/t.py", f'"""{LONG}: test"""\n')
    write("pkg/_vendor/v.py", f'"""{LONG}: vendored"""\n')
    write("alone.py", f'"""{LONG}: alone"""\n')
    write("data/not_a_package.py", f'"""{LONG}: data"""\n')
    write("with-dash.py", f'"""{LONG}: dash"""\n')
    return tmp_path


def test_every_case(tree):
    found = {document["id"]: document["text"] for document in module.documents([tree])}
    assert list(found) == [
        "alone",
        "pkg",
        "pkg.A",
        "pkg.A.x",
        "pkg.A.x#2",
        "pkg.A.y.z",
        "pkg.q",
        "pkg.r",
        "pkg.b",
        "pkg.latin",
        "pkg.sub.c",
    ]
    assert found["pkg.A"] == f"{LONG}: A.\n\nindented"
    assert found["pkg.A.x#2"].endswith("setter.")
    assert found["pkg.r"].endswith("\\d raw.")
    assert found["pkg.b"] == f"{LONG}: b ? surrogate."
    assert found["pkg.latin"].endswith("caf\xe9")


def test_lengths_and_packages(tree):
    ids = [d["id"] for d in module.documents([tree], packages=["pkg", "alone"])]
    assert ids[0] == "pkg"
    assert ids[-1] == "alone"
    assert "pkg.A.y" in [d["id"] for d in module.documents([tree], min_chars=9)]
    assert "pkg.A.y" not in [d["id"] for d in module.documents([tree], min_chars=10)]
    longest = max(len(d["text"]) for d in module.documents([tree]))
    assert len(list(module.documents([tree], max_chars=longest))) == 11
    assert len(list(module.documents([tree], max_chars=longest - 1))) < 11


@pytest.mark.parametrize("tokens", [1, 3, 5, 1000])
def test_slices_lose_nothing(tokens):
    text = "one, two three\n\n    four(five) six  seven."
    parts = module.slices(text, tokens)
    counts = [len(module.TOKEN.findall(part)) for part in parts]
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert sum(counts) == 11
    assert len(parts) == -(-11 // tokens)
    assert max(counts) <= tokens
    assert max(counts) - min(counts) <= 1
    assert module.slices("", 3) == [""]


def test_sliced_ids(tree):
    ids = [d["id"] for d in module.documents([tree], packages=["alone"], slice_tokens=10)]
    assert ids == ["alone@0", "alone@1"]


def test_standard_library_is_rich_and_repeatable():
    first, second = (
        list(itertools.islice(module.documents(packages=["json", "collections", "asyncio"]), 300))
        for _ in range(2)
    )
    assert first == second
    assert len(first) == 300
    assert len({d["id"] for d in first}) == 300
    text = next(d["text"] for d in first if d["id"] == "json.dumps")
    assert text.startswith("Serialize ``obj`` to a JSON formatted ``str``.")


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True
    )


def test_command_line(tree, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "corpus.jsonl"
    done = run("--root", tree, "--out", out, "--limit", 3)
    assert done.returncode == 0
    assert done.stdout == ""
    assert done.stderr.startswith("3 documents, ")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["_id"] for row in rows] == ["alone", "pkg", "pkg.A"]
    assert all(set(row) == {"_id", "text"} for row in rows)
    assert run("--root", tree, "--limit", 3).stdout == out.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--limit", 0), "got 0, expected at least 1"),
        (("--packages", "numpi"), "got numpi"),
        (("--root", "/absent"), "got /absent, expected a folder"),
    ],
)
def test_wrong_arguments(arguments, says):
    done = run(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
