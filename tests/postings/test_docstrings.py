"""Real texts, many of them: 50,000 docstrings of installed packages, all five variants beside
bm25s. For whoever asks for it:

ESPNX_DOCSTRINGS=50000 pytest tests/postings/test_docstrings.py --timeout 1800
"""

from __future__ import annotations

import ast
import os
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import espnx.postings
from espnx.postings import VARIANTS, Analyzer, Postings

COUNT = int(os.environ.get("ESPNX_DOCSTRINGS", "0"))
K = 100
pytestmark = pytest.mark.skipif(COUNT == 0, reason="ESPNX_DOCSTRINGS says no number of docstrings")


def docstrings(root: Path) -> Iterator[str]:
    """Of modules, classes and functions below a folder, in the order of their paths."""
    for path in sorted(root.rglob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) > 40:
                    yield text


@pytest.fixture(scope="module")
def texts() -> list[str]:
    found = [
        text
        for key in ("purelib", "stdlib")
        for text in islice(docstrings(Path(sysconfig.get_path(key))), COUNT)
    ]
    if len(found) < COUNT:
        pytest.skip(f"there are {len(found)} docstrings here")
    return found[:COUNT]


@pytest.fixture(scope="module")
def changed(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same records by another way: built of some, added, others deleted, compacted."""
    path = tmp_path_factory.mktemp("postings") / "changed"
    third = len(texts) // 3
    Postings.build(path, texts[:third])
    espnx.postings.add(path, texts[third:])
    espnx.postings.add(path, ["the log is written by the device"] * 50)
    espnx.postings.delete(path, range(len(texts), len(texts) + 50))
    espnx.postings.compact(path)
    return path


@pytest.fixture(scope="module")
def built(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("postings") / "built"
    Postings.build(path, texts, memory_bytes=64 << 20)
    return path


@pytest.fixture(scope="module")
def tokens(texts: list[str]) -> list[list[str]]:
    analyzer = Analyzer()
    return [analyzer.terms(text) for text in texts]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_best_hundred_are_those_of_bm25s(
    built: Path, changed: Path, texts: list[str], tokens: list[list[str]], variant: str
) -> None:
    bm25s = pytest.importorskip("bm25s")
    reference = bm25s.BM25(method=variant, k1=1.5, b=0.75, delta=0.5, backend="numpy")
    reference.index(tokens, show_progress=False)
    random = np.random.default_rng(0)
    queries = [
        tokens[i][: random.integers(3, 9)] for i in random.integers(0, len(texts), 200).tolist()
    ]
    for path in (built, changed):
        with Postings.open(path) as postings:
            found = postings.search(queries, K, variant=variant)
        for row, query in enumerate(queries):
            scores = reference.get_scores(query)
            held = found.numbers[row] >= 0
            numbers = found.numbers[row][held]
            assert np.array_equal(scores[numbers], found.scores[row][held])
            # What bm25s has beyond the last one is no better; of records with none of the terms it
            # knows no end.
            best = np.lexsort((np.arange(len(scores)), -scores))[:K]
            assert np.array_equal(best[: len(numbers)], numbers)
