"""A store that many tests only read, and FAISS on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import espnx
from tests.forks import Forks
from tests.retrieval.common import build, corpus

pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")


@pytest.fixture(autouse=True, scope="session")
def one_faiss_thread() -> Iterator[None]:
    """Corpora here are tiny: on a busy machine, waking FAISS's other threads takes longer than the
    work."""
    import faiss

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def tuned_on_few_queries() -> Iterator[None]:
    """A quarter of the documents that a build asks as queries, still in two blocks: choosing nprobe
    by all of them is a third of the time that building a corpus this small takes."""
    from espnx.retrieval.first_stage.ivf import probing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing, "_SAMPLE", 16)
        yield


@pytest.fixture(scope="session")
def processes(open_forks: Callable[[str], Forks]) -> Forks:
    """Builds, and the command line, in processes that can be killed."""
    return open_forks("tests.retrieval.zygote")


@pytest.fixture(scope="session")
def documents() -> list[espnx.Document]:
    return corpus(300)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, documents: list[espnx.Document]) -> Path:
    """300 documents in eight lists, fp16, on a real disk. Read only."""
    path = tmp_path_factory.mktemp("shared") / "store"
    build(path, documents, nlist=8)
    return path


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes builds cut their data files at a size that a test's corpus reaches: (segment_bytes,
    bytes of one run of records)."""
    from espnx.retrieval.build import builder as module

    def cut(segment_bytes: int, run_bytes: int = 4096) -> None:
        monkeypatch.setattr(module, "segment_bytes", lambda total_bytes, devices: segment_bytes)
        whole = module.pieces
        monkeypatch.setattr(
            module,
            "pieces",
            lambda order, sizes, limit_bytes, room: whole(order, sizes, run_bytes, room),
        )

    return cut
