"""The memory that a build may use: what is the process's own counts, and a limit that nobody gave
refuses nothing."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.retrieval.build import arrange, budget
from espnx.retrieval.build.budget import MemoryBudget, resident_bytes
from tests.retrieval.common import build, check_store, corpus

SIZE_BYTES = 64 << 20


def test_pages_of_files_do_not_count(tmp_path: Path) -> None:
    """A corpus of vectors is often a memory-mapped file."""
    path = tmp_path / "vectors"
    with path.open("wb") as file:
        file.truncate(SIZE_BYTES)
    before = resident_bytes()
    mapped = np.memmap(path, np.uint8, "r")
    assert int(mapped[:: mmap.PAGESIZE].sum()) == 0
    assert resident_bytes() - before < SIZE_BYTES // 4
    own = torch.ones(SIZE_BYTES, dtype=torch.uint8)
    assert resident_bytes() - before > SIZE_BYTES * 3 // 4
    del own


def test_without_a_limit_nothing_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much the process takes meanwhile."""
    documents = corpus(60)
    chosen = MemoryBudget(None)
    monkeypatch.setattr(budget, "resident_bytes", lambda: 1 << 50)
    assert chosen.left() == budget._FLOOR_BYTES
    chosen.require(1 << 60, "the first stage", "more")
    whole = MemoryBudget.__init__

    def fixed(self: MemoryBudget, total: int | str | None) -> None:
        whole(self, total)
        self.total_bytes = 1 << 30

    monkeypatch.setattr(MemoryBudget, "__init__", fixed)
    build(folder / "s", iter(documents), pca=4, format="residual2")
    with espnx.open(folder / "s") as index:
        assert index.store.verify() == 60
    with pytest.raises(errors.InvalidInputError, match="memory budget too small"):
        build(folder / "t", iter(documents), memory="4GiB")


def test_a_limit_that_was_given_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before lists are filled; the documents are kept for a larger one."""
    with monkeypatch.context() as patch:
        patch.setattr(
            arrange,
            "assign",
            lambda *args: args[-1].require(
                1 << 40, "the first stage does not fit the memory budget", "more"
            ),
        )
        with pytest.raises(
            errors.InvalidInputError, match=r"first stage does not fit.*expected about 1 TiB"
        ):
            build(folder / "s", corpus(60), memory="4GiB")
    assert build(folder / "s", corpus(60), memory="8GiB").resumed_documents == 60
    check_store(folder / "s", corpus(60))


def test_numbers_of_numpy_are_numbers(folder: Path) -> None:
    report = build(
        folder / "s",
        corpus(60),
        nlist=np.int64(3),
        pca=np.int32(4),
        memory=np.int64(1 << 32),
        cls_weight=np.float32(2),
        dims=(np.int64(16), np.int64(8)),
    )
    assert report.first_stage["nlist"] == 3
    with espnx.open(folder / "s") as index:
        assert index.store.manifest.cls_weight == 2.0


def test_documents_whose_tensors_could_be_asked_for_gradients(folder: Path) -> None:
    """Their values are what counts."""
    plain = corpus(30)
    given = [
        espnx.Document(
            d.id,
            d.text,
            espnx.Encoded(
                d.vectors.cls.clone().requires_grad_(), d.vectors.tokens.clone().requires_grad_()
            ),
        )
        for d in plain
        if d.vectors
    ]
    build(folder / "s", given[:20])
    espnx.add(folder / "s", given[20:])
    check_store(folder / "s", plain)


@pytest.mark.parametrize("fmt", ["fp16", "int8", "bit1", "residual2"])
def test_documents_without_tokens(folder: Path, fmt: str) -> None:
    """Some, or all."""
    for name, documents in (
        ("some", corpus(30, tokens=(0, 1))),
        ("all", corpus(30, tokens=(0, 0))),
    ):
        build(folder / name, documents, format=fmt, coarse="bit1")
        with espnx.open(folder / name) as index:
            assert index.store.verify() == 30
            hits = index.search(corpus(1, tokens=(2, 2))[0].vectors, k=30, nprobe=99).hits  # type: ignore[arg-type]
            assert len(hits) == 30
