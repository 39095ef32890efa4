"""A store of many parts is compacted by a process that may open few files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import espnx
from espnx import errors
from espnx.retrieval.first_stage.graph import stage as graph
from tests.retrieval.common import D_CLS, DIM, corpus

SIZES = [100, 70, 65, 60, 50, 40, 30, 20, 7, 6, 5, 4, 3]


@contextmanager
def free_files(count: int) -> Iterator[None]:
    """So many beside those that are open, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_with_64_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "FLAT_MAX", 40)
    documents, begin = corpus(sum(SIZES), tokens=(1, 2)), SIZES[0]
    espnx.build(
        tmp_path / "s",
        documents[:begin],
        dims=(D_CLS, DIM),
        first_stages=("graph", "bm25"),
        coarse="bit1",
    )
    for size in SIZES[1:]:
        espnx.add(tmp_path / "s", documents[begin : begin + size])
        begin += size
    with espnx.open(tmp_path / "s") as index:
        assert len(index.store.parts) == len(SIZES)
    with (
        free_files(12),
        pytest.raises(errors.ReadError, match=r"Too many open files.*ulimit -n") as caught,
    ):
        espnx.compact(tmp_path / "s")
    assert "espnx index compact" not in str(caught.value), "that is what was run"
    with free_files(12), pytest.raises(errors.StorageError, match="espnx index compact"):
        espnx.open(tmp_path / "s")
    with free_files(44):  # a program begins with a dozen or two
        espnx.compact(tmp_path / "s")
    with espnx.open(tmp_path / "s") as index:
        assert (len(index.store.parts), len(index)) == (1, len(documents))
