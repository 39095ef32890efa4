"""BM25 and sparse vectors as first stages: held against bm25s and against products of dense
matrices, over a store's whole life."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pytest

import espnx
from espnx import errors
from espnx.graph.index import GraphIndex
from espnx.postings.analyzer import Analyzer
from espnx.postings.search.search import PostingsSearch
from espnx.retrieval.first_stage.graph import stage as graph
from espnx.retrieval.sparse_encoder import SparseVector
from tests.retrieval.common import build, corpus, queries, toy_encoder

RNG = np.random.default_rng(0)
#: Frequent ones first: their lists are of nearly every document.
WORDS = [f"word{i}" for i in range(80)]


def some_text(rng: np.random.Generator, most: int = 30) -> str:
    return " ".join(WORDS[int(80 * rng.random() ** 3)] for _ in range(int(rng.integers(0, most))))


DOCUMENTS = [
    replace(document, text=some_text(np.random.default_rng(i)))
    for i, document in enumerate(corpus(400))
]
ASKED = [
    *(some_text(np.random.default_rng(10_000 + i), 7) for i in range(12)),
    "",
    "nobody wrote this",
    "word0",
    "word0 word0 word3",
]


class Counting:
    """A sparse encoder of a kind: a term for each word, its weight how often it comes."""

    name, vocabulary = "counting", WORDS

    def encode_documents(self, texts: list[str]) -> list[SparseVector]:
        made = []
        for text in texts:
            numbers, counts = np.unique(
                [WORDS.index(word) for word in text.split() if word in WORDS], return_counts=True
            )
            made.append(SparseVector(numbers.astype(np.int32), counts.astype(np.float32)))
        return made

    encode_queries = encode_documents


def bm25_of(documents: list[espnx.Document], text: str) -> dict[Any, float]:
    """By id, of documents that have a word of the query: what bm25s says of them."""
    analyzer = Analyzer(stop_words="english", stemmer="english")
    terms = [analyzer.terms(document.text) for document in documents]
    model = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
    model.index(terms, show_progress=False)
    wanted = [term for term in analyzer.terms(text) if any(term in each for each in terms)]
    if not wanted:
        return {}
    scores = model.get_scores(wanted)
    return {document.id: float(scores[i]) for i, document in enumerate(documents) if scores[i] > 0}


def products_of(documents: list[espnx.Document], text: str) -> dict[Any, float]:
    asked = {word: text.split().count(word) for word in text.split()}
    sums = {
        document.id: float(
            sum(count * document.text.split().count(word) for word, count in asked.items())
        )
        for document in documents
    }
    return {name: score for name, score in sums.items() if score > 0}


def check(path: Path, documents: list[espnx.Document]) -> None:
    with espnx.open(path, toy_encoder()) as index:
        assert index.store.verify() == len(documents)
        for kind, said, tolerance in (("bm25", bm25_of, 1e-6), ("splade", products_of, 2e-2)):
            results = [
                index.search(text, k=500, candidates=500, rerank=0, first_stage=kind)
                for text in ASKED
            ]
            for text, found in zip(ASKED, results, strict=True):
                wanted = said(documents, text)
                assert {hit.id for hit in found} == set(wanted), (kind, text)
                assert [hit.score for hit in found] == pytest.approx(
                    [wanted[hit.id] for hit in found], rel=tolerance
                ), (kind, text)
            together = index.search(ASKED, k=500, candidates=500, rerank=0, first_stage=kind)
            assert [each.hits for each in together] == [each.hits for each in results]
            for steps in (0.2, (0.1, 0.6)):
                early = index.search(
                    ASKED[0], k=500, candidates=500, first_stage=kind, prefetch_step=steps
                )
                assert (
                    early.hits
                    == index.search(
                        ASKED[0], k=500, candidates=500, first_stage=kind, prefetch_step=0
                    ).hits
                )
        some = [document.id for document in documents[::3]]
        found = index.search("word0 word1", k=500, rerank=0, first_stage="bm25", include=some)
        scores = bm25_of(documents, "word0 word1")
        assert {hit.id: hit.score for hit in found} == pytest.approx(
            {name: scores[name] for name in some if name in scores}, rel=1e-6
        )


@pytest.mark.parametrize("named", [("ivf", "bm25", "splade"), ("bm25", "splade")])
def test_a_life(folder: Path, monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...]) -> None:
    """Scores are those of the documents that are there, after every change, as if they had been
    built at once."""
    path = folder / "s"
    monkeypatch.setattr(
        "espnx.retrieval.first_stage.lexical.stage.remembered_sparse_encoder",
        lambda name: Counting(),
    )
    build(path, DOCUMENTS[:250], first_stages=named, sparse_encoder=Counting())
    check(path, DOCUMENTS[:250])
    for number in range(250, 265):
        espnx.add(path, DOCUMENTS[number : number + 1])
    espnx.add(path, DOCUMENTS[265:])
    check(path, DOCUMENTS)
    other = [replace(DOCUMENTS[300], text="word0 word79 word79")]
    espnx.add(path, other, replace=True)
    espnx.delete(path, [document.id for document in [*DOCUMENTS[:40], *DOCUMENTS[255:262]]])
    left = [*DOCUMENTS[40:255], *DOCUMENTS[262:300], *DOCUMENTS[301:], *other]
    check(path, left)
    assert espnx.compact(path).documents == len(left)
    check(path, left)


def test_queries_without_text(folder: Path) -> None:
    build(folder / "s", DOCUMENTS[:20], first_stages=("ivf", "bm25"))
    with espnx.open(folder / "s") as index:
        assert len(index.search(queries(1)[0], k=3)) == 3
        for named in ("bm25", ("ivf", "bm25")):
            with pytest.raises(errors.InvalidInputError, match=r"query of bm25.*text"):
                index.search(queries(1)[0], first_stage=named)


def test_words_alone_need_no_vectors(folder: Path) -> None:
    """Where nothing is scored by vectors, no text is encoded, and no encoder is needed."""
    build(folder / "s", DOCUMENTS[:60], first_stages=("ivf", "bm25"))
    encoder = toy_encoder()
    with espnx.open(folder / "s", encoder) as index:
        whole = [index.search(text, k=60, first_stage="bm25", rerank=0).hits for text in ASKED]
        assert any(whole)
    with espnx.open(folder / "s", None) as index:
        assert [
            index.search(text, k=60, first_stage="bm25", rerank=0).hits for text in ASKED
        ] == whole
        assert [
            result.hits for result in index.search(ASKED, k=60, first_stage="bm25", rerank=0)
        ] == whole
        for options in (
            {"rerank": None},
            {"rerank": 0, "explain": True},
            {"rerank": 0, "first_stage": ("bm25", "ivf")},
        ):
            with pytest.raises(errors.InvalidInputError, match="no encoder"):
                index.search(ASKED[0], **{"first_stage": "bm25", **options})


def test_other_words(folder: Path) -> None:
    """Without a language words stand as they are written; one that has no stemmer is refused before
    anything is encoded."""
    documents = [
        replace(DOCUMENTS[0], text="the running horses"),
        replace(DOCUMENTS[1], text="a horse runs"),
    ]
    for language, found in (("english", 2), ("none", 1)):
        path = folder / language
        build(path, documents, first_stages="bm25", language=language)
        with espnx.open(path, toy_encoder()) as index:
            assert len(index.search("horses", rerank=0)) == found
    with pytest.raises(errors.InvalidInputError, match="klingon"):
        build(folder / "t", documents, first_stages="bm25", language="klingon")


@pytest.mark.parametrize(
    "section", ["stage.bm25.dict", "stage.bm25.lengths", "stage.bm25.lists", "stage.bm25.terms"]
)
def test_damage(folder: Path, section: str) -> None:
    """Found when the store is opened, or by the search that comes across it; a store that verifies
    has none."""
    from tests.retrieval.common import section_places

    build(folder / "s", DOCUMENTS[:200], first_stages=("ivf", "bm25"))
    file = next((folder / "s").glob("gen-*/part.bin"))
    place, data = section_places(file)[section], bytearray(file.read_bytes())
    for at in (
        place.offset_bytes + place.size_bytes // 2,
        place.offset_bytes,
        place.offset_bytes + place.size_bytes - 9,
    ):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        file.write_bytes(damaged)
        with pytest.raises(errors.EspnxError), espnx.open(folder / "s", toy_encoder()) as index:
            for word in WORDS:
                index.search(word, first_stage="bm25", rerank=0)
            index.store.verify()


def test_given_to_a_store_that_is_there(folder: Path) -> None:
    """Posting lists beside what it has, over the same records; the rankings of what it had stay,
    and it may grow on."""
    path = folder / "s"
    build(path, DOCUMENTS[:200], first_stages="ivf")
    espnx.add(path, DOCUMENTS[200:260])
    espnx.delete(path, [document.id for document in DOCUMENTS[:30]])
    with espnx.open(path, toy_encoder()) as index:
        before = [(hit.id, hit.score) for hit in index.search(queries(1)[0], k=20)]
    assert espnx.add_first_stage(path, "bm25").documents == 230
    espnx.add_first_stage(path, "splade", sparse_encoder=Counting())  # type: ignore[arg-type]
    for kind in ("bm25", "splade", "ivf", "graph"):
        with pytest.raises(errors.InvalidInputError, match="first stage to add"):
            espnx.add_first_stage(path, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "espnx.retrieval.first_stage.lexical.stage.remembered_sparse_encoder",
            lambda name: Counting(),
        )
        check(path, DOCUMENTS[30:260])
        espnx.add(path, DOCUMENTS[260:])
        check(path, DOCUMENTS[30:])
    espnx.delete(path, [document.id for document in DOCUMENTS[260:]])
    with espnx.open(path, toy_encoder()) as index:
        assert [
            (hit.id, hit.score) for hit in index.search(queries(1)[0], k=20, first_stage="ivf")
        ] == before


def test_what_was_spilled_goes_with_what_it_was_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that did not fit in memory lie beside what is being written; what a killed build has
    left of them, the next one removes."""
    monkeypatch.setattr("espnx.retrieval.first_stage.lexical.stage._MEMORY_BYTES", 1 << 18)
    path = folder / "s"
    killed: list[Path] = []

    def kill(self: Any, *args: Any, **named: Any) -> Any:
        killed.extend(path.glob("**/spool-*.tmp"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("espnx.postings.build.writer.SegmentWriter.sections", kill)
        with pytest.raises(KeyboardInterrupt):
            build(path, DOCUMENTS[:300], first_stages=("ivf", "bm25"))
    assert killed
    (path / "building" / "spool-0123abcd-3.tmp").write_bytes(b"of a process that was killed")
    build(path, DOCUMENTS[:300], first_stages=("ivf", "bm25"))
    assert not list(path.glob("**/spool-*"))
    generation = next(path.glob("gen-*"))
    (generation / "spool-0123abcd-f0.tmp").write_bytes(b"of a process that was killed")
    espnx.compact(path)
    assert not list(path.glob("**/spool-*"))
    assert not generation.exists()
    with espnx.open(path, toy_encoder()) as index:
        assert {
            hit.id for hit in index.search("word0", k=400, rerank=0, first_stage="bm25")
        } == set(bm25_of(DOCUMENTS[:300], "word0"))


def test_a_model_that_no_store_remembers(folder: Path) -> None:
    """One out of a folder has to be named wherever texts are encoded; another one is refused, and
    so is one where nothing encodes."""
    path = folder / "s"
    build(path, DOCUMENTS[:120], first_stages=("splade", "bm25"), sparse_encoder=Counting())

    class Other(Counting):
        name = "other"  # type: ignore[assignment]

    with espnx.open(path, toy_encoder()) as index:
        assert len(index.search("word1", first_stage="bm25", rerank=0))
        with pytest.raises(errors.InvalidInputError):
            index.search("word1", first_stage="splade")
    with pytest.raises(errors.InvalidInputError):
        espnx.add(path, DOCUMENTS[120:130])
    with pytest.raises(errors.InvalidInputError, match="another sparse encoder"):
        espnx.open(path, toy_encoder(), sparse_encoder=Other())
    assert espnx.add(path, DOCUMENTS[120:130], sparse_encoder=Counting()).documents == 10
    with espnx.open(path, toy_encoder(), sparse_encoder=Counting()) as index:
        found = index.search("word1 word2", k=400, candidates=400, rerank=0, first_stage="splade")
        assert {hit.id for hit in found} == set(products_of(DOCUMENTS[:130], "word1 word2"))
        espnx.delete(path, [DOCUMENTS[0].id])
        assert index.reload()
        assert len(index.search("word1", first_stage="splade"))
    for kind in ("ivf", "bm25"):
        build(folder / kind, DOCUMENTS[:20], first_stages=kind)
        with pytest.raises(errors.InvalidInputError, match="first stage of splade"):
            espnx.open(folder / kind, toy_encoder(), sparse_encoder=Counting())


@pytest.mark.parametrize("named", ["bm25", "graph", ("bm25", "graph"), ("graph", "bm25")])
def test_a_deadline_reaches_the_reads_of_first_stages(
    folder: Path, monkeypatch: pytest.MonkeyPatch, named: str | tuple[str, ...]
) -> None:
    monkeypatch.setattr(graph, "FLAT_MAX", 40)  # or there would be no graph
    build(folder / "s", DOCUMENTS[:150], first_stages=("graph", "bm25"))
    seen: dict[str, set[float]] = {}

    def note(kind: str, cls: type, method: str) -> None:
        real = getattr(cls, method)

        def noted(self: Any, *given: Any, **options: Any) -> Any:
            seen.setdefault(kind, set()).add(options.get("deadline_s", 30.0))
            return real(self, *given, **options)

        monkeypatch.setattr(cls, method, noted)

    for method in ("begin", "search"):
        note("bm25", PostingsSearch, method)
    note("graph", GraphIndex, "start")
    with espnx.open(folder / "s", encoder=toy_encoder()) as index:
        for asked in ("word0 word3", ["word0"] * 9):
            index.search(asked, first_stage=named, deadline_s=7.5)
            index.search(asked, first_stage=named, deadline_s=7.5, prefetch_step=0.5)
    assert seen == {kind: {7.5} for kind in ((named,) if isinstance(named, str) else named)}
