"""The processes of the retrieval benchmark, without processes: systems agree, parts add up, replays
read what they should."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espnx.benchmarks.corpora.mixtures import Mixture, MixtureRecipe
from espnx.benchmarks.corpora.stores import Prepared, ensure_store
from espnx.benchmarks.harness import worker
from espnx.benchmarks.retrieval.index import build_indexes, overlap
from espnx.benchmarks.retrieval.layout import ID_ORDER, LIST_ORDER
from espnx.benchmarks.retrieval.measure import lossy_problem, ranking_problem
from espnx.benchmarks.retrieval.point import recorded_systems
from espnx.benchmarks.retrieval.session import Session
from espnx.device.trace.reader import read_trace
from espnx.errors import InvalidInputError

COUNT, NLIST = 2000, 16
CORPUS = Mixture("B", COUNT, MixtureRecipe(200, 8, 0.6))
OPTIONS = {"k": 50, "candidates": 300, "rerank": None, "nprobe": 6}
SYSTEMS = {
    "memory": {},
    "mmap": {"gather_threads": 1},
    "mmap-8": {"system": "mmap", "gather_threads": 8},
    "mmap-willneed": {},
    "espnx": {},
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    root = tmp_path_factory.mktemp("corpora")
    return ensure_store(
        root,
        "B",
        CORPUS,
        {"nlist": NLIST, "first_stage_code": "flat", "coarse": "bit1"},
        lambda text: None,
    )


@pytest.fixture(scope="module")
def memory(prepared: Prepared) -> Iterator[Session]:
    session = opened(prepared, "memory")
    yield session
    session.close()


@pytest.fixture(scope="module")
def ours(prepared: Prepared) -> Iterator[Session]:
    session = opened(prepared, "espnx")
    yield session
    session.close()


def opened(prepared: Prepared, name: str, **more: Any) -> Session:
    session = Session()
    arguments = {
        "store": str(prepared.store),
        "queries": str(prepared.queries),
        "system": name,
        **SYSTEMS.get(name, {}),
        **more,
    }
    session.handle({"do": "open", **arguments})
    return session


def test_a_recorded_system_finds_the_same(
    prepared: Prepared, memory: Session, tmp_path: Path
) -> None:
    (system,) = recorded_systems(tmp_path)
    session = opened(prepared, system.kind, **system.opening)
    found = session.handle({"do": "search", "queries": [3, 4], "options": OPTIONS})
    session.close()
    assert (
        found["hits"]
        == memory.handle({"do": "search", "queries": [3, 4], "options": OPTIONS})["hits"]
    )
    trace = read_trace(tmp_path / "espnx-recorded.trace")
    assert "maxsim" in {each.verb for each in trace.commands}
    assert recorded_systems(None) == []


@pytest.mark.parametrize("rerank", [None, 20])
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_ranks_like_plain_pytorch(
    prepared: Prepared, memory: Session, name: str, rerank: int | None
) -> None:
    session = opened(prepared, name)
    options = {**OPTIONS, "rerank": rerank}
    answer = session.handle({"do": "search", "queries": [3, 4, 3], "options": options})
    for query, hits in zip([3, 4, 3], answer["hits"], strict=True):
        expected = memory.handle({"do": "reference", "query": query, "options": options})
        assert ranking_problem(hits, expected["hits"], expected["tolerance"]) is None
    assert answer["bytes_asked"] >= (rerank or 300) * session.index.store.full.schema.fixed_bytes
    sent = json.loads(json.dumps(answer, allow_nan=False))  # as it goes from process to process
    assert sent.keys() == answer.keys()
    assert [[tuple(hit) for hit in hits] for hits in sent["hits"]] == [
        [tuple(hit) for hit in hits] for hits in answer["hits"]
    ]
    assert (sent["bytes_asked"], sent["metrics"]) == (answer["bytes_asked"], answer["metrics"])
    session.close()


@pytest.mark.parametrize("place", ["ssd", "ram"])
def test_a_cascade_scores_its_best_exactly(prepared: Prepared, memory: Session, place: str) -> None:
    session = opened(prepared, "espnx", coarse=place)
    answer = session.handle(
        {
            "do": "search",
            "queries": [5],
            "options": {**OPTIONS, "cascade": 30, "prefetch_step": 0.3},
        }
    )
    expected = memory.handle({"do": "reference", "query": 5, "options": {**OPTIONS, "k": 300}})
    assert lossy_problem(answer["hits"][0][:30], expected["hits"], expected["tolerance"]) is None
    session.close()


def test_pieces_are_the_reads_of_the_search(ours: Session) -> None:
    found = ours.handle(
        {"do": "search", "queries": [7], "options": {**OPTIONS, "prefetch_step": 0.3}}
    )
    parts = ours.handle({"do": "pieces", "query": 7, "options": OPTIONS, "steps": found["steps"]})
    assert found["steps"] == (0.3,)
    assert parts["prefetch"]["bytes_asked"] + parts["misses"]["bytes_asked"] == found["bytes_asked"]
    assert len(parts["numbers"]) == 300
    alone = ours.handle({"do": "pieces", "query": 7, "options": OPTIONS, "steps": []})
    assert alone["rest_s"] == 0
    assert alone["misses"]["bytes_asked"] == 0
    store = ours.index.store
    sizes = store.full.schema.sizes(store.n_tokens[np.array(alone["numbers"])])
    assert alone["prefetch"]["bytes_asked"] == sizes.sum()


def test_hit_rates_are_the_overlap_of_two_faiss_searches(ours: Session) -> None:
    shares, queries = [0.2, 0.5], [1, 2, 8]
    known = ours.handle(
        {"do": "overlap", "queries": queries, "candidates": 300, "nprobe": 10, "shares": shares}
    )
    for share, expected in zip(shares, known["hit_rates"], strict=True):
        options = {**OPTIONS, "nprobe": 10, "prefetch_step": share}
        rates = [
            ours.handle({"do": "search", "queries": [query], "options": options})["metrics"][
                "hit_rate"
            ]
            for query in queries
        ]
        assert np.mean(rates) == pytest.approx(expected, abs=1e-3)
    assert 0 < known["hit_rates"][0] < known["hit_rates"][1] < 1
    assert 0.5 < known["recall"] <= 1


def test_nprobe_for_a_recall(ours: Session) -> None:
    asked = {"do": "nprobe_for", "queries": list(range(20)), "candidates": 100}
    low, high = (ours.handle({**asked, "recall": recall})["nprobe"] for recall in (0.5, 0.99))
    assert 1 <= low < high <= NLIST


def test_both_layouts_read_the_same_bytes_and_list_order_asks_less(ours: Session) -> None:
    candidates = {"do": "candidates", "queries": [0], "candidates": 300, "nprobe": 4}
    numbers = ours.handle(candidates)["numbers"][0]
    listed, by_id = (
        ours.handle({"do": "layout", "numbers": numbers, "layout": way, "gap_bytes": 4096})
        for way in (LIST_ORDER, ID_ORDER)
    )
    assert listed["bytes_asked"] == by_id["bytes_asked"]
    assert listed["requests"] < by_id["requests"]


def test_callers_answer_every_query(ours: Session) -> None:
    answer = ours.handle(
        {
            "do": "callers",
            "queries": list(range(12)),
            "options": {**OPTIONS, "prefetch_step": "auto"},
            "callers": 4,
        }
    )
    assert len(answer["latencies"]) == 12
    assert max(answer["latencies"]) <= answer["seconds"]


def test_indexes_share_their_lists_and_differ_in_size(
    prepared: Prepared, ours: Session, tmp_path: Path
) -> None:
    paths = build_indexes(tmp_path, CORPUS, NLIST, ("flat", "sq8", "pq32"), lambda text: None)
    shared = {
        "do": "load_index",
        "queries": str(prepared.queries),
        "numbers": [0, 1, 2],
        "candidates": 100,
    }
    answers = {
        code: ours.handle({**shared, "path": str(path), "nprobe": 8})
        for code, path in paths.items()
    }
    exhaustive = ours.handle({**shared, "path": str(paths["flat"]), "nprobe": None})
    assert (
        answers["flat"]["file_bytes"]
        > 2 * answers["sq8"]["file_bytes"]
        > 2 * answers["pq32"]["file_bytes"]
    )
    recalls = {
        code: np.mean(
            [
                overlap(np.array(a), np.array(b))
                for a, b in zip(answer["numbers"], exhaustive["numbers"], strict=True)
            ]
        )
        for code, answer in answers.items()
    }
    assert recalls["flat"] >= recalls["sq8"] - 0.02 > recalls["pq32"] - 0.02 > 0.3
    again = build_indexes(
        tmp_path, CORPUS, NLIST, ("flat", "sq8", "pq32"), lambda text: pytest.fail("built again")
    )
    assert again == paths


def test_the_protocol_answers_errors_and_goes_on(prepared: Prepared) -> None:
    commands = [
        {"do": "search", "queries": [0], "options": OPTIONS},
        {"do": "nonsense"},
        {
            "do": "open",
            "store": str(prepared.store),
            "queries": str(prepared.queries),
            "system": "espnx",
        },
        {"do": "reference", "query": 0, "options": OPTIONS},
        {"do": "search", "queries": [0], "options": {**OPTIONS, "nprobe": 0}},
        {"do": "search", "queries": [0], "options": OPTIONS},
    ]
    out = io.StringIO()
    worker.serve(
        "retrieval", io.StringIO("".join(json.dumps(command) + "\n" for command in commands)), out
    )
    answers = [json.loads(line) for line in out.getvalue().splitlines()]
    assert ["error" in answer for answer in answers] == [True, True, False, True, True, False]
    assert "send `open` first" in answers[0]["error"]
    assert len(answers[-1]["hits"][0]) == 50


def test_a_process_without_the_whole_store_says_so(ours: Session) -> None:
    with pytest.raises(InvalidInputError, match="whole store"):
        ours.handle({"do": "maxsim", "query": 0, "numbers": [1]})
