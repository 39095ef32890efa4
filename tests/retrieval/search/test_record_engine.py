"""Records through an engine of their own, as on a GPU: metadata by the native engine, records by
cuFile (here: its stand-in)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.device.gpu.records import TensorRecordDevice
from espnx.device.interface import RecordQuery
from espnx.retrieval.search.index import Index
from espnx.retrieval.store.store import EmbeddingStore
from espnx.storage import NativeEngine
from tests.retrieval.common import build, corpus, exact_scores, queries
from tests.storage.gds.common import MakeEngine, make, stub_of

__all__ = ["make"]  # a fixture
CPU = torch.device("cpu")


def test_records_arrive_checked_and_score_as_they_should(tmp_path: Path, make: MakeEngine) -> None:
    documents = corpus(150)
    build(tmp_path / "store", documents)
    query = queries(1)[0]
    numbers = np.arange(150)
    with (
        NativeEngine() as native,
        make() as engine,
        EmbeddingStore(tmp_path / "store", native, TensorRecordDevice(engine, CPU)) as store,
    ):
        assert store.effective_path == "gds-compat"
        scores = store.full.maxsim(
            numbers, [RecordQuery(query.cls.reshape(1, -1), query.tokens, 2.0)]
        ).finish()
        wanted, bounds = exact_scores(documents, query, 2.0, "fp16")
        for (identifier, _), score in zip(
            store.texts.get(numbers.tolist()), scores.tolist(), strict=True
        ):
            assert (
                score == wanted[identifier] or abs(score - wanted[identifier]) <= bounds[identifier]
            )
        assert engine.stats().bytes_asked > 0


def test_damage_is_found_there_too(tmp_path: Path, make: MakeEngine) -> None:
    build(tmp_path / "store", corpus(20))
    with (
        NativeEngine() as native,
        make() as engine,
        EmbeddingStore(tmp_path / "store", native, TensorRecordDevice(engine, CPU)) as store,
    ):
        with open(tmp_path / "store" / store.segments[0].path, "r+b") as file:
            file.seek(4096 + 40)
            byte = file.read(1)
            file.seek(4096 + 40)
            file.write(bytes([byte[0] ^ 1]))
        query = queries(1)[0]
        ticket = store.full.maxsim(
            np.arange(20), [RecordQuery(query.cls.reshape(1, -1), query.tokens, 1.0)]
        )
        with pytest.raises(errors.ChecksumError, match="record 0"):
            ticket.finish()
        assert not stub_of(engine).violations


def test_gpu_memory_needs_a_gpu_to_score_in(tmp_path: Path, make: MakeEngine) -> None:
    build(tmp_path / "store", corpus(5))
    with make() as engine, pytest.raises(errors.InvalidInputError, match="compute='cuda'"):
        Index(tmp_path / "store", engine=engine)
    with pytest.raises(errors.PathUnavailableError):
        espnx.open(tmp_path / "store", engine="gds-compat", compute="cpu")
