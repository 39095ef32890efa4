"""A build that goes on from an interrupted one publishes what its own corpus says, whatever the
other had seen."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.retrieval.build import builder as module
from espnx.retrieval.build import spool
from espnx.retrieval.build import state as build_state
from espnx.retrieval.build.documents import digest
from tests.retrieval.common import (
    D_CLS,
    DIM,
    EVERYTHING,
    build,
    check_store,
    corpus,
    leftovers,
    queries,
    toy_encoder,
)
from tests.sweeps import some

DOCUMENTS = corpus(150, seed=3)
Documents = list[espnx.Document]
PLACES: dict[str, tuple[Any, str, int]] = {
    "spool": (module.SpoolWriter, "append", 3),
    "end of the spool": (module.SpoolWriter, "close", 1),
    "arrange": (module.arrange, "tune", 1),
    "write": (module.SegmentWriter, "finish_segment", 2),
    "manifest": (module, "publish", 1),
}


class StopError(Exception):
    pass


@pytest.fixture(autouse=True)
def several_data_files(
    monkeypatch: pytest.MonkeyPatch, small_segments: Callable[[int, int], None]
) -> None:
    small_segments(8_000, 4096)
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 64)


def interrupt(
    path: Path, patch: pytest.MonkeyPatch, place: str, documents: Iterable[Any], **options: Any
) -> None:
    """Builds until the place, where something fails that is not the corpus's fault."""
    owner, name, nth = PLACES[place]
    original, calls = getattr(owner, name), itertools.count(1)

    def stop(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            raise StopError
        return original(*args, **kwargs)

    with patch.context() as patched:
        patched.setattr(owner, name, stop)
        patched.setattr(module, "CHECKPOINT_S", 0.0)
        with pytest.raises(StopError):
            build(path, documents, **options)


def other_text(documents: Documents, at: int) -> Documents:
    return [
        *documents[:at],
        espnx.Document(documents[at].id, "another text", documents[at].vectors),
        *documents[at + 1 :],
    ]


def other_vector(documents: Documents, at: int) -> Documents:
    old = documents[at]
    assert old.vectors is not None
    cls = old.vectors.cls.clone()
    cls[0] += 1
    return [
        *documents[:at],
        espnx.Document(old.id, old.text, espnx.Encoded(cls, old.vectors.tokens)),
        *documents[at + 1 :],
    ]


def other_id(documents: Documents, at: int) -> Documents:
    return [
        *documents[:at],
        espnx.Document(f"other-{at}", documents[at].text, documents[at].vectors),
        *documents[at + 1 :],
    ]


def other_order(documents: Documents, at: int) -> Documents:
    return [*documents[:at], *reversed(documents[at:])]


CHANGES: dict[str, Callable[[Documents, int], Documents]] = {
    "text": other_text,
    "vector": other_vector,
    "id": other_id,
    "order": other_order,
    "one fewer": lambda documents, at: [*documents[:at], *documents[at + 1 :]],
    "one more": lambda documents, at: [
        *documents[:at],
        espnx.Document("one more", "x", documents[0].vectors),
        *documents[at:],
    ],
    "shorter": lambda documents, at: documents[:at],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("place", "changed_at"), [("spool", [75]), ("arrange", [127]), ("write", [0, 75])]
)
@pytest.mark.parametrize("change", CHANGES)
def test_a_corpus_that_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, changed_at: list[int], change: str
) -> None:
    """One-shot, changed early, within the spool and at its end: equal documents are kept, and
    nothing of the others is published."""
    for at in changed_at:
        path = folder / f"s{at}"
        interrupt(path, monkeypatch, place, DOCUMENTS)
        wanted = CHANGES[change](DOCUMENTS, at)
        with pytest.warns(UserWarning, match="not all of the interrupted build"):
            report = build(path, iter(wanted))
        assert report.resumed_documents == at
        assert report.restarted_because is not None
        assert (
            f"after {at} documents" in report.restarted_because
            or f"document {at} " in report.restarted_because
        )
        check_store(path, wanted)
        assert leftovers(path) == ({"gen-000001"} if wanted else set())
        if not wanted or place != "write":
            continue
        build(folder / f"clean{at}", wanted)
        everything = {"k": EVERYTHING, "candidates": EVERYTHING, "nprobe": EVERYTHING}
        with espnx.open(path) as index, espnx.open(folder / f"clean{at}") as clean:
            for query in queries(2):
                assert (
                    index.search(query, **everything).hits == clean.search(query, **everything).hits
                )
            assert index.store.manifest.parts[0].count == len(wanted)
        named = {Path(segment.path).name for segment in index.store.segments}
        assert {found.name for found in path.glob("gen-*/segment-*")} == named, (
            "a data file of the interrupted build is still there"
        )


@pytest.mark.parametrize("place", PLACES)
def test_a_corpus_that_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Longer than what was spooled: where the spool was finished, that has to be said, and lists
    are made anew."""
    interrupt(folder / "s", monkeypatch, place, DOCUMENTS)
    more = [
        *DOCUMENTS,
        *(espnx.Document(f"more-{i}", "more", d.vectors) for i, d in enumerate(corpus(40, seed=8))),
    ]
    if place == "spool":
        report = build(folder / "s", iter(more))
        assert (report.resumed_documents, report.restarted_because) == (128, None)
    else:
        with pytest.warns(UserWarning, match="goes on after the 150 documents"):
            report = build(folder / "s", iter(more))
        assert report.resumed_documents == 150
    check_store(folder / "s", more)


def test_texts_for_an_encoder_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case that mixed two corpora: a build ends early, every text is corrected, and the same
    command is given again."""
    old, new = ([{"id": i, "text": f"{word} {i}"} for i in range(150)] for word in ("old", "new"))
    interrupt(folder / "s", monkeypatch, "spool", old, dims=None, encoder=toy_encoder())
    with pytest.warns(UserWarning, match="document 0 "):
        report = build(folder / "s", iter(new), dims=None, encoder=toy_encoder())
    assert report.resumed_documents == 0
    build(folder / "clean", new, dims=None, encoder=toy_encoder())
    found = []
    for path in (folder / "s", folder / "clean"):
        with espnx.open(path, toy_encoder()) as index:
            hits = index.search(
                "new 5", k=EVERYTHING, candidates=EVERYTHING, nprobe=EVERYTHING
            ).hits
            found.append([(hit.id, hit.text, hit.score) for hit in hits])
    assert found[0] == found[1]
    assert {(identifier, text) for identifier, text, _ in found[0]} == {
        (i, f"new {i}") for i in range(150)
    }


@pytest.mark.parametrize("place", ["spool", "write"])
@pytest.mark.parametrize(
    "change", [{"nlist": 9}, {"cls_weight": 2.0}, {"first_stage_code": "sq8"}], ids=repr
)
def test_other_options_keep_what_they_do_not_touch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, change: dict[str, Any]
) -> None:
    """Encoding is what takes long: it is not done again for an option that only the lists depend
    on."""
    interrupt(folder / "s", monkeypatch, place, DOCUMENTS)
    name, value = next(iter(change.items()))
    with pytest.warns(UserWarning, match=f"other settings: {name}={value!r} instead of"):
        report = build(folder / "s", iter(DOCUMENTS), **change)
    assert report.resumed_documents == (128 if place == "spool" else 150)
    assert report.restarted_because is not None
    with espnx.open(folder / "s") as index:
        assert index.store.verify() == 150
        assert name != "nlist" or index.first_stage.nlist == 9
        assert name != "cls_weight" or index.store.manifest.cls_weight == 2.0


@pytest.mark.parametrize("change", [{"format": "fp32"}, {"pooling": "mean"}], ids=repr)
def test_other_options_that_the_spool_depends_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    interrupt(folder / "s", monkeypatch, "write", DOCUMENTS)
    with pytest.warns(UserWarning, match="other settings"):
        report = build(folder / "s", iter(DOCUMENTS), **change)
    assert report.resumed_documents == 0
    with espnx.open(folder / "s") as index:
        assert index.store.verify() == 150


def test_another_encoder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [(i, f"text {i}") for i in range(150)]
    interrupt(folder / "s", monkeypatch, "spool", texts, dims=None, encoder=toy_encoder())
    other = toy_encoder()
    other.name = "toy@2"
    with pytest.warns(UserWarning, match="encoder='toy@2' instead of 'toy@1'"):
        report = build(folder / "s", texts, dims=None, encoder=other)
    assert report.resumed_documents == 0


def test_data_elsewhere_goes_with_the_directories(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(folder / "s", monkeypatch, "write", DOCUMENTS, directories=[folder / "a"])
    assert list(folder.glob("a/espnx-*"))
    with pytest.warns(UserWarning, match="directories="):
        report = build(folder / "s", DOCUMENTS, directories=[folder / "b"])
    assert report.resumed_documents == 150
    assert not list(folder.glob("a/espnx-*"))
    check_store(folder / "s", DOCUMENTS)


def bad_document(documents: Documents) -> Iterator[Any]:
    yield from documents[:140]
    yield {"id": "bad", "text": None}


class FailingEncoder:
    """Raises at its third call, or gives a NaN."""

    name, d_cls, dim = "failing@1", D_CLS, DIM

    def __init__(self, wrong: Exception | float):
        self._wrong, self._calls, self._right = wrong, 0, toy_encoder()

    def encode_documents(self, texts: list[str]) -> list[espnx.Encoded]:
        self._calls += 1
        made = self._right.encode_documents(texts)
        if self._calls == 3:
            if isinstance(self._wrong, Exception):
                raise self._wrong
            made[0].cls[0] = self._wrong
        return made

    encode_queries = encode_documents


@pytest.mark.parametrize("published", [False, True])
def test_an_input_error_leaves_nothing_to_resume(
    folder: Path, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    monkeypatch.setattr(module, "CHECKPOINT_S", 0.0)
    if published:
        build(folder / "s", DOCUMENTS[:30])
    before = leftovers(folder / "s") if published else set()
    wrong: list[tuple[Any, Any, type[Exception]]] = [
        (None, bad_document(DOCUMENTS), errors.InvalidInputError),
        (None, [*DOCUMENTS[:140], DOCUMENTS[3]], errors.InvalidInputError),
        (
            FailingEncoder(float("nan")),
            [(i, f"text {i}") for i in range(150)],
            errors.InvalidInputError,
        ),
        (FailingEncoder(RuntimeError("no")), [(i, f"text {i}") for i in range(150)], RuntimeError),
    ]
    for encoder, documents, kind in wrong:
        with pytest.raises(kind):
            build(folder / "s", documents, encoder=encoder, replace=True)
        assert (leftovers(folder / "s") if published else set(folder.iterdir())) == before
    if published:
        check_store(folder / "s", DOCUMENTS[:30])
    report = build(folder / "s", DOCUMENTS, replace=True)
    assert (report.resumed_documents, report.restarted_because) == (0, None)
    check_store(folder / "s", DOCUMENTS)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError("the corpus's network"), MemoryError()], ids=repr
)
def test_what_is_not_the_corpus_fault_can_be_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(module, "CHECKPOINT_S", 0.0)

    def until_it_fails() -> Iterator[espnx.Document]:
        yield from DOCUMENTS[:140]
        raise error

    with pytest.raises(type(error)):
        build(folder / "s", until_it_fails())
    report = build(folder / "s", iter(DOCUMENTS))
    assert (report.resumed_documents, report.restarted_because) == (128, None)
    check_store(folder / "s", DOCUMENTS)


def test_a_budget_that_is_too_small_keeps_the_spool(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing against the documents."""
    with monkeypatch.context() as patch:
        patch.setattr(
            module.arrange,
            "assign",
            lambda *_: (_ for _ in ()).throw(errors.InvalidInputError("too small a budget")),
        )
        with pytest.raises(errors.InvalidInputError, match="budget"):
            build(folder / "s", DOCUMENTS)
    assert build(folder / "s", DOCUMENTS).resumed_documents == 150


def test_digests() -> None:
    """Of documents that differ in anything, types included, no two are alike; that of an equal
    document is the same."""
    one = espnx.Encoded(torch.zeros(2), torch.zeros(2, 2))
    different = [
        espnx.Document(1, "a"),
        espnx.Document("1", "a"),
        espnx.Document(1, "b"),
        espnx.Document(1, ""),
        espnx.Document("1a", ""),
        espnx.Document(1, "a", one),
        espnx.Document(1, "a", espnx.Encoded(torch.zeros(2), torch.zeros(4, 1))),
        espnx.Document(1, "a", espnx.Encoded(torch.zeros(4), torch.zeros(1, 2))),
        espnx.Document(1, "a", espnx.Encoded(torch.zeros(2), -torch.zeros(2, 2))),
        espnx.Document(1, "a", one, np.zeros((2, 4), np.uint8)),
        espnx.Document(1, "a", one, np.zeros((4, 2), np.uint8)),
        espnx.Document(1, "a", None, np.zeros((2, 4), np.uint8)),
    ]
    found = [digest(document) for document in different]
    assert len(set(found)) == len(different)
    assert found == [digest(document) for document in different]
    assert digest(
        espnx.Document(1, "a", espnx.Encoded(torch.zeros(2), torch.zeros(2, 4)[:, ::2]))
    ) == digest(different[5])
    for values in (
        torch.zeros(2, dtype=torch.float64),
        [0.0, 0.0],
        None,
        torch.zeros(2, device="meta"),
    ):
        digest(espnx.Document(1, "a", espnx.Encoded(values, torch.zeros(2, 2))))  # type: ignore[arg-type]


def test_a_cut_spool_keeps_its_checksums(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows so small that the cut falls into and between them."""
    from espnx.storage import files as stream

    monkeypatch.setattr(stream, "WINDOW_BYTES", 4096)
    monkeypatch.setattr(spool, "WINDOW_BYTES", 4096)
    for at in (32, 64, 100, 149):
        interrupt(folder / f"s{at}", monkeypatch, "write", DOCUMENTS)
        wanted = other_text(DOCUMENTS, at)
        with pytest.warns(UserWarning, match=f"document {at} "):
            assert build(folder / f"s{at}", wanted).resumed_documents == at
        check_store(folder / f"s{at}", wanted)


def test_programs_at_random(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interruptions in a row, each with a corpus changed in some way: what is published at last is
    the last one's, by a plain list."""
    rng = random.Random(11)
    for program in range(10):
        path, documents = folder / f"p{program}", corpus(rng.randrange(1, 200), seed=program)
        for _ in range(rng.randrange(1, 4)):
            place = rng.choice(list(PLACES))
            monkeypatch.setitem(PLACES, "now", (*PLACES[place][:2], 1))
            with pytest.MonkeyPatch.context() as quiet:
                quiet.setattr(module.warnings, "warn", lambda *_, **__: None)
                try:
                    interrupt(path, quiet, "now", iter(documents))
                except pytest.fail.Exception:  # the place was passed without a call: published
                    break
            if documents and rng.random() < 0.8:
                documents = CHANGES[rng.choice(list(CHANGES))](
                    documents, rng.randrange(len(documents))
                )
        with pytest.MonkeyPatch.context() as quiet:
            quiet.setattr(module.warnings, "warn", lambda *_, **__: None)
            build(path, iter(documents), replace=True)
        check_store(path, documents)


STATE_CHANGES: list[tuple[Sequence[Any], Any]] = [
    (["phase"], "done"),
    (["phase"], 3),
    (["documents"], -1),
    (["documents"], "5"),
    (["documents"], 2**70),
    (["generation"], 0),
    (["generation"], None),
    (["store_id"], "../../etc"),
    (["store_id"], 5),
    (["settings"], []),
    (["settings", "directories"], "/"),
    (["settings", "directories"], ["relative"]),
    (["settings", "spooled"], None),
    (["settings", "later", "nlist"], [1]),
    (["spool"], []),
    (["spool", "records.bin"], 5),
    (["spool", "records.bin", "size_bytes"], -4),
    (["spool", "n_tokens.u16", "sums"], ["x"]),
    (["arranged"], {}),
    (["arranged", "files"], {}),
    (["arranged", "files", "order.i64", "size_bytes"], 8),
    (["arranged", "files", "order.i64", "sums"], [2**32]),
    (["arranged", "files", "../order.i64"], {"size_bytes": 0, "sums": []}),
    (["arranged", "first_stage"], {}),
    (["arranged", "first_stage", "kind"], "hnsw"),
    (["arranged", "first_stage", "nlist"], -1),
    (["arranged", "first_stage", "steps"], {"much": 0.1}),
    (["arranged", "trained"], 2**32),
    (["arranged", "is_normalised"], 2),
    (["segments", "full", 0, "path"], 7),
    (["segments", "full", 0, "records"], 0),
    (["segments", "full", 0], {"path": "x"}),
    (["segments", "full", 0, "path"], "/etc/passwd"),
    (["segments", "full", 0, "path"], "gen-000001/../../x"),
]


@pytest.mark.parametrize(("place", "value"), some(STATE_CHANGES, 3), ids=repr)
def test_a_state_of_wrong_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: Sequence[Any], value: Any
) -> None:
    """With a checksum that is right: what was damaged, or comes from elsewhere, is told in our own
    error."""
    interrupt(folder / "s", monkeypatch, "write", DOCUMENTS)
    path = folder / "s" / "building" / "STATE.json"
    fields = json.loads(path.read_bytes().rpartition(b"\n")[0])
    inside = fields
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    text = json.dumps(fields).encode()
    path.write_bytes(text + b"\n" + build_state._checksum(text))
    with pytest.raises(errors.FormatError, match="restart"):
        build(folder / "s", DOCUMENTS)
    build(folder / "s", DOCUMENTS, restart=True)
    check_store(folder / "s", DOCUMENTS)
