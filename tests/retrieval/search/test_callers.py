"""Many callers at once, on one index: each gets what it would get alone; closing, publishing and
compacting disturb nobody."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import espnx
from espnx import errors
from espnx.retrieval.search import gate as gates
from espnx.retrieval.search.gate import SearchGate
from tests.retrieval.common import build, corpus, queries

OPTIONS = [
    {"k": 20, "candidates": 90},
    {"k": 20, "candidates": 200, "rerank": 16},
    {"k": 5, "prefetch_step": 0.3, "explain": True},
    {"k": 30, "include": [f"doc-{i}" for i in range(0, 300, 3)]},
    {"k": 7, "exclude": ["doc-1", "doc-2"], "prefetch_step": (0.1, 0.4)},
]


@pytest.mark.parametrize("callers", [4, 16])
def test_mixed_searches(store: Path, callers: int) -> None:
    jobs = [(query, options) for query in queries(12, seed=6) for options in OPTIONS]
    with espnx.open(store, hot="64KiB") as index:
        alone = [index.search(query, **options).hits for query, options in jobs]
        with ThreadPoolExecutor(callers) as pool:
            for _ in range(2):
                assert (
                    list(pool.map(lambda job: index.search(job[0], **job[1]).hits, jobs)) == alone
                )
            batches = list(
                pool.map(
                    lambda options: index.search([query for query, _ in jobs[::5]], **options),
                    OPTIONS,
                )
            )
    for number, results in enumerate(batches):
        assert [result.hits for result in results] == alone[number::5]


def test_a_reader_keeps_its_version_through_add_delete_and_compact(folder: Path) -> None:
    documents = corpus(260)
    build(folder / "s", documents[:200])
    query = queries(1)[0]
    wrong: list[object] = []
    with espnx.open(folder / "s") as index:
        before = index.search(query, k=40, candidates=200).hits
        stop = threading.Event()

        def search() -> None:
            while not stop.is_set():
                hits = index.search(query, k=40, candidates=200).hits
                if hits != before:
                    wrong.append(hits)

        threads = [threading.Thread(target=search) for _ in range(3)]
        for thread in threads:
            thread.start()
        espnx.add(folder / "s", documents[200:230])
        espnx.delete(folder / "s", [document.id for document in documents[:50]])
        espnx.add(folder / "s", documents[230:])
        espnx.compact(folder / "s")
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    with espnx.open(folder / "s") as index:
        assert index.store.count == 210
        assert {hit.id for hit in index.search(query, k=300, candidates=300, nprobe=100).hits} == {
            d.id for d in documents[50:]
        }


def test_closed_while_others_search(store: Path) -> None:
    """Searches under way end as they would have; those that wait for their turn, and later ones,
    say that the index is closed."""
    query = queries(1)[0]
    with espnx.open(store) as plain:
        wanted = plain.search(query, k=20, exclude=["doc-1"]).hits
    for _ in range(5):
        index = espnx.open(store)
        index._gate = SearchGate(2)
        found: list[object] = []
        started = threading.Barrier(7)

        def search(
            index: espnx.Index = index,
            found: list[object] = found,
            started: threading.Barrier = started,
        ) -> None:
            started.wait()
            try:
                while True:
                    found.append(index.search(query, k=20, exclude=["doc-1"]).hits)
            except BaseException as error:
                found.append(type(error))

        threads = [threading.Thread(target=search) for _ in range(6)]
        for thread in threads:
            thread.start()
        started.wait()
        closers = [threading.Thread(target=index.close) for _ in range(2)]
        for thread in closers:
            thread.start()
        for thread in (*threads, *closers):
            thread.join()
        ends = [result for result in found if isinstance(result, type)]
        assert ends == [errors.EngineClosedError] * 6
        assert all(result == wanted for result in found if not isinstance(result, type))


def test_close_waits_for_a_search(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = espnx.open(store)
    inside, go_on, found = threading.Event(), threading.Event(), list[int]()
    whole = index.store.texts.get

    def get(numbers: Sequence[int]) -> Any:
        inside.set()
        go_on.wait()
        return whole(numbers)

    monkeypatch.setattr(index.store.texts, "get", get)
    searching = threading.Thread(
        target=lambda: found.append(len(index.search(queries(1)[0], k=3).hits))
    )
    searching.start()
    inside.wait()
    closing = threading.Thread(target=index.close)
    closing.start()
    closing.join(0.05)
    waited = closing.is_alive()
    go_on.set()
    searching.join()
    closing.join()
    assert (waited, found) == (True, [3])


def test_closed_means_closed(store: Path) -> None:
    index = espnx.open(store)
    index.close()
    index.close()
    with pytest.raises(errors.EngineClosedError):
        index.search(queries(1)[0])


def test_ctrl_c_in_the_gate_gives_back_the_slot() -> None:
    """At each line once it is ours, but at those where Python does not look for signals."""
    gate, nth, has_come = SearchGate(2), 0, True

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != gates.__file__ or "enter" not in frame.f_code.co_name:
            return None
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if (
            event == "line"
            and gate._slots._value == 1
            and source not in ("try:", "with self._lock:")
        ):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    while has_come:
        nth += 1
        left = nth
        before = sys.gettrace()
        try:
            sys.settrace(trace)
            with gate:
                has_come = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert gate.active == 0
        assert gate._slots._value == 2
    assert nth > 4
