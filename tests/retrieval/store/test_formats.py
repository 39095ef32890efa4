"""Stores in every record format rank as their rows say, hold the bytes that docs/store-format.md
promises, and refuse what does not fit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.ops._native import load_extension
from espnx.ops.maxsim import Codebook, maxsim_reference, token_format
from espnx.retrieval.build.options import COARSE_FORMATS
from espnx.storage import manifest
from tests.forks import Forks
from tests.ops.records import Records, codebook_for
from tests.ops.tolerances import gamma, maxsim_bound
from tests.retrieval.common import (
    D_CLS,
    EVERYTHING,
    assert_ranking,
    build,
    corpus,
    memory_folder,
    queries,
    section_tensors,
)

NUMBERS = {
    "fp32": 1,
    "fp16": 2,
    "bf16": 3,
    "int8": 4,
    "bit1": 5,
    "residual1": 6,
    "residual2": 7,
    "residual4": 8,
}
FORMATS = list(NUMBERS)
RESIDUAL = FORMATS[5:]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LEVELS = ["portable", "avx2", "avx512", "vnni", "amx"]
DIM = 32
#: Bytes of a row of 32 values, by hand from the table of docs/store-format.md.
ROW_BYTES = {
    "fp32": 128,
    "fp16": 64,
    "bf16": 64,
    "int8": 36,
    "bit1": 4,
    "residual1": 8,
    "residual2": 12,
    "residual4": 20,
}
WHOLE: dict[str, Any] = {"k": EVERYTHING, "candidates": EVERYTHING, "nprobe": EVERYTHING}


def cls_format(fmt: str) -> str:
    return fmt if fmt in ("fp32", "bf16") else "fp16"


def encoded(document: espnx.Document, fmt: str, codebook: Codebook | None) -> torch.Tensor:
    """The rows a store must hold: coded from the encoder's fp32 values."""
    if document.rows is not None:
        return torch.from_numpy(np.ascontiguousarray(document.rows).reshape(-1))
    assert document.vectors is not None
    tokens = document.vectors.tokens
    if not len(tokens):
        return torch.empty(0, dtype=torch.uint8)
    return token_format(fmt).encode(tokens, codebook)


def as_records(
    rows: list[torch.Tensor], fmt: str, dim: int, codebook: Codebook | None = None
) -> Records:
    sizes = torch.tensor([len(part) for part in rows])
    return Records(
        torch.cat(rows),
        sizes.cumsum(0) - sizes,
        sizes // token_format(fmt).token_row_bytes(dim),
        fmt,
        codebook,
    )


def expected(
    index: espnx.Index, documents: list[espnx.Document], query: espnx.Encoded, level: str
) -> tuple[dict[Any, float], dict[Any, float]]:
    """By id: the reference's score of decode(encode(tokens)), and how far the store's may be off
    (docs/tolerances.md)."""
    schema, book, weight = (
        index.store.full.schema,
        index.store.full.codebook,
        index.store.manifest.cls_weight,
    )
    records = as_records(
        [encoded(document, schema.format, book) for document in documents],
        schema.format,
        schema.dim,
        book,
    )
    maxsim = maxsim_reference(query.tokens, *records.args, codebook=book).double()
    maxsim = maxsim.masked_fill(records.args[2] == 0, 0.0)  # no tokens: by CLS alone
    bound = maxsim_bound(query.tokens, records, cpu_level=level).double()
    if schema.d_cls:
        stored = [
            token_format(cls_format(schema.format)).encode(d.vectors.cls[None])
            for d in documents
            if d.vectors
        ]
        of_cls = as_records(stored, cls_format(schema.format), schema.d_cls)
        cls = weight * maxsim_reference(query.cls[None], *of_cls.args).double()
        bound += abs(weight) * maxsim_bound(query.cls[None], of_cls, cpu_level=level).double()
        # the weight's product, and the total
        bound += gamma(2, 2.0**-24) * (maxsim.abs() + cls.abs())
        maxsim = maxsim + cls
    ids = [document.id for document in documents]
    return dict(zip(ids, maxsim.tolist(), strict=True)), dict(zip(ids, bound.tolist(), strict=True))


@contextmanager
def cpu_levels() -> Iterator[list[int]]:
    """The plainest and the best instruction set of this processor, to be put in force in turn."""
    try:
        yield sorted({0, load_extension().set_cpu_level(-1)})
    finally:
        load_extension().set_cpu_level(-1)


def assert_ranks(path: Path, documents: list[espnx.Document], wanted: list[espnx.Encoded]) -> None:
    with espnx.open(path) as index, cpu_levels() as levels:
        assert index.store.verify() == len(documents)
        for level, query in itertools.product(levels, wanted):
            load_extension().set_cpu_level(level)
            hits = index.search(query, **WHOLE).hits
            assert len(hits) == len(documents)
            assert_ranking(hits, *expected(index, documents, query, LEVELS[level]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dim", [8, 32, 128])
@pytest.mark.parametrize("d_cls", [24, 0])
def test_a_store_ranks_as_its_rows_say(folder: Path, fmt: str, dim: int, d_cls: int) -> None:
    """With a CLS vector in each record, and without: then the first stage takes the mean of the
    tokens."""
    documents = corpus(40, d_cls=d_cls, dim=dim, tokens=(0, 20))
    build(folder / "s", documents, dims=(d_cls, dim), format=fmt, cls_weight=1.5)
    assert_ranks(folder / "s", documents, queries(2, d_cls=d_cls, dim=dim))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("d_cls", [D_CLS, 0])
def test_ragged_documents(folder: Path, fmt: str, d_cls: int) -> None:
    """No token, one, and as many as a record can count; one more is refused."""
    documents = [
        corpus(1, d_cls=d_cls, tokens=(n, n), seed=n)[0] for n in (0, 1, 65_535, 2, 64, 65)
    ]
    documents = [
        espnx.Document(i, document.text, document.vectors) for i, document in enumerate(documents)
    ]
    build(
        folder / "s", documents, dims=(d_cls, 8), format=fmt, nlist=1, centroids=16, coarse="bit1"
    )
    assert_ranks(folder / "s", documents, queries(1, d_cls=d_cls))
    too_long = corpus(1, d_cls=d_cls, tokens=(65_536, 65_536))
    with pytest.raises(errors.InvalidInputError, match="65536 tokens"):
        build(folder / "t", documents[:2] + too_long, dims=(d_cls, 8), format=fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_documents_and_no_tokens(folder: Path, fmt: str) -> None:
    build(folder / "none", [], format=fmt, coarse="residual1")
    with espnx.open(folder / "none", coarse="ram") as index:
        assert index.search(queries(1)[0], cascade=3).hits == []
    documents = corpus(9, tokens=(0, 0))
    build(folder / "s", documents, format=fmt, coarse="residual1")
    for where in ("ssd", "ram"):
        with espnx.open(folder / "s", coarse=where) as index:
            query = queries(1)[0]
            hits = index.search(query, k=9, cascade=4, nprobe=EVERYTHING).hits
            by_cls = {
                document.id: float(query.cls @ document.vectors.cls)
                for document in documents
                if document.vectors
            }
            assert [hit.id for hit in hits] == sorted(by_cls, key=lambda name: -by_cls[name])
            assert [hit.score for hit in hits] == pytest.approx(
                [by_cls[hit.id] for hit in hits], rel=1e-2
            )


def rows_as_written(part: bytes, fmt: str, dim: int, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Values of a record's rows, from the written format and NumPy alone. float32 [n, dim]."""
    if fmt in ("fp32", "fp16"):
        return (
            np.frombuffer(part, {"fp32": "<f4", "fp16": "<f2"}[fmt])
            .astype(np.float32)
            .reshape(-1, dim)
        )
    if fmt == "bf16":
        return (
            (np.frombuffer(part, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(-1, dim)
        )
    if fmt == "bit1":
        return (
            ((np.unpackbits(np.frombuffer(part, np.uint8), bitorder="little") * 2.0 - 1) / dim**0.5)
            .astype(np.float32)
            .reshape(-1, dim)
        )
    if fmt == "int8":
        table = np.frombuffer(part, np.dtype([("scale", "<f4"), ("codes", "i1", (dim,))]))
        return table["scale"][:, None] * table["codes"].astype(np.float32)
    nbits = int(fmt[-1])
    table = np.frombuffer(
        part, np.dtype([("centroid", "<i4"), ("codes", "u1", (dim * nbits // 8,))])
    )
    codes = np.unpackbits(table["codes"], axis=1).reshape(-1, dim, nbits) @ (1 << np.arange(nbits))
    values = tensors["full.centroids"][table["centroid"]] + tensors["full.bucket_weights"][codes]
    return values / np.linalg.norm(values, axis=1, keepdims=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("d_cls", [D_CLS, 0])
def test_bytes_on_disk(folder: Path, fmt: str, d_cls: int) -> None:
    """Every record of a data file: its place, size, header, CLS vector, rows and padding, and what
    lies between."""
    documents = corpus(128, d_cls=d_cls, dim=DIM, tokens=(0, 45))
    report = build(folder / "s", documents, dims=(d_cls, DIM), format=fmt, coarse="int8")
    by_id = {document.id: document for document in documents}
    tensors = {
        **section_tensors(folder / "s/gen-000001/part.bin", "meta"),
        **section_tensors(folder / "s/gen-000001/part.bin", "model"),
    }
    data = (folder / "s/gen-000001/segment-00000.bin").read_bytes()
    cls_bytes = d_cls * (4 if fmt == "fp32" else 2)
    with espnx.open(folder / "s") as index:
        order = [by_id[identifier] for identifier, _ in index.store.texts.get(range(128))]
        book = index.store.full.codebook
    at, used = 4096, set[int]()
    for number, document in enumerate(order):
        assert document.vectors is not None
        n, cls, tokens = len(document.vectors.tokens), document.vectors.cls, document.vectors.tokens
        size = -(-(16 + cls_bytes + n * ROW_BYTES[fmt]) // 16) * 16
        if at // 4096 + -(-size // 4096) < (at + size - 1) // 4096 + 1:
            at = -(-at // 4096) * 4096
        if number % 64 == 0:
            assert tensors["full_group_offset_bytes"][number // 64] == at
        record, end = data[at : at + size], 16 + cls_bytes + n * ROW_BYTES[fmt]
        assert record[4:16] == n.to_bytes(2, "little") + bytes(
            [NUMBERS[fmt], 0xE5]
        ) + number.to_bytes(8, "little")
        if d_cls:
            assert (
                record[16 : 16 + cls_bytes]
                == cls.to(DTYPES[cls_format(fmt)]).view(torch.uint8).numpy().tobytes()
            )
        assert record[16 + cls_bytes : end] == encoded(document, fmt, book).numpy().tobytes()
        assert not any(record[end:])
        values = rows_as_written(record[16 + cls_bytes : end], fmt, DIM, tensors)
        assert_stands_for(values, tokens.to(DTYPES.get(fmt, torch.float32)).float().numpy(), fmt)
        used |= set(range(at, at + size))
        at += size
    assert len(data) == -(-at // 4096) * 4096
    assert not any(byte for place, byte in enumerate(data) if place >= 4096 and place not in used)
    assert (
        report.record_bytes == len(data) + (folder / "s/gen-000001/coarse-00000.bin").stat().st_size
    )
    assert tensors["n_tokens"].nbytes + tensors["full_group_offset_bytes"].nbytes == 2.125 * 128
    assert tensors["coarse_group_offset_bytes"].nbytes == 0.125 * 128


def assert_stands_for(values: np.ndarray, tokens: np.ndarray, fmt: str) -> None:
    """Stored values are what their format can say of the tokens."""
    if fmt in DTYPES:
        assert np.array_equal(values, tokens)
    elif fmt == "int8":  # half a step, and the rounding of scale, quotient and product
        assert (
            np.abs(values - tokens)
            <= np.abs(tokens).max(axis=1, keepdims=True) * (0.5 / 127 + 2.0**-22)
        ).all()
    elif fmt == "bit1":
        assert np.array_equal(values > 0, tokens >= 0)
    else:
        # lengths are 1, and what the codes keep points the same way: more so the more bits there
        # are
        assert np.allclose(np.linalg.norm(values, axis=1), 1, atol=gamma(DIM / 2 + 4, 2.0**-24))
        cosine = (values * tokens).sum(axis=1) / np.linalg.norm(tokens, axis=1)
        assert (
            len(tokens) == 0
            or cosine.mean() > {"residual1": 0.6, "residual2": 0.8, "residual4": 0.95}[fmt]
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dims", [(D_CLS, 0), (D_CLS, -8), (D_CLS, 65_544), (65_544, 8), (-8, 8)])
def test_dimensions_that_no_format_holds(folder: Path, fmt: str, dims: tuple[int, int]) -> None:
    """Refused before a document is asked for; the directory can still be built in."""
    untouched = iter(corpus(3))
    for options in (
        ({"format": fmt}, {"format": "fp16", "coarse": fmt})
        if fmt in COARSE_FORMATS
        else ({"format": fmt},)
    ):
        with pytest.raises(errors.InvalidInputError, match="of a record; got"):
            build(folder / "s", untouched, dims=dims, **options)
    assert len(list(untouched)) == 3
    build(folder / "s", corpus(3), format=fmt)


@pytest.mark.parametrize(
    "options",
    [
        {"format": "residual3"},
        {"format": "fp8"},
        {"format": ""},
        {"coarse": "fp16"},
        {"coarse": "residual8"},
        {"centroids": 0},
        {"pca": 1.5},
    ],
)
def test_options_that_name_no_format(folder: Path, options: dict[str, Any]) -> None:
    untouched = iter(corpus(3))
    with pytest.raises(errors.InvalidInputError):
        build(folder / "s", untouched, **{"dims": (D_CLS, DIM), **options})
    assert len(list(untouched)) == 3


@pytest.mark.parametrize("fmt", FORMATS)
def test_two_folders(folder: Path, fmt: str, small_segments: Callable[[int, int], None]) -> None:
    small_segments(1, 4096)
    documents = corpus(200, dim=DIM)
    places = [folder / "one", folder / "two"]
    for place in places:
        place.mkdir()
    build(
        folder / "s",
        documents,
        dims=(D_CLS, DIM),
        format=fmt,
        coarse="residual1",
        directories=[str(place) for place in places],
    )
    for place in places:
        names = sorted(path.name for path in place.rglob("*.bin"))
        assert len(names) == 4
        assert [name.split("-")[0] for name in names] == ["coarse"] * 2 + ["segment"] * 2
    assert [path.name for path in (folder / "s").rglob("*.bin")] == ["part.bin"]
    assert_ranks(folder / "s", documents, queries(1, dim=DIM))


def separated(levels: int = 12) -> tuple[list[espnx.Document], espnx.Encoded]:
    """A query of 12 tokens, and documents that hold all of them, 11, 10, ..., beside tokens of
    their own, in random order of ids."""
    rng = np.random.default_rng(4)
    signs = lambda n: torch.from_numpy(  # noqa: E731
        (rng.choice([-1.0, 1.0], size=(n, DIM)) / DIM**0.5).astype(np.float32)
    )
    wanted, cls = signs(levels), torch.ones(D_CLS)
    documents = []
    for held in rng.permutation(levels + 1).tolist():
        tokens = torch.cat([wanted[:held], signs(levels + 2 - held)])
        documents.append(
            espnx.Document(
                levels - held,
                "",
                espnx.Encoded(cls, tokens[torch.from_numpy(rng.permutation(len(tokens)))]),
            )
        )
    return documents, espnx.Encoded(cls, wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("coarse", COARSE_FORMATS)
def test_a_cascade_finds_what_full_scoring_finds(folder: Path, fmt: str, coarse: str) -> None:
    """Where documents are well apart, every coarse format from SSD and RAM finds the same best
    five, with the same scores."""
    documents, query = separated()
    build(folder / "s", documents, dims=(D_CLS, DIM), format=fmt, coarse=coarse)
    for where in ("ssd", "ram"):
        with espnx.open(folder / "s", coarse=where) as index:
            full = index.search(query, k=5, nprobe=EVERYTHING).hits
            assert [hit.id for hit in full] == [0, 1, 2, 3, 4]
            for cascade in (5, 8, EVERYTHING):
                assert index.search(query, k=5, nprobe=EVERYTHING, cascade=cascade).hits == full
            assert [
                hit.id for hit in index.search(query, k=5, nprobe=EVERYTHING, cascade=1).hits
            ] == [0, 1, 2, 3, 4]


def with_rows(
    fmt: str, d_cls: int = D_CLS, counts: tuple[int, ...] = (0, 1, 3, 40, 7, 12)
) -> tuple[list[espnx.Document], Codebook]:
    """Documents of random codes, which no encoder would have chosen, and their codebook; the first
    and last centroid occur."""
    book, rng = codebook_for(fmt, DIM), np.random.default_rng(6)
    assert book is not None
    documents = []
    for i, count in enumerate(counts):
        rows = rng.integers(0, 256, (count, ROW_BYTES[fmt]), dtype=np.uint8)
        rows[:, :4] = (
            rng.choice([0, book.n_centroids - 1, 5], count)
            .astype("<i4")
            .view(np.uint8)
            .reshape(count, 4)
        )
        rows = np.asfortranarray(rows) if i % 2 else rows
        cls = torch.from_numpy(rng.normal(size=d_cls).astype(np.float32))
        documents.append(
            espnx.Document(i, f"text {i}", espnx.Encoded(cls, torch.empty(0, DIM)), rows)
        )
    return documents, book


@pytest.mark.parametrize("fmt", RESIDUAL)
@pytest.mark.parametrize("d_cls", [D_CLS, 0])
def test_rows_that_are_there_already_are_kept(folder: Path, fmt: str, d_cls: int) -> None:
    documents, book = with_rows(fmt, d_cls)
    if not d_cls:
        documents = [
            espnx.Document(document.id, document.text, None, document.rows)
            for document in documents
        ]
    build(
        folder / "s",
        documents,
        dims=(d_cls, DIM),
        format=fmt,
        codebook=book,
        coarse="bit1",
        nlist=1,
    )
    tensors = section_tensors(folder / "s/gen-000001/part.bin", "model")
    for name in ("centroids", "bucket_cutoffs", "bucket_weights"):
        assert np.array_equal(tensors[f"full.{name}"], getattr(book, name).numpy())
    with espnx.open(folder / "s") as index:
        for tier in (index.store.full, index.store.coarse):
            assert tier is not None
            future = tier.read(np.arange(len(documents)), gap_bytes=0)
            memory, positions = future.wait(), future.position_bytes.tolist()
            for (identifier, _), position in zip(
                index.store.texts.get(range(len(documents))), positions, strict=True
            ):
                rows = encoded(documents[int(identifier)], fmt, book)
                if tier is index.store.coarse:
                    rows = token_format("bit1").encode(token_format(fmt).decode(rows, DIM, book))
                begin = position + tier.schema.fixed_bytes
                assert torch.equal(memory[begin : begin + len(rows)], rows)
    assert_ranks(folder / "s", documents, queries(2, d_cls=d_cls, dim=DIM))


WRONG_ROWS: dict[str, Callable[[np.ndarray], Any]] = {
    "a byte too narrow": lambda rows: rows[:, :-1],
    "a byte too wide": lambda rows: np.c_[rows, rows[:, :1]],
    "signed": lambda rows: rows.view(np.int8),
    "floats": lambda rows: rows.astype(np.float32),
    "flat": lambda rows: rows.reshape(-1),
    "three dimensions": lambda rows: rows[None],
    "a tensor": torch.from_numpy,
    "a list": lambda rows: rows.tolist(),
    "a centroid too many": lambda rows: np.c_[
        np.full((len(rows), 1), 13, "<i4").view(np.uint8), rows[:, 4:]
    ],
    "a negative centroid": lambda rows: rows | 255,
    "65,536 of them": lambda rows: rows[:1].repeat(65_536, axis=0),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", RESIDUAL)
@pytest.mark.parametrize("wrong", WRONG_ROWS)
def test_rows_that_do_not_fit(folder: Path, fmt: str, wrong: str) -> None:
    documents, book = with_rows(fmt)
    victim = documents[3]
    documents[3] = espnx.Document(
        victim.id, victim.text, victim.vectors, WRONG_ROWS[wrong](np.ascontiguousarray(victim.rows))
    )
    with pytest.raises(errors.InvalidInputError):
        build(folder / "s", documents, dims=(D_CLS, DIM), format=fmt, codebook=book)
    with pytest.raises(errors.StoreNotFoundError):
        espnx.open(folder / "s")


@pytest.mark.parametrize("fmt", RESIDUAL)
def test_codebooks_that_do_not_fit(folder: Path, fmt: str) -> None:
    documents, _ = with_rows(fmt)
    others = [codebook_for(fmt, d) for d in (8, 24, 40, 128)] + [
        codebook_for(other, DIM) for other in RESIDUAL if other != fmt
    ]
    for number, book in enumerate([None, *others]):
        with pytest.raises(errors.InvalidInputError):
            build(folder / f"{number}", documents, dims=(D_CLS, DIM), format=fmt, codebook=book)
        with pytest.raises(errors.StoreNotFoundError):
            espnx.open(folder / f"{number}")


@pytest.fixture(scope="module")
def stores() -> Iterator[Path]:
    """One store in each format, named by it, with a coarse tier. Read only."""
    with memory_folder() as path:
        for fmt in FORMATS:
            build(
                path / fmt,
                corpus(40, dim=DIM, tokens=(0, 20)),
                dims=(D_CLS, DIM),
                format=fmt,
                coarse="residual2",
            )
        yield path


FRESH = """
import json
from tests.retrieval.store.test_formats import answers
print(json.dumps({{path: answers(path) for path in {paths}}}))
"""


def answers(path: str | Path) -> list[list[Any]]:
    """Hits of a few searches, to the last bit."""
    with espnx.open(path) as index:
        results = index.search(queries(3, dim=DIM), **WHOLE) + index.search(
            queries(3, dim=DIM), k=7, cascade=9
        )
    return [
        [[hit.id, hit.number, hit.score.hex(), hit.text, hit.reranked] for hit in result.hits]
        for result in results
    ]


def test_another_process_finds_the_same(
    stores: Path, folder: Path, open_forks: Callable[[str], Forks]
) -> None:
    paths = [str(stores / fmt) for fmt in FORMATS]
    out, err = folder / "stdout", folder / "stderr"
    code = open_forks("tests.doc_examples").run(
        text=FRESH.format(paths=paths), cwd=folder, stdout=out, stderr=err
    )
    assert code == 0, err.read_text()
    there = json.loads(out.read_text())
    assert [path for path in paths if there[path] != answers(path)] == []


@pytest.fixture
def signed(stores: Path, folder: Path) -> Callable[[str, Callable[[dict[str, Any]], None]], Path]:
    """Makes a copy of a format's store whose manifest says something else, signed as if it were
    right."""

    def change(fmt: str, what: Callable[[dict[str, Any]], None]) -> Path:
        path = folder / "changed"
        path.mkdir(exist_ok=True)
        fields = json.loads((stores / fmt / "MANIFEST.json").read_text())
        del fields["checksum"]
        what(fields)
        (path / "MANIFEST.json").write_text(
            json.dumps(fields | {"checksum": manifest._digest(fields)})
        )
        if not (path / "gen-000001").exists():
            (path / "gen-000001").symlink_to(stores / fmt / "gen-000001")
        return path

    return change


@pytest.mark.parametrize("unknown", ["fp8", "FP16", "", 6, None, "residual3"])
@pytest.mark.parametrize("tier", ["records", "coarse"])
def test_a_manifest_of_an_unknown_format(
    signed: Callable[..., Path], tier: str, unknown: object
) -> None:
    path = signed("fp16", lambda fields: fields[tier].update(format=unknown))
    with pytest.raises(errors.EspnxError, match="format"):
        espnx.open(path)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_manifest_of_another_format(signed: Callable[..., Path], fmt: str) -> None:
    """Even where rows have the same size: the header of every record says what it is."""
    for other in FORMATS:
        path = signed(fmt, lambda fields, other=other: fields["records"].update(format=other))
        if other == fmt:
            assert answers(path)
            continue
        with pytest.raises(errors.EspnxError):
            answers(path)
