"""Collections over several directories: what they find is what one index finds, and bm25s, bit for
bit; what crosses links, by the byte."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import espnx.postings
from espnx import errors
from espnx.device.postings.command import HEADER_BYTES, LIST, PARTIAL, SCAN_REPLY, WEIGHT
from espnx.postings import VARIANTS, CsrArrays, Postings, SplitPostings, build_split
from espnx.postings.stored import terms as stored_terms
from espnx.storage import FaultRule, NativeEngine
from tests.postings.common import corpus, numbers_of
from tests.storage.common import in_child
from tests.sweeps import some

PLACEMENTS = ("passages", "terms")
DAMAGED = (errors.ChecksumError, errors.FormatError, errors.TruncatedFileError)


def directories(folder: Path, count: int) -> list[Path]:
    return [folder / f"part-{i}" for i in range(count)]


@pytest.fixture(
    scope="module",
    params=some([((name, count),) for name in PLACEMENTS for count in (1, 2, 4, 8)], 3),
    ids=lambda each: f"{each}",
)
def split(
    request: pytest.FixtureRequest,
    documents: list[list[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Path]:
    placement, count = request.param
    paths = directories(tmp_path_factory.mktemp("split"), count)
    build_split(paths, terms=documents, placement=placement)
    return paths


def assert_same(found: espnx.postings.Found, wanted: espnx.postings.Found) -> None:
    assert found.numbers.tolist() == wanted.numbers.tolist()
    assert found.scores.tobytes() == wanted.scores.tobytes()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("variant", VARIANTS)
def test_results_are_those_of_one_index_and_of_bm25s(
    split: list[Path],
    postings_path: Path,
    documents: list[list[str]],
    queries: list[list[str]],
    variant: str,
) -> None:
    asked = [*queries, ["no such term"], [], ["w3", "w3", "w1999", "w3"]]
    with SplitPostings(split[::-1]) as postings, Postings.open(postings_path) as one:
        assert len(postings) == len(documents)
        for k in (1, 100, len(documents) + 7):
            assert_same(
                found := postings.search(asked, k=k, variant=variant, k1=0.9, b=0.4),
                one.search(asked, k, variant=variant, k1=0.9, b=0.4),
            )
    bm25s = pytest.importorskip("bm25s")
    reference = bm25s.BM25(method=variant, k1=0.9, b=0.4, delta=0.5, backend="numpy")
    reference.index(documents, show_progress=False)
    for row, query in enumerate(queries):
        scores = reference.get_scores(query)
        has = np.array([i for i, document in enumerate(documents) if set(document) & set(query)])
        order = has[np.lexsort((has, -scores[has]))]
        assert found.numbers[row, : len(order)].tolist() == order.tolist()
        assert found.scores[row, : len(order)].tobytes() == scores[order].tobytes()
        assert (found.numbers[row, len(order) :] == -1).all()


def test_weights_filters_and_terms_twice(
    split: list[Path], postings_path: Path, documents: list[list[str]], queries: list[list[str]]
) -> None:
    marked = np.random.default_rng(5).random(len(documents)) < 0.3
    weighted = [{term: 0.1 + i for i, term in enumerate(query)} for query in queries]
    with SplitPostings(split) as postings, Postings.open(postings_path) as one:
        for options in (
            {"include": marked},
            {"exclude": np.flatnonzero(marked)},
            {"include": np.zeros(0, np.int64)},
            {},
        ):
            assert_same(postings.search(queries, 30, **options), one.search(queries, 30, **options))
            assert_same(
                postings.search(weighted, 30, variant="bm25+", **options),
                one.search(weighted, 30, variant="bm25+", **options),
            )
        assert_same(postings.search("w5 w9 nothing"), one.search("w5 w9 nothing"))
        assert_same(postings.search(tuple(queries[0])), one.search(tuple(queries[0])))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("as_arrays", [False, True])
def test_sparse_vectors(placement: str, exact: bool, as_arrays: bool, tmp_path: Path) -> None:
    """The largest weight stands in one part alone, and sets the steps of all; a list is long enough
    for two layers."""
    random, n = np.random.default_rng(3), 9001
    rows = [random.choice(300, 5, replace=False) for _ in range(n)]
    vectors = [
        {"0": 0.01 + float(random.random())} | {str(t): float(random.random()) for t in row if t}
        for row in rows
    ]
    vectors[4]["7"] = 91.5
    given: list[dict[str, float]] | CsrArrays = vectors
    if as_arrays:
        lengths = [len(vector) for vector in vectors]
        given = CsrArrays(
            np.cumsum([0, *lengths]),
            np.array([int(t) for v in vectors for t in v]),
            np.array([w for v in vectors for w in v.values()]),
        )
    Postings.build(tmp_path / "one", vectors=given, exact=exact)
    paths = directories(tmp_path, 3)
    build_split(paths, vectors=given, exact=exact, placement=placement)
    asked = [{"0": 0.7, "7": 1.3, "299": 0.2}, {"12": 1.0}, {"no": 1.0}]
    with SplitPostings(paths) as postings, Postings.open(tmp_path / "one") as one:
        assert_same(postings.search(asked, 200), one.search(asked, 200))
        assert_same(postings.search(asked, 200, exclude=[4]), one.search(asked, 200, exclude=[4]))
        assert sum(each.postings for each in postings.verify()) == one.verify().postings


def test_the_bytes_of_commands_and_replies(
    split: list[Path], documents: list[list[str]], queries: list[list[str]]
) -> None:
    """12 bytes for each of the k best of a device; or 8 for each posting, whatever k is."""
    k, query = 7, list(dict.fromkeys(queries[3]))
    with SplitPostings(split) as postings:
        found = postings.search([query], k)
        n = len(split)
        sent, df = np.zeros(n, np.int64), np.zeros(n, np.int64)
        for part, device in enumerate(postings.devices):
            segment = device.lists.segment  # type: ignore[attr-defined]
            has = set(segment.dictionary.hashes.tolist())
            words = [term for term in query if stored_terms.hash_of(term.encode()) in has]
            there = list(zip(words, numbers_of(segment, words).tolist(), strict=True))
            df[part] = sum(int(segment.dictionary.df[number]) for _, number in there)
            sent[part] = (
                HEADER_BYTES + sum(LIST.itemsize + WEIGHT.itemsize + len(term) for term, _ in there)
                if there
                else 0
            )
        by_passage = postings.placement == "passages"
        with_filter = postings.search([query], k, include=np.arange(9))
    assert (
        LIST.itemsize,
        WEIGHT.itemsize,
        SCAN_REPLY.itemsize,
        PARTIAL.itemsize,
        HEADER_BYTES,
    ) == (20, 16, 12, 8, 64)
    postings_of_query = sum(sum(term in document for document in documents) for term in query)
    assert df.sum() == postings_of_query
    assert found.command_bytes[0].tolist() == sent.tolist()
    assert (
        found.reply_bytes[0].tolist() == (12 * np.minimum(k, df) if by_passage else 8 * df).tolist()
    )
    assert (found.flash_bytes[0] % 4096 == 0).all()
    filters = [-(-len(range(part, len(documents), n)) // 8) for part in range(n)]
    assert (with_filter.command_bytes - found.command_bytes)[0].tolist() == (
        filters if by_passage else [0] * n
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_parts_without_records_or_terms(placement: str, tmp_path: Path) -> None:
    documents = [["a"], ["b", "a"], []]
    for i, texts in enumerate((documents, [], [[], []])):
        paths = directories(tmp_path / str(i), 5)
        (tmp_path / str(i)).mkdir()
        build_split(paths, terms=texts, placement=placement)
        Postings.build(tmp_path / str(i) / "one", terms=texts)
        with SplitPostings(paths) as postings, Postings.open(tmp_path / str(i) / "one") as one:
            assert_same(
                postings.search([["a"], ["b", "b"], ["c"]], 4),
                one.search([["a"], ["b", "b"], ["c"]], 4),
            )
            assert len(postings.verify()) == 5


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_terms_that_share_a_hash(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A term that no record has takes nothing from the list of one whose hash it shares, on any
    device."""
    whole, same = stored_terms.hash_of, {b"never seen": b"w1", b"nor this": b"w2"}
    monkeypatch.setattr(
        stored_terms,
        "hash_of",
        lambda data: whole(same.get(data, data)) >> (60 if len(data) == 3 else 0),
    )
    documents = corpus(60, seed=4, longest=9)
    paths = directories(tmp_path, 3)
    build_split(paths, terms=documents, placement=placement)
    Postings.build(tmp_path / "one", terms=documents)
    asked = [["w0", "never seen", "w1"], ["w2", "nor this"], ["w1", "w2", "w13", "w14", "w15"]]
    with SplitPostings(paths) as postings, Postings.open(tmp_path / "one") as one:
        for variant in ("lucene", "bm25l"):
            assert_same(
                postings.search(asked, 40, variant=variant), one.search(asked, 40, variant=variant)
            )
            # "never seen" stands between: it has no weight, and takes none away
            known = [["w0", "w1"], ["w2"], asked[2]]
            assert_same(
                postings.search(asked, 40, variant=variant),
                postings.search(known, 40, variant=variant),
            )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_damaged_list_names_its_directory_and_harms_nothing_else(
    placement: str, documents: list[list[str]], queries: list[list[str]], tmp_path: Path
) -> None:
    paths = directories(tmp_path, 4)
    build_split(paths, terms=documents, placement=placement)
    with SplitPostings(paths) as postings:
        asked = postings.search([["w0"]], 5)
        (part, *_) = np.flatnonzero(asked.command_bytes[0]).tolist()
        segment = postings.devices[part].lists.segment  # type: ignore[attr-defined]
        (number,) = numbers_of(segment, ["w0"]).tolist()
        offset = int(segment.dictionary.place(np.array([number]))[0][0])
        offset += segment.lists.offset_bytes
        lists = paths[part] / "s1.postings"
        data = bytearray(lists.read_bytes())
        data[offset + 40] ^= 16
        lists.write_bytes(bytes(data))
        for _ in range(2):
            with pytest.raises(errors.ChecksumError, match=f"part-{part}"):
                postings.search([*queries, ["w0"]], 5)
        without = [[term for term in query if term != "w0"] for query in queries]
        data[offset + 40] ^= 16
        whole = postings.search(without, 5)
        with pytest.raises(errors.ChecksumError, match=f"part-{part}"):
            postings.verify()
        lists.write_bytes(bytes(data))
        assert_same(postings.search(without, 5), whole)
        assert_same(postings.search([["w0"]], 5), asked)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("fault", ["error", "stale"])
def test_a_read_that_fails(
    placement: str, fault: str, documents: list[list[str]], queries: list[list[str]], tmp_path: Path
) -> None:
    paths = directories(tmp_path, 3)
    build_split(paths, terms=documents, placement=placement)
    with SplitPostings(paths) as postings:
        wanted = postings.search(queries, 9)
    value = 5 if fault == "error" else 0
    rule = FaultRule(
        fault=fault, operation="read", path="*part-1*.postings", nth=4, count=1, value=value
    )  # type: ignore[arg-type]
    with (
        NativeEngine("posix", rules=[rule]) as engine,
        SplitPostings(paths, engine=engine) as postings,
    ):
        with pytest.raises((errors.ReadError, *DAMAGED), match="part-1"):
            postings.search(queries, 9)
        assert_same(postings.search(queries, 9), wanted)


def test_directories_that_are_no_collection(documents: list[list[str]], tmp_path: Path) -> None:
    paths, others = directories(tmp_path, 3), directories(tmp_path / "other", 3)
    (tmp_path / "other").mkdir()
    build_split(paths, terms=documents[:20])
    build_split(others, terms=documents[:20])
    Postings.build(tmp_path / "one", terms=documents[:20])
    for wrong, match in (
        (paths[:2], "each once"),
        ([paths[0], paths[0], paths[2]], "each once"),
        ([*paths[:2], others[2]], "of one"),
        (tmp_path / "one", "a list"),
        ([tmp_path / "one"], "a part of a collection"),
        ([], "directories"),
        (None, "a list"),
        (b"one", "a list"),
        (3, "a list"),
        ([3], "directory"),
    ):
        with pytest.raises(errors.InvalidInputError, match=match):
            SplitPostings(wrong)  # type: ignore[arg-type]
    with pytest.raises(errors.StoreNotFoundError):
        SplitPostings([*paths[:2], tmp_path / "nothing"])
    for change in (
        lambda: espnx.postings.add(paths[1], ["a"]),
        lambda: espnx.postings.delete(paths[1], [0]),
        lambda: espnx.postings.compact(paths[1]),
    ):
        with pytest.raises(errors.InvalidInputError, match="part 1 of 3 of a collection"):
            change()
    with pytest.raises(errors.InvalidInputError, match="SplitPostings"):
        Postings.open(paths[0])


def test_wrong_arguments_of_builds(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    for wrong in (
        {"paths": paths, "terms": [["a"]], "placement": "records"},
        {"paths": paths},
        {"paths": paths, "texts": ["a"], "terms": [["a"]]},
        {"paths": [paths[0], paths[0]], "texts": ["a"]},
        {"paths": [], "texts": ["a"]},
        {"paths": str(paths[0]), "texts": ["a"]},
        {"paths": paths, "texts": ["a"], "memory_bytes": 0},
    ):
        with pytest.raises(errors.InvalidInputError):
            build_split(**wrong)  # type: ignore[arg-type]
    assert not any(path.exists() for path in paths)
    build_split(paths, ["a b c"])
    with pytest.raises(errors.InvalidInputError, match="already holds"):
        build_split(paths, ["a b c"])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_builds_in_little_memory_are_the_same(placement: str, tmp_path: Path) -> None:
    """By way of spools, a megabyte at a time."""
    documents = corpus(3000, seed=6)
    (tmp_path / "small").mkdir()
    small, large = directories(tmp_path / "small", 2), directories(tmp_path, 2)
    build_split(small, terms=documents, placement=placement, memory_bytes=1 << 20)
    build_split(large, terms=documents, placement=placement)
    for a, b in zip(small, large, strict=True):
        assert sorted(os.listdir(a)) == sorted(os.listdir(b))
        assert {
            name: (a / name).stat().st_size for name in os.listdir(a) if name.startswith("s1")
        } == {name: (b / name).stat().st_size for name in os.listdir(b) if name.startswith("s1")}
    asked = corpus(10, seed=1, longest=5)
    with SplitPostings(small) as postings, SplitPostings(large) as wanted:
        assert_same(postings.search(asked, 50), wanted.search(asked, 50))


def test_lists_are_placed_evenly(documents: list[list[str]], tmp_path: Path) -> None:
    """By bytes, within the longest list of an even share."""
    paths = directories(tmp_path, 4)
    build_split(paths, terms=documents, placement="terms")
    with SplitPostings(paths) as postings:
        held = [device.lists.segment.dictionary for device in postings.devices]  # type: ignore[attr-defined]
        sizes = [each.lists_bytes for each in held]
        longest = max(int(np.diff(each.first.astype(np.int64)).max()) * 64 for each in held)
    assert max(sizes) - min(sizes) <= longest
    assert len({name for each in held for name in each.hashes.tolist()}) == sum(
        len(each) for each in held
    )


def test_an_interrupted_build_is_built_again(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    build_split(paths, ["a b", "b c"], placement="terms")
    os.unlink(paths[1] / "MANIFEST.json")
    with pytest.raises(errors.StoreNotFoundError):
        SplitPostings(paths)
    shutil.rmtree(paths[0])
    build_split(paths, ["aa bb", "bb cc"], placement="terms")
    with SplitPostings(paths) as postings:
        assert postings.search("cc").numbers[0, 0] == 1


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_many_threads_ask_at_once(
    placement: str, documents: list[list[str]], queries: list[list[str]], tmp_path: Path
) -> None:
    paths = directories(tmp_path, 3)
    build_split(paths, terms=documents, placement=placement)
    with SplitPostings(paths) as postings, ThreadPoolExecutor(6) as pool:
        wanted = postings.search(queries, 20)
        for found in pool.map(lambda _: postings.search(queries, 20), range(12)):
            assert_same(found, wanted)


def test_a_forked_child_is_refused(documents: list[list[str]], tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    build_split(paths, terms=documents[:50])

    def child() -> str:
        with pytest.raises(errors.InvalidInputError, match="after fork") as caught:
            postings.search([["w0"]])
        return str(caught.value)

    with SplitPostings(paths) as postings:
        wanted = postings.search([["w0"]])
        assert "parent process" in in_child(child)
        assert_same(postings.search([["w0"]]), wanted)


def test_searches_after_closing_are_refused(documents: list[list[str]], tmp_path: Path) -> None:
    build_split([tmp_path / "part"], terms=documents[:50])
    postings = SplitPostings([tmp_path / "part"])
    postings.close()
    postings.close()
    with pytest.raises(errors.EngineClosedError):
        postings.search([["w0"]])
