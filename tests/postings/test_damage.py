"""Every byte of every section, bent; reads that fail; builds that are killed; texts that nobody
expects."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import espnx.postings
from espnx import errors
from espnx.postings import Analyzer, Postings
from espnx.postings.stored import terms as stored_terms
from espnx.storage import FaultRule
from espnx.storage.native import load_native
from tests.postings.common import corpus, plain_bm25

DAMAGED = (errors.ChecksumError, errors.FormatError, errors.TruncatedFileError)


@pytest.fixture(scope="module", params=["bm25", "impact", "float"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few records, so that every byte can be bent; with a deletion."""
    path = tmp_path_factory.mktemp("damage") / str(request.param)
    documents = corpus(40, seed=8, longest=12)
    if request.param == "bm25":
        Postings.build(path, terms=documents)
    else:
        Postings.build(
            path,
            vectors=[
                {word: 1.0 + i % 3 for i, word in enumerate(set(words))} for words in documents
            ],
            exact=request.param == "float",
        )
    espnx.postings.delete(path, [3, 17])
    return path


def sections_of(path: Path) -> list[dict[str, slice]]:
    """Where the sections of each segment's file lie."""
    with Postings.open(path) as postings:
        return [
            {
                name: slice(each.offset_bytes, each.offset_bytes + each.size_bytes)
                for name, each in segment.sections.items()
            }
            for segment in postings.facts.segments
        ]


def read_everything(path: Path) -> list[list[float]]:
    with Postings.open(path) as postings:
        postings.verify()
        queries = [{f"w{i}": 1.0 for i in range(first, first + 20)} for first in range(0, 200, 20)]
        return [
            *postings.search(queries, k=20).scores.tolist(),
            *postings.search(queries, k=20).numbers.tolist(),
        ]


def test_a_flipped_bit_anywhere_is_found(small: Path, tmp_path: Path) -> None:
    """But for zeros between sections, which say nothing."""
    expected = read_everything(small)
    random = np.random.default_rng(0)
    for name in sorted(os.listdir(small)):
        if name == "LOCK":
            continue
        size = os.stat(small / name).st_size
        places = sorted({0, 5, 9, 13, 60, size - 1, *random.integers(0, size, 12).tolist()})
        (sections,) = sections_of(small)
        is_used = [
            not name.endswith(".postings")
            or any(place in range(size)[each] for each in sections.values())
            for place in places
        ]
        for place in (
            place for place, used in zip(places, is_used, strict=True) if used and place < size
        ):
            bent = tmp_path / "bent"
            shutil.copytree(small, bent)
            data = bytearray((bent / name).read_bytes())
            data[place] ^= 1 << int(random.integers(8))
            (bent / name).write_bytes(bytes(data))
            try:
                found = read_everything(bent)
            except DAMAGED:
                pass
            else:
                assert name == "MANIFEST.json", f"byte {place} of {name}"
                assert found == expected  # white space
            shutil.rmtree(bent)


@pytest.mark.parametrize("cut", [0, 1, 63, 0.5, 0.99])
def test_a_file_that_ends_early_is_found(small: Path, tmp_path: Path, cut: float) -> None:
    for name in sorted(os.listdir(small)):
        if name in ("LOCK", "MANIFEST.json") or os.stat(small / name).st_size == 0:
            continue
        bent = tmp_path / name
        shutil.copytree(small, bent)
        size = os.stat(bent / name).st_size
        os.truncate(bent / name, min(size - 1, int(cut * size) if 0 < cut < 1 else int(cut)))
        with pytest.raises(DAMAGED):
            read_everything(bent)


def test_a_missing_file_is_named(small: Path, tmp_path: Path) -> None:
    bent = tmp_path / "bent"
    shutil.copytree(small, bent)
    name = next(name for name in os.listdir(bent) if name.endswith(".postings"))
    os.unlink(bent / name)
    with pytest.raises(errors.FileMissingError, match=name):
        Postings.open(bent)


def test_another_index_in_its_place_is_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Postings.build(tmp_path / name, terms=corpus(40, seed=8))
    (a,), (b,) = (sections_of(tmp_path / name) for name in ("a", "b"))
    assert a == b  # of the same records, so of the same sizes
    for section in ("lists", "terms", "lengths", "dict"):
        mixed = tmp_path / section
        shutil.copytree(tmp_path / "a", mixed)
        data, other = (
            bytearray((mixed / "s1.postings").read_bytes()),
            (tmp_path / "b" / "s1.postings").read_bytes(),
        )
        data[a[section]] = other[a[section]]
        (mixed / "s1.postings").write_bytes(bytes(data))
        with pytest.raises(DAMAGED):
            read_everything(mixed)


@pytest.mark.parametrize("fault", ["error", "short", "stale"])
def test_a_read_that_fails_ends_the_query_and_no_other(
    postings_path: Path, documents: list[list[str]], queries: list[list[str]], fault: str
) -> None:
    rule = FaultRule(
        fault=fault,
        operation="read",
        path="*.postings",
        nth=9,
        count=1 if fault != "short" else -1,
        value=5 if fault == "error" else 0,
    )
    with Postings.open(postings_path, rules=[rule]) as postings:
        with pytest.raises((errors.ReadError, *DAMAGED)):
            postings.search(queries, k=10, threads=1)
        if fault == "short":
            return
        again = postings.search(queries, k=10)
    for row, query in enumerate(queries):
        numbers, scores = plain_bm25(documents, query, postings.facts.bm25)
        assert again.numbers[row][: len(numbers)].tolist() == numbers[:10].tolist()
        assert again.scores[row][: len(numbers)].tolist() == scores[:10].tolist()


@pytest.mark.parametrize("value", [0, 1, 100, 512, 4095, 5000])
def test_short_reads_go_on(postings_path: Path, queries: list[list[str]], value: int) -> None:
    rule = FaultRule(
        fault="short", operation="read", path="*.postings", probability=0.5, value=value
    )
    with (
        Postings.open(postings_path) as plain,
        Postings.open(postings_path, rules=[rule]) as postings,
    ):
        expected, found = (each.search(queries, k=10) for each in (plain, postings))
    assert found.numbers.tolist() == expected.numbers.tolist()
    assert found.scores.tolist() == expected.scores.tolist()


def test_a_read_that_never_ends_meets_its_deadline(postings_path: Path) -> None:
    rule = FaultRule(fault="never", operation="read", path="*.postings", nth=3, count=1)
    with Postings.open(postings_path) as postings:
        expected = postings.search([["w1", "w2"]])
    with Postings.open(postings_path, rules=[rule]) as postings:
        with pytest.raises(errors.DeadlineExceededError, match="postings"):
            postings.search([["w1", "w2"]], deadline_s=0.2)
        # by another queue: the read may still write to its memory
        again = postings.search([["w1", "w2"]])
        assert again.scores.tolist() == expected.scores.tolist()


def test_many_threads_and_a_closed_engine(postings_path: Path, queries: list[list[str]]) -> None:
    with Postings.open(postings_path) as postings:
        expected = postings.search(queries, k=20).scores.tolist()
        found: list[object] = []
        threads = [
            threading.Thread(
                target=lambda: found.append(
                    postings.search(queries, k=20, threads=2).scores.tolist()
                )
            )
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [expected] * 6
    with pytest.raises(errors.EngineClosedError):
        postings.search(queries)


@pytest.mark.parametrize("engine", ["posix", "memory"])
def test_every_path_finds_the_same(
    postings_path: Path, queries: list[list[str]], engine: str
) -> None:
    with (
        Postings.open(postings_path) as postings,
        Postings.open(postings_path, engine=engine) as other,
    ):
        assert other.path_of_reads == engine
        for _ in range(2):
            assert other.search(queries).scores.tolist() == postings.search(queries).scores.tolist()


def test_hostile_texts(tmp_path: Path) -> None:
    long = "x" * 1_000_000
    texts = [
        "a\0b nul\0nul",
        "half \ud800\udfff of a pair",
        long,
        "",
        "e\u0301 \u00e9 \U0001f600\U0001f600 ok",
        "nul\0nul",
    ]
    analyzer = Analyzer(pattern=r"\S+")
    Postings.build(tmp_path / "x", texts, analyzer=analyzer)
    with Postings.open(tmp_path / "x") as postings:
        postings.verify()
        for number, query in (
            (0, "a\0b"),
            (1, "\ud800\udfff"),
            (2, long),
            (4, "\U0001f600\U0001f600"),
        ):
            assert postings.search(query).numbers[0].tolist()[:2] == [number, -1]
        assert postings.search("nul\0nul").numbers[0].tolist()[:2] == [5, 0]
        assert (postings.search([long[:-1], "", "\ud800", "nul"]).numbers == -1).all()


def test_a_query_of_ten_thousand_terms(postings_path: Path, documents: list[list[str]]) -> None:
    query = [f"w{i % 25 if i < 9000 else i % 2500}" for i in range(10_000)]
    with Postings.open(postings_path) as postings:
        found = postings.search([query], k=5)
        rule = postings.facts.bm25
    numbers, scores = plain_bm25(documents, query, rule)
    assert found.numbers[0].tolist() == numbers[:5].tolist()
    assert found.scores[0].tolist() == scores[:5].tolist()


@pytest.mark.parametrize("n", [0, 1, 2])
def test_next_to_nothing(tmp_path: Path, n: int) -> None:
    Postings.build(tmp_path / "x", ["one word", "two words"][:n])
    with Postings.open(tmp_path / "x") as postings:
        assert len(postings) == n
        found = postings.search(["one", "nothing", ""], k=5)
        postings.verify()
    assert found.numbers.shape == (3, n)  # no more than there are
    assert found.numbers[0].tolist() == [0, -1][:n]
    assert (found.numbers[1:] == -1).all()


def test_terms_that_share_a_hash_stay_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hashes of three bits every look-up finds others: the lists say whose they are."""
    monkeypatch.setattr(stored_terms, "hash_of", lambda data: sum(data) % 5 << 61)
    documents = corpus(200, seed=9, longest=20)
    Postings.build(tmp_path / "x", terms=documents, memory_bytes=1 << 20)
    espnx.postings.add(tmp_path / "x", terms=corpus(50, seed=10, longest=20))
    whole = documents + corpus(50, seed=10, longest=20)
    for _ in range(2):
        with Postings.open(tmp_path / "x") as postings:
            postings.verify()
            queries = [*corpus(10, seed=11, longest=6), ["not there"], ["w1999", "neither"]]
            found = postings.search(queries, k=300)
            for row, query in enumerate(queries):
                numbers, scores = plain_bm25(whole, query, postings.facts.bm25)
                assert found.numbers[row][: len(numbers)].tolist() == numbers.tolist()
                assert found.scores[row][: len(numbers)].tolist() == scores.tolist()
        espnx.postings.compact(tmp_path / "x")


def test_a_word_alone_with_its_hash_is_not_taken_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_terms, "hash_of", lambda data: (data or b"-")[0] << 56)
    Postings.build(tmp_path / "x", terms=[["apple", "beet"], ["beet"]])
    espnx.postings.add(tmp_path / "x", terms=[["ant", "beet"]])
    with Postings.open(tmp_path / "x") as postings:
        found = postings.search([["ant", "beet"], ["apple"], ["axe"]], k=5)
        state = postings.begin(["ant"], k=5)
        assert state.complete()[0].tolist() == [2]
    assert found.numbers[0].tolist()[:3] == [2, 1, 0]
    assert found.numbers[1].tolist() == [0, -1, -1]
    assert (found.numbers[2] == -1).all()


def test_lists_in_many_pieces() -> None:
    """A word that every record has, and that takes more than one piece of 960 KiB."""
    n = 1_600_000
    random = np.random.default_rng(0)
    counts = np.minimum(random.zipf(1.3, n), 70_000)

    encoder = load_native().ListEncoder(7, 0)
    name = torch.frombuffer(bytearray(b"the"), dtype=torch.uint8)
    encoder.begin_list(5, name, False)
    records = torch.arange(n, dtype=torch.int64).to(torch.uint32)
    values = torch.from_numpy(counts.astype(np.uint32))
    for first in range(0, n, 333_333):  # in parts, as a stream has them
        encoder.add(records[first : first + 333_333], values[first : first + 333_333])
    size = encoder.end_layer(True)
    data = encoder.take()
    assert size == data.numel() > 960 << 10
    found = load_native().decode_list(data, 7, 0, n, 5, name, False, 0)
    assert isinstance(found, tuple)
    assert torch.equal(found[0], records)
    assert torch.equal(found[1], values)
    for place in (3, 40, (960 << 10) - 1, (960 << 10) + 9, size - 1):
        bent = data.clone()
        bent[place] ^= 4
        assert isinstance(load_native().decode_list(bent, 7, 0, n, 5, name, False, 0), str)
    assert isinstance(load_native().decode_list(data[: 960 << 10], 7, 0, n, 5, name, False, 0), str)
    assert isinstance(load_native().decode_list(data, 7, 0, n - 1, 5, name, False, 0), str)
    assert isinstance(load_native().decode_list(data, 7, 0, n, 6, name, False, 0), str)
    assert (
        load_native().decode_list(data, 7, 0, n, 5, torch.zeros(3, dtype=torch.uint8), False, 0)
        is None
    )
