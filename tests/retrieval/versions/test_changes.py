"""Add, delete, compact: after every change the store ranks as its live documents say, bit for bit
as a store built of them anew."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.cli.main import main
from espnx.ops.maxsim import token_format
from espnx.retrieval.build import builder as building
from espnx.retrieval.build.changes import compact as compacting
from espnx.retrieval.versions import segments
from espnx.storage.lock import DirectoryLock
from tests.retrieval.common import (
    D_CLS,
    EVERYTHING,
    assert_ranking,
    corpus,
    exact_scores,
    leftovers,
    queries,
    toy_encoder,
)
from tests.retrieval.common import build as build_store

DIM = 16
DOCUMENTS = corpus(200, dim=DIM)
EVERY: dict[str, Any] = {"k": EVERYTHING, "candidates": EVERYTHING, "nprobe": EVERYTHING}
Ranking = list[dict[Any, tuple[float, str]]]


def build(path: Path, documents: Iterable[Any], **options: Any) -> None:
    build_store(path, documents, **{"dims": (D_CLS, DIM), **options})


def ids_of(documents: Iterable[espnx.Document]) -> list[str]:
    return [str(document.id) for document in documents]


def ranking_of(index: espnx.Index, wanted: Sequence[espnx.Encoded] | None = None) -> Ranking:
    """Score and text by id for some queries, re-ranked and as the first stage has it, once the
    order of the hits was found right."""
    rankings = []
    for query, rerank in itertools.product(
        queries(3, dim=DIM) if wanted is None else wanted, (None, 0)
    ):
        hits = index.search(query, **EVERY, rerank=rerank).hits
        assert [hit.id for hit in hits] == [
            hit.id
            for hit in sorted(hits, key=lambda hit: (-hit.score, isinstance(hit.id, str), hit.id))
        ]
        rankings.append({hit.id: (hit.score, hit.text) for hit in hits})
        assert len(rankings[-1]) == len(hits), "a document occurs twice"
    return rankings


def ranking(path: Path, wanted: Sequence[espnx.Encoded] | None = None) -> Ranking:
    """Of a store that verifies and holds no file that its manifest does not name."""
    with espnx.open(path) as index:
        found = ranking_of(index, wanted)
        assert index.store.verify() == index.store.count == len(found[0])
    assert_tidy(path)
    return found


def without(found: Ranking, gone: Iterable[Any]) -> Ranking:
    dropped = set(gone)
    return [{key: value for key, value in each.items() if key not in dropped} for each in found]


def assert_tidy(path: Path) -> None:
    """Every file in the store's directory is one that the manifest names, and the other way
    round."""
    manifest = json.loads((path / "MANIFEST.json").read_text())
    named = {part["path"] for part in manifest["parts"]}
    named |= {
        segment["path"]
        for part in manifest["parts"]
        for tier in part["segments"].values()
        for segment in tier
    }
    named |= {manifest["deleted"]["path"]} if manifest["deleted"] else set()
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {
        "MANIFEST.json",
        "LOCK",
    }
    assert found == {name for name in named if not name.startswith("/")}
    assert leftovers(path) == {name.split("/")[0] for name in named if not name.startswith("/")}


def check(path: Path, documents: Sequence[espnx.Document], fmt: str = "fp16") -> Ranking:
    """The store ranks as the documents' own vectors say. Returns the ranking."""
    texts = {document.id: document.text for document in documents}
    with espnx.open(path) as index:
        assert index.store.count == len(documents)
        for query in queries(3, dim=DIM):
            hits = index.search(query, **EVERY).hits
            assert {hit.id: hit.text for hit in hits} == texts
            assert_ranking(hits, *exact_scores(documents, query, 1.0, fmt))
    return ranking(path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", ["fp16", "fp32"])
@pytest.mark.parametrize("sizes", [(70, 50, 1), (64, 64, 64), (1, 130, 63)])
def test_every_step_ranks_as_the_documents_say(
    folder: Path, fmt: str, sizes: tuple[int, ...]
) -> None:
    """Build, add, add, delete from every part, compact: each as a brute force over the documents,
    and as a store built of them."""
    path, first, second = folder / "s", sizes[0], sizes[0] + sizes[1]
    build(path, DOCUMENTS[:first], format=fmt)
    for number, (begin, end) in enumerate([(first, second), (second, sum(sizes))]):
        report = espnx.add(path, iter(DOCUMENTS[begin:end]))
        assert (report.documents, report.generation) == (end - begin, number + 2)
        whole = check(path, DOCUMENTS[:end], fmt)
    gone = ids_of(DOCUMENTS[: sum(sizes) : 3])
    assert espnx.delete(path, iter(gone)) == len(gone)
    alive = [document for document in DOCUMENTS[: sum(sizes)] if document.id not in gone]
    left = check(path, alive, fmt)
    assert left == without(whole, gone)
    with espnx.open(path) as index:
        assert len(index.store.parts) == 3
        for k in (1, 7):  # the deleted take nobody's place
            hits = index.search(queries(1, dim=DIM)[0], k=k, candidates=k, nprobe=EVERYTHING).hits
            assert len(hits) == k
            assert not {hit.id for hit in hits} & set(gone)
        assert index.search(queries(1, dim=DIM)[0], include=gone).hits == []
    compacted = espnx.compact(path)
    assert (compacted.documents, compacted.dropped, compacted.parts, compacted.generation) == (
        len(alive),
        len(gone),
        3,
        5,
    )
    assert compacted.size_bytes == sum(file.stat().st_size for file in path.rglob("*.bin"))
    assert check(path, alive, fmt) == left
    build(folder / "fresh", alive, format=fmt)
    assert ranking(folder / "fresh") == left


def test_deleting_more_and_more(folder: Path) -> None:
    """The bitmap grows with what is added, and keeps what was deleted before."""
    path, gone = folder / "s", set[str]()
    build(path, DOCUMENTS[:9])
    for first in range(9, 189, 20):
        mine: set[str] = {f"doc-{first - 1}", f"doc-{first // 2}"} - gone
        gone |= mine
        assert espnx.delete(path, sorted(mine)) == len(mine)
        espnx.add(path, DOCUMENTS[first : first + 20])
        with espnx.open(path) as index:
            assert index.store.verify() == first + 20 - len(gone)
    alive = [document for document in DOCUMENTS[:189] if document.id not in gone]
    left = check(path, alive)
    espnx.compact(path)
    assert check(path, alive) == left


def test_ids_stay(folder: Path) -> None:
    """Numbers and words, also where they look alike; the smallest and the largest; none changes its
    document."""
    ids: list[Any] = [7, "7", 0, "", -(2**63), 2**63 - 1, "ä/ö", "doc 1", *range(1000, 1060)]
    documents = [
        espnx.Document(i, f"text of {i!r}", DOCUMENTS[n].vectors) for n, i in enumerate(ids)
    ]
    path = folder / "s"
    build(path, documents[:3])
    for begin, end in [(3, 6), (6, len(ids))]:
        espnx.add(path, documents[begin:end])
    check(path, documents)
    gone: list[Any] = [0, "7", 2**63 - 1, 1003]
    espnx.delete(path, gone)
    alive = [document for document in documents if document.id not in gone]
    for _ in range(2):
        check(path, alive)
        with espnx.open(path) as index:
            for document in alive:
                hits = index.search(queries(1, dim=DIM)[0], include=[document.id]).hits
                assert [(hit.id, type(hit.id), hit.text) for hit in hits] == [
                    (document.id, type(document.id), document.text)
                ]
        espnx.compact(path)


def refused(path: Path, change: Callable[[], object], said: str) -> None:
    """A typed error; store and ranking stay, and the next change works."""
    manifest, before = (path / "MANIFEST.json").read_bytes(), ranking(path)
    with pytest.raises(errors.InvalidInputError, match=said):
        change()
    assert_tidy(path)
    assert (path / "MANIFEST.json").read_bytes() == manifest
    with espnx.open(path) as index:
        assert ranking_of(index) == before
    spare = espnx.Document("spare", "spare", DOCUMENTS[199].vectors)
    espnx.add(path, [spare])
    assert without(ranking(path), ["spare"]) == before
    espnx.delete(path, ["spare"])
    assert ranking(path) == before


def test_what_is_refused(folder: Path) -> None:
    path, new = folder / "s", DOCUMENTS[60:]
    build(path, DOCUMENTS[:40])
    espnx.add(path, DOCUMENTS[40:60])
    espnx.delete(path, ["doc-1", "doc-41"])
    bad = espnx.Document("bad", "", espnx.Encoded(torch.zeros(D_CLS), torch.zeros(1, DIM + 8)))
    nan = espnx.Document(
        "nan", "", espnx.Encoded(torch.full((D_CLS,), torch.nan), torch.zeros(1, DIM))
    )
    for taken in ("doc-0", "doc-59"):
        again = [*new, espnx.Document(taken, "", new[0].vectors)]
        refused(path, lambda again=again: espnx.add(path, again), f"'{taken}' is in the store")  # type: ignore[misc]
    refused(path, lambda: espnx.add(path, [new[0], new[1], new[0]]), "'doc-60' occurs twice")
    refused(path, lambda: espnx.add(path, [new[0], bad]), "bad")
    refused(path, lambda: espnx.add(path, [new[0], nan]), "nan")
    refused(path, lambda: espnx.add(path, [("words", "alone")]), "has no vectors")
    refused(path, lambda: espnx.add(path, [(1.5, "number")]), "id of document 0")
    refused(path, lambda: espnx.delete(path, ["doc-0", "doc-2", "doc-60"]), "'doc-60'")
    refused(path, lambda: espnx.delete(path, ["doc-0", "doc-41"]), "'doc-41'")
    refused(path, lambda: espnx.delete(path, [0]), "no such document")
    refused(path, lambda: espnx.delete(path, "doc-0"), "a collection")
    refused(path, lambda: espnx.compact(path, memory="1"), "memory")


def test_where_no_store_is(folder: Path) -> None:
    changes: list[Callable[[Path], object]] = [
        lambda p: espnx.add(p, DOCUMENTS[:1]),
        lambda p: espnx.delete(p, ["a"]),
        espnx.compact,
    ]
    for change in changes:
        with pytest.raises(errors.StoreNotFoundError):
            change(folder / "nothing")
        assert not (folder / "nothing").exists()
    build(folder / "s", DOCUMENTS[:5])
    with DirectoryLock(folder / "s"):
        for change in changes:
            with pytest.raises(errors.StoreBusyError):
                change(folder / "s")
    check(folder / "s", DOCUMENTS[:5])


def test_an_interrupted_build_is_not_thrown_away(folder: Path) -> None:
    """Unlike an interrupted addition."""

    def fails(phase: str, done: int, total: int | None) -> None:
        if phase == "arrange":
            raise KeyError("caller's own")

    path = folder / "s"
    build(path, DOCUMENTS[:5])
    with pytest.raises(KeyError, match="caller's own"):
        build(path, DOCUMENTS[:30], replace=True, progress=fails)
    for change in (
        lambda: espnx.add(path, DOCUMENTS[5:6]),
        lambda: espnx.delete(path, ["doc-0"]),
        lambda: espnx.compact(path),
    ):
        with pytest.raises(errors.InvalidInputError, match="interrupted build"):
            change()
    build(path, DOCUMENTS[:30], replace=True)
    check(path, DOCUMENTS[:30])


def test_an_id_again(folder: Path) -> None:
    """A deleted id may come back, with other vectors; three times; each time the latest is
    found."""
    path = folder / "s"
    build(path, DOCUMENTS[:20])
    for number in range(3):
        espnx.delete(path, ["doc-3", "doc-4"])
        again = [
            espnx.Document(
                f"doc-{3 + i}", f"version {number}", DOCUMENTS[100 + 2 * number + i].vectors
            )
            for i in range(2)
        ]
        espnx.add(path, again)
        alive = [*DOCUMENTS[:3], *again, *DOCUMENTS[5:20]]
        check(path, alive)
    assert espnx.compact(path).dropped == 6
    check(path, alive)
    refused(path, lambda: espnx.add(path, again), "'doc-3' is in the store")


def test_nothing_to_delete_or_compact(folder: Path) -> None:
    path = folder / "s"
    build(path, DOCUMENTS[:65])
    whole = check(path, DOCUMENTS[:65])
    manifest = (path / "MANIFEST.json").read_bytes()
    assert espnx.delete(path, []) == 0
    assert (path / "MANIFEST.json").read_bytes() == manifest
    assert espnx.delete(path, ["doc-1", "doc-1", "doc-1"]) == 1
    espnx.add(path, DOCUMENTS[1:2])
    for generation in (4, 5):
        report = espnx.compact(path)
        assert (report.documents, report.dropped, report.generation) == (
            65,
            5 - generation,
            generation,
        )
        assert check(path, DOCUMENTS[:65]) == whole
    assert (report.parts, report.size_bytes) == (1, report.size_bytes_before)


@pytest.mark.parametrize("tier", [None, "bit1"])
def test_deleting_everything(folder: Path, tier: str | None) -> None:
    """Nothing is found, and what is added then is; compacted away too, though there are no lists
    left: they are trained anew."""
    path, query = folder / "s", queries(1, dim=DIM)[0]
    build(path, DOCUMENTS[:70], coarse=tier)
    assert espnx.delete(path, ids_of(DOCUMENTS[:70])) == 70
    with espnx.open(path) as index:
        assert index.store.verify() == 0
        assert index.search(query, **EVERY).hits == index.search([query, query])[1].hits == []
        assert tier is None or index.search(query, cascade=5).hits == []
    espnx.add(path, DOCUMENTS[60:75])
    check(path, DOCUMENTS[60:75])
    espnx.compact(path)
    check(path, DOCUMENTS[60:75])
    espnx.delete(path, ids_of(DOCUMENTS[60:75]))
    report = espnx.compact(path)
    assert (report.documents, report.dropped, report.size_bytes) == (0, 15, 0)
    assert ranking(path) == [{}] * 6
    assert espnx.compact(path).parts == 0
    assert espnx.add(path, []).documents == 0
    store_id = json.loads((path / "MANIFEST.json").read_text())["store_id"]
    assert espnx.add(path, iter(DOCUMENTS[:70])).documents == 70
    check(path, DOCUMENTS[:70])
    espnx.add(path, DOCUMENTS[70:72])
    check(path, DOCUMENTS[:72])
    manifest = json.loads((path / "MANIFEST.json").read_text())
    assert (manifest["store_id"], manifest["coarse"] and manifest["coarse"]["format"]) == (
        store_id,
        tier,
    )
    build(path, DOCUMENTS[:3], replace=True)
    check(path, DOCUMENTS[:3])


def twins(documents: Sequence[espnx.Document]) -> list[espnx.Document]:
    return [
        espnx.Document(f"twin of {document.id}", document.text, document.vectors)
        for document in documents
    ]


SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "residual2": {"format": "residual2"},
    "bit1 tier": {"coarse": "bit1"},
    "residual in both": {"format": "residual4", "coarse": "residual1"},
    "projection": {"pca": 8, "coarse": "int8"},
    "codes": {"first_stage_code": "sq4"},
    "muvera": {"pooling": "muvera"},
    "no CLS": {"dims": (0, DIM), "cls_weight": 0.0},
}


def stored(index: espnx.Index, documents: Sequence[espnx.Document]) -> list[espnx.Document]:
    """The documents with the tokens that a store's format makes of theirs."""
    schema, result = index.store.full.schema, []
    fmt = token_format(schema.format)
    for document in documents:
        assert document.vectors is not None
        tokens = document.vectors.tokens
        tokens = tokens if index.store.projection is None else index.store.projection(tokens)
        shown = fmt.decode(
            fmt.encode(tokens, index.store.full.codebook), schema.dim, index.store.full.codebook
        )
        cls = document.vectors.cls.half().float()
        result.append(espnx.Document(document.id, document.text, espnx.Encoded(cls, shown)))
    return result


def coarse_scores(path: Path, query: espnx.Encoded) -> dict[Any, float]:
    """By id, of the coarse tier, of all documents but the one that it thinks best: that one is
    re-ranked."""
    with espnx.open(path) as index:
        if index.store.coarse is None:
            return {}
        result = index.search(query, **EVERY, cascade=1)
        assert (result.reranked, len(result.hits)) == (1, index.store.count)
        return {hit.id: hit.score for hit in result.hits[1:]}


@pytest.mark.parametrize("name", SETTINGS)
def test_formats_and_settings(folder: Path, name: str) -> None:
    """An addition is written as the build wrote: the same vectors score the same, in both tiers.
    Compacting changes no score."""
    path, settings = folder / "s", SETTINGS[name]
    base = [d for d in DOCUMENTS[:120] if d.vectors is not None and len(d.vectors.tokens)]
    wanted = queries(3, dim=DIM)
    if name == "no CLS":
        base = [
            espnx.Document(d.id, d.text, espnx.Encoded(torch.empty(0), d.vectors.tokens))
            for d in base
            if d.vectors
        ]
        wanted = [espnx.Encoded(torch.empty(0), query.tokens) for query in wanted]
    build(path, base, **settings)
    before, coarse = ranking(path, wanted), coarse_scores(path, wanted[0])
    espnx.add(path, twins(base[:50]))
    espnx.add(path, twins(base[50:]))
    for own, grown in zip(before, ranking(path, wanted), strict=True):
        assert grown == own | {f"twin of {key}": value for key, value in own.items()}
    found = coarse_scores(path, wanted[0])
    assert all(
        found.get(prefix + key, score) == score
        for key, score in coarse.items()
        for prefix in ("", "twin of ")
    )
    assert len(found) == (2 * len(coarse) + 1 if coarse else 0)
    gone = ids_of(base[::2]) + ids_of(twins(base)[1::3])
    alive = [document for document in [*base, *twins(base)] if document.id not in gone]
    espnx.delete(path, gone)
    left, coarse = ranking(path, wanted), coarse_scores(path, wanted[0])
    espnx.compact(path)
    assert ranking(path, wanted) == left
    assert coarse_scores(path, wanted[0]) == coarse
    with espnx.open(path) as index:
        assert index.store.manifest.first_stage.code == settings.get("first_stage_code", "flat")
        exact = stored(index, alive)
        for query, ranked in zip(wanted, left[::2], strict=True):
            matrix = index.store.projection
            shown = query if matrix is None else espnx.Encoded(query.cls, matrix(query.tokens))
            scores, bounds = exact_scores(exact, shown, settings.get("cls_weight", 1.0), "fp32")
            assert scores.keys() == ranked.keys()
            # Codes have 2 gamma(1.5 d + Lq + 4) in place of gamma(d + Lq + 1), at most four times
            # as much for d = 16 (docs/tolerances.md). The projection's sums may be taken in another
            # order: a token may round to the neighbouring value.
            slack = 0.0 if matrix is None else 2.0**-10 * float(query.tokens.norm(dim=1).sum()) * 3
            for key, (score, _) in ranked.items():
                assert abs(score - scores[key]) <= 4 * bounds[key] + slack


def contents(index: espnx.Index, cascade: int | None = None) -> list[Any]:
    return [result.hits for result in index.search(queries(4, dim=DIM), **EVERY, cascade=cascade)]


def test_readers_keep_their_version(folder: Path) -> None:
    """Whatever happens in the same process meanwhile; whether they read before the change or only
    after it."""
    path, versions = folder / "s", list[espnx.Index]()
    build(path, DOCUMENTS[:80], coarse="bit1")
    right = []
    changes: list[Callable[[], object]] = [
        lambda: espnx.add(path, DOCUMENTS[80:150]),
        lambda: espnx.delete(path, ids_of(DOCUMENTS[70:90])),
        lambda: espnx.compact(path),
        lambda: espnx.delete(path, ids_of(DOCUMENTS[:70])),
        lambda: espnx.add(path, DOCUMENTS[80:85]),
        lambda: espnx.compact(path),
    ]
    try:
        for change in [*changes, lambda: None]:
            versions += [espnx.open(path) for _ in range(2)]
            right.append((contents(versions[-1]), contents(versions[-1], cascade=9)))
            change()
        for i, version in enumerate(versions):
            assert (contents(version), contents(version, cascade=9)) == right[i // 2]
        assert [len(old[0][0]) for old in right] == [80, 150, 130, 130, 60, 65, 65]
    finally:
        for version in versions:
            version.close()
    check(path, DOCUMENTS[80:85] + DOCUMENTS[90:150])


def test_searches_while_the_store_changes(folder: Path) -> None:
    """Four threads search an old reader, and open new ones, without a pause: hits of one version,
    whole."""
    path = folder / "s"
    build(path, DOCUMENTS[:100])
    changed, done = [DOCUMENTS[100:130], DOCUMENTS[130:140]], threading.Event()
    allowed = [
        set(ids_of(DOCUMENTS[:100])),
        set(ids_of(DOCUMENTS[:130])),
        set(ids_of(DOCUMENTS[50:130])),
    ]
    with espnx.open(path) as old:
        right = contents(old)

        def search(number: int) -> int:
            rounds = 0
            while rounds < 2 or not done.is_set():
                rounds += 1
                assert contents(old) == right
                if number % 2:
                    with espnx.open(path) as current:
                        for hits in contents(current):
                            assert {hit.id for hit in hits} in allowed
            return rounds

        with ThreadPoolExecutor(4) as pool:
            searching = [pool.submit(search, number) for number in range(4)]
            try:
                for _ in range(3):
                    espnx.add(path, changed[0])
                    espnx.delete(path, ids_of(DOCUMENTS[:50]))
                    espnx.compact(path)
                    espnx.add(path, DOCUMENTS[:50])
                    espnx.delete(path, ids_of(changed[0]))
                    espnx.compact(path)
            finally:
                done.set()
            assert all(each.result() >= 2 for each in searching)
        assert contents(old) == right
    check(path, DOCUMENTS[:100])


@pytest.mark.parametrize("tier", [None, "bit1"])
def test_several_directories(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tier: str | None
) -> None:
    """Data files of a few kilobytes, in turn in three directories; what is compacted away leaves
    all of them."""
    whole = segments.pieces
    for module in (building, compacting):
        monkeypatch.setattr(module, "segment_bytes", lambda total_bytes, devices: 4096 * devices)
        monkeypatch.setattr(
            module,
            "pieces",
            lambda order, sizes, limit_bytes, room: whole(order, sizes, 4096, room),
        )
    path, places = folder / "s", [folder / name for name in ("x", "y", "z [1]")]

    def data() -> set[str]:
        """Data files there are, which must be those that the manifest names."""
        found = {str(file) for place in places for file in place.rglob("*.bin")}
        parts = json.loads((path / "MANIFEST.json").read_text())["parts"]
        assert found == {
            segment["path"]
            for part in parts
            for each in part["segments"].values()
            for segment in each
        }
        assert {str(made) for place in places for made in place.glob("espnx-*/gen-*")} == {
            str(Path(file).parent) for file in found
        }
        return found

    build(path, DOCUMENTS, directories=places, coarse=tier)
    assert {Path(file).parents[2] for file in data()} == set(places)
    left = check(path, DOCUMENTS)
    espnx.delete(path, ids_of(DOCUMENTS[:150]))
    espnx.add(path, [*DOCUMENTS[:150], *twins(DOCUMENTS)])
    assert {Path(file).parents[2] for file in data()} == set(places)
    espnx.delete(path, ids_of(twins(DOCUMENTS)))
    with espnx.open(path) as old:
        hits = contents(old)
        before = data()
        espnx.compact(path)
        assert not before & data()
        assert {Path(file).parents[2] for file in data()} == set(places)
        assert contents(old) == hits
    assert check(path, DOCUMENTS) == left
    with espnx.open(path) as index:
        assert len(index.store.segments) == np.ceil(len(DOCUMENTS) / 64)
    espnx.delete(path, ids_of(DOCUMENTS))
    espnx.compact(path)
    assert data() == set()


def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for call in ("load_encoder", "load_named"):
        monkeypatch.setattr(f"espnx.encoders.{call}", lambda name, **options: toy_encoder())
    path, lines, more = tmp_path / "s", tmp_path / "corpus.jsonl", tmp_path / "ids"
    espnx.build(
        path,
        [(f"d{n}", f"old {n}") for n in range(10)],
        toy_encoder(),
        nlist=2,
        directories=[tmp_path / "x"],
    )
    lines.write_text(
        "\n".join(
            json.dumps({"_id": f"n{n}", "title": "new", "text": f"one {n}"}) for n in range(5)
        )
    )
    more.write_text("d2\n\nn4\n")

    def run(*words: Any) -> dict[str, Any]:
        assert main(["index", *map(str, words), "--json", str(tmp_path / "report.json")]) == 0
        result: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
        return result

    assert run("add", path, "--corpus", lines, "--encoder", "toy")["report"]["documents"] == 5
    assert "5 documents added, generation 2" in capsys.readouterr().out
    assert run("delete", path, "d1", "--ids", more)["deleted"] == 3
    assert "3 documents deleted" in capsys.readouterr().out
    report = run("compact", path)["report"]
    assert (report["documents"], report["dropped"], report["parts"]) == (12, 3, 2)
    assert "12 documents in one part (2 before), 3 dropped" in capsys.readouterr().out
    with espnx.open(path, encoder=toy_encoder()) as index:
        hits = index.search("new one 3", **EVERY).hits
        assert index.store.verify() == 12
    assert (hits[0].id, hits[0].text) == ("n3", "new one 3")
    assert {hit.id for hit in hits} == {f"d{n}" for n in (0, *range(3, 10))} | {
        f"n{n}" for n in range(4)
    }
    assert main(["index", "delete", str(path), "d1"]) != 0
    assert "no such document" in capsys.readouterr().err
    assert main(["index", "delete", str(path), "d1", "--int"]) != 0
    assert_tidy(path)
