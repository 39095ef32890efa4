"""What a store asks of a first stage, of every kind alike: one that stands in these tests alone
does all that inverted lists do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx
from espnx import errors
from espnx.retrieval.build import builder
from espnx.retrieval.first_stage import registry
from espnx.retrieval.first_stage.clusters import stage as clusters
from espnx.retrieval.first_stage.clusters.stage import ClusterSettings, ClusterStage
from espnx.retrieval.first_stage.document_vector import DocumentVector
from espnx.retrieval.first_stage.graph import stage as graph
from espnx.retrieval.first_stage.graph.stage import GraphStage
from espnx.retrieval.first_stage.interface import Documents, Entries, StoredEntries
from espnx.retrieval.first_stage.ivf.stage import IvfStage
from espnx.retrieval.first_stage.several import SeveralStages
from tests.retrieval.common import (
    EVERYTHING,
    assert_ranks_as_written,
    build,
    corpus,
    queries,
    replace_section,
    section_places,
)
from tests.retrieval.stages import ExactStage, InMemoryDocuments, InMemoryEntries, LoadedExact

DOCUMENTS = corpus(260)


@pytest.fixture(autouse=True)
def known_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    monkeypatch.setattr(graph, "FLAT_MAX", 40)  # or none of these parts would have a graph
    monkeypatch.setattr(clusters, "FLAT_MAX", 40)  # or lists
    registry.register("exact", ExactStage.__module__, "ExactStage")


#: What a build is told, where it is not the kind itself.
NAMED = {"several": ("graph", "ivf")}


@pytest.fixture(params=["ivf", "exact", "graph", "clusters", "several"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check(path: Path, kind: str, documents: list[espnx.Document]) -> None:
    """The store says of what kind it is, verifies, and ranks all that is alive, and some of it, as
    the documents say."""
    with espnx.open(path) as index:
        assert index.store.manifest.first_stage.kind == kind
        assert isinstance(index.first_stage, LoadedExact) == (kind == "exact")
        assert index.store.verify() == len(documents)
        assert_ranks_as_written(index, documents)
        some = [document.id for document in documents[::3]]
        for step in (0, 0.3):
            found = index.search(
                queries(1)[0],
                k=EVERYTHING,
                candidates=EVERYTHING,
                include=some,
                exclude=some[:5],
                prefetch_step=step,
            )
            assert {hit.id for hit in found} == set(some[5:])
        rates = [
            index.search(query, k=9, candidates=20, prefetch_step=1.0).hit_rate
            for query in queries(2)
        ]
        assert rates == [1.0, 1.0] or not documents


def test_a_life(folder: Path, kind: str) -> None:
    """Built, added to until parts merge, replaced, deleted from, compacted, emptied, and filled
    again."""
    path = folder / "s"
    report = build(path, DOCUMENTS[:150], first_stages=NAMED.get(kind, kind), coarse="bit1")
    assert report.first_stage["kind"] == kind
    check(path, kind, DOCUMENTS[:150])
    merged = 0
    for number in range(150, 165):
        merged += espnx.add(path, DOCUMENTS[number : number + 1]).merged
    assert merged > 0
    espnx.add(path, DOCUMENTS[165:])
    check(path, kind, DOCUMENTS)
    other = [replace(DOCUMENTS[200], vectors=DOCUMENTS[7].vectors)]
    espnx.add(path, other, replace=True)
    espnx.delete(path, [document.id for document in [*DOCUMENTS[:20], *DOCUMENTS[160:170]]])
    left = [*DOCUMENTS[20:160], *DOCUMENTS[170:200], *other, *DOCUMENTS[201:]]
    check(path, kind, left)
    assert espnx.compact(path).documents == len(left)
    check(path, kind, left)
    espnx.delete(path, [document.id for document in left])
    espnx.compact(path)
    check(path, kind, [])
    espnx.add(path, DOCUMENTS[:30])
    check(path, kind, DOCUMENTS[:30])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", ["train", "add", "tune"])
def test_interrupted_and_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, place: str
) -> None:
    stage = registry._class_of(kind)

    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage, place, stop)
        with pytest.raises(KeyboardInterrupt):
            build(folder / "s", DOCUMENTS, first_stages=NAMED.get(kind, kind))
    assert build(
        folder / "s", DOCUMENTS, first_stages=NAMED.get(kind, kind)
    ).resumed_documents == len(DOCUMENTS)
    check(folder / "s", kind, DOCUMENTS)


def test_resumed_where_its_entries_are_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What the second pass left is taken, not made again; and not taken where it is damaged."""

    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(builder, "publish", stop)
        with pytest.raises(KeyboardInterrupt):
            build(folder / "s", DOCUMENTS, first_stages=NAMED.get(kind, kind))
    order = folder / "s" / "building" / "order.i64"
    whole = order.read_bytes()
    order.write_bytes(whole[:-8] + whole[:8])
    with pytest.raises(errors.ChecksumError, match="spool is damaged"):
        build(folder / "s", DOCUMENTS, first_stages=NAMED.get(kind, kind))
    order.write_bytes(whole)
    with monkeypatch.context() as patch:
        patch.setattr(registry._class_of(kind), "add", stop)
        assert build(
            folder / "s", DOCUMENTS, first_stages=NAMED.get(kind, kind)
        ).resumed_documents == len(DOCUMENTS)
    check(folder / "s", kind, DOCUMENTS)


def test_the_text_of_a_query_arrives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that looks words up needs what was asked, not its vectors."""
    from tests.retrieval.common import toy_encoder

    build(
        folder / "s",
        [(i, f"text {i}") for i in range(20)],
        encoder=toy_encoder(),
        dims=None,
        first_stages="exact",
    )
    seen: list[str | None] = []
    whole = LoadedExact.start

    def start(self: LoadedExact, prepared: Any, *rest: Any, **options: Any) -> Any:
        seen.extend(text for text, _ in prepared)
        return whole(self, prepared, *rest, **options)

    monkeypatch.setattr(LoadedExact, "start", start)
    with espnx.open(folder / "s", toy_encoder()) as index:
        index.search(["text 3", queries(1)[0], "text 4"])
    assert seen == ["text 3", None, "text 4"]


def test_texts_of_documents_can_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build's and an addition's, in the order in which they came."""
    seen: list[list[str]] = []
    whole = ExactStage.add

    def add(self: ExactStage, documents: Documents) -> Entries:
        seen.append(list(documents.texts()))
        assert len(seen[-1]) == len(documents)
        return whole(self, documents)

    monkeypatch.setattr(ExactStage, "add", add)
    build(folder / "s", DOCUMENTS[:100], first_stages="exact")
    espnx.add(folder / "s", DOCUMENTS[100:120])
    assert seen == [[d.text for d in DOCUMENTS[:100]], [d.text for d in DOCUMENTS[100:120]]]


@pytest.mark.parametrize("wrong", [[0, 0], [0], [0, 1, 2], [-1, 0], [1, 2]])
def test_an_order_that_loses_or_repeats_documents(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: list[int]
) -> None:
    """Whatever a first stage says: no document is lost and none is stored twice."""
    build(folder / "s", DOCUMENTS[:20], first_stages="exact")
    espnx.add(folder / "s", DOCUMENTS[20:22])
    before = (folder / "s" / "MANIFEST.json").read_bytes()

    def entries(self: ExactStage, *args: Any) -> Entries:
        return Entries(
            [np.array(wrong)], {"vectors": [np.zeros((len(wrong), self.vector_dim), "f4")]}
        )

    def compacted(self: ExactStage, parts: list[StoredEntries], deleted: np.ndarray) -> Any:
        return self, entries(self)

    monkeypatch.setattr(ExactStage, "add", entries)
    monkeypatch.setattr(ExactStage, "compact", compacted)
    for change in (
        lambda: build(folder / "t", DOCUMENTS[:2], first_stages="exact"),
        lambda: espnx.add(folder / "s", DOCUMENTS[22:24]),
        lambda: espnx.compact(folder / "s"),
    ):
        with pytest.raises(errors.InvalidInputError, match="order of a first stage"):
            change()
    assert (folder / "s" / "MANIFEST.json").read_bytes() == before
    check(folder / "s", "exact", DOCUMENTS[:22])


def test_a_section_of_another_size(folder: Path, kind: str) -> None:
    """Found when the store is opened, and by verify."""
    build(folder / "s", DOCUMENTS[:20], first_stages=NAMED.get(kind, kind))
    file = next((folder / "s").glob("gen-*/part.bin"))
    name = {
        "ivf": "stage.codes",
        "exact": "stage.vectors",
        "graph": "stage.vectors",
        "clusters": "stage.vectors",
        "several": "stage.ivf.codes",
    }[kind]
    place = section_places(file)[name]
    replace_section(
        folder / "s",
        file,
        name,
        file.read_bytes()[place.offset_bytes : place.offset_bytes + place.size_bytes - 4],
    )
    with pytest.raises(errors.FormatError, match="do not fit the part"):
        espnx.open(folder / "s")


@pytest.mark.parametrize("name", ["", "Codes", "a.b.c", "../x", "seventeenletters_"])
def test_names_of_sections(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(
        ExactStage,
        "add",
        lambda self, documents, order=None: Entries([np.arange(2)], {name: [np.zeros(3)]}),
    )
    with pytest.raises(errors.InvalidInputError, match="section of a first stage"):
        build(folder / "s", DOCUMENTS[:2], first_stages="exact")


def test_kinds_that_are_unknown_or_taken(folder: Path) -> None:
    with pytest.raises(
        errors.InvalidInputError,
        match=r"first-stage kind.*bm25, clusters, exact, graph, ivf or splade",
    ):
        build(folder / "s", DOCUMENTS[:2], first_stages="hnsw")
    with pytest.raises(errors.InvalidInputError, match="first-stage kind 'ivf'"):
        registry.register("ivf", "somebody", "Else")
    build(folder / "s", DOCUMENTS[:2], first_stages="exact")
    del registry._KINDS["exact"]
    with pytest.raises(errors.FormatError, match=r"first_stage\.kind"):
        espnx.open(folder / "s")


@pytest.fixture
def stages() -> dict[str, Any]:
    of = DocumentVector(None, 16)
    ivf, graph = IvfStage(of, "flat", wanted_lists=5), GraphStage(of)
    return {
        "exact": ExactStage(16),
        "ivf": ivf,
        "graph": graph,
        "clusters": ClusterStage(of, ClusterSettings(list_bytes=400)),
        "several": SeveralStages.of([graph, ivf]),
    }


def test_alone(kind: str, stages: dict[str, Any]) -> None:
    """Without any store: entries of two parts, merged without those that are deleted, find what
    NumPy finds."""
    rng = np.random.default_rng(0)
    # what every kind stores as it is
    vectors = rng.normal(size=(200, 16)).astype("f2").astype("f4")
    stage = stages[kind].train(InMemoryDocuments(vectors), 1 << 30)
    first = InMemoryEntries(stage.add(InMemoryDocuments(vectors[:130])))
    second = InMemoryEntries(stage.add(InMemoryDocuments(vectors[130:])), first_number=192)
    assert sorted(first.order.tolist()) == list(range(130))
    of_record = np.full((192 + 70, 16), np.nan, "f4")
    of_record[:130], of_record[192:] = vectors[:130][first.order], vectors[130:][second.order]
    deleted = np.packbits(np.arange(200) % 3 == 0, bitorder="little")
    alive = np.array([i for i in [*range(130), *range(192, 262)] if i >= 200 or i % 3])
    merged = InMemoryEntries(stage.merge([first, second], deleted))
    assert sorted(merged.order.tolist()) == alive.tolist()
    changed, entries = stage.compact([first, second], deleted)
    compacted = InMemoryEntries(entries)
    query = espnx.Encoded(queries(1)[0].cls, queries(1)[0].tokens)
    wanted = of_record[alive] @ query.cls.numpy()
    best = alive[np.lexsort((alive, -wanted))][:40]
    for loaded, number_of in (
        (stage.load([merged]), merged.order),
        (changed.load([compacted]), compacted.order),
    ):
        numbers, scores = loaded.start([loaded.prepare(query)], 40, EVERYTHING).complete()[0]
        assert number_of[numbers].tolist() == best.tolist()
        assert np.allclose(scores, np.sort(wanted)[::-1][:40], atol=1e-4)
        assert loaded.search_bytes(40, None, None, 0) > 0
        loaded.close()
