"""Codebooks that documents bring: told apart by a resumed build, refused where they do not belong,
found out where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.device.record_layout import RecordSchema, unknown_centroid
from espnx.ops.maxsim import Codebook, token_format
from espnx.retrieval.reference import InMemoryReference
from espnx.storage import manifest
from tests.ops.records import codebook_for
from tests.retrieval.common import D_CLS, EVERYTHING, build, corpus, queries, same
from tests.retrieval.store.test_formats import (
    DIM,
    FORMATS,
    RESIDUAL,
    ROW_BYTES,
    expected,
    with_rows,
)


class StopError(Exception):
    pass


def stopped_at(phase: str) -> Callable[[str, int, int | None], None]:
    def progress(now: str, done: int, total: int | None) -> None:
        if now == phase:
            raise StopError

    return progress


def changed(book: Codebook, name: str) -> Codebook:
    """Another one, in a single value of one tensor."""
    tensors = {
        field: getattr(book, field).clone()
        for field in ("centroids", "bucket_cutoffs", "bucket_weights")
    }
    tensors[name].view(-1)[0] -= 2.0**-20
    return Codebook(**tensors)


@pytest.mark.parametrize("name", ["centroids", "bucket_cutoffs", "bucket_weights"])
def test_a_resumed_build_must_have_the_same_codebook(folder: Path, name: str) -> None:
    documents, book = with_rows("residual2", counts=(3,) * 18)
    options: dict[str, Any] = {"dims": (D_CLS, DIM), "format": "residual2"}
    with pytest.raises(StopError):
        build(
            folder / "s",
            documents,
            codebook=changed(book, name),
            progress=stopped_at("arrange"),
            **options,
        )
    with pytest.raises(StopError), pytest.warns(UserWarning, match="other settings: codebook="):
        build(folder / "s", documents, codebook=book, progress=stopped_at("arrange"), **options)
    again = Codebook(
        book.centroids.clone(), book.bucket_cutoffs.clone(), book.bucket_weights.clone()
    )
    assert build(folder / "s", documents, codebook=again, **options).resumed_documents == 18
    with espnx.open(folder / "s") as index:
        assert index.store.full.codebook is not None
        assert torch.equal(index.store.full.codebook.centroids, book.centroids)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("d_cls", "pooling"), [(D_CLS, None), (D_CLS, "mean"), (0, None), (0, "muvera")]
)
def test_the_reference_finds_what_search_finds(
    folder: Path, fmt: str, d_cls: int, pooling: str | None
) -> None:
    """The same candidates with the scores of the documents' own rows; with parts and deleted
    documents, CLS, mean and MUVERA vectors."""
    documents = corpus(90, d_cls=d_cls, dim=DIM, tokens=(1, 9))
    build(
        folder / "s", documents[:70], dims=(d_cls, DIM), format=fmt, pooling=pooling, cls_weight=1.5
    )
    espnx.add(folder / "s", documents[70:])
    espnx.delete(folder / "s", ["doc-3", "doc-80"])
    alive = [document for document in documents if document.id not in ("doc-3", "doc-80")]
    with espnx.open(folder / "s") as index:
        reference, weight = (
            InMemoryReference(index.store, index.first_stage),
            index.store.manifest.cls_weight,
        )
        for query in queries(2, d_cls=d_cls, dim=DIM):
            scores, bounds = expected(index, alive, query, "portable")
            for candidates, nprobe in ((EVERYTHING, EVERYTHING), (20, 2)):
                hits = index.search(query, k=candidates, candidates=candidates, nprobe=nprobe).hits
                ranked = reference.rank(
                    query, candidates=candidates, nprobe=nprobe, cls_weight=weight
                )
                assert sorted(hit.number for hit in hits) == sorted(number for number, _ in ranked)
                assert len(ranked) == min(candidates, 88)
                assert ranked == sorted(ranked, key=lambda pair: (-pair[1], pair[0]))
                ids = {hit.number: hit.id for hit in hits}
                assert all(
                    same(score, scores[ids[number]], bounds[ids[number]])
                    for number, score in ranked
                )


def refused(
    folder: Path,
    documents: list[espnx.Document],
    match: str,
    untouched: bool = True,
    **options: Any,
) -> None:
    """Before a document is asked for, unless told otherwise."""
    source = iter(documents)
    with pytest.raises(errors.InvalidInputError, match=match):
        build(folder / "s", source, restart=True, **{"dims": (D_CLS, DIM), **options})
    assert len(list(source)) == len(documents) or not untouched
    with pytest.raises(errors.StoreNotFoundError):
        espnx.open(folder / "s")


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16", "int8", "bit1"])
@pytest.mark.parametrize("count", [0, 5])
def test_a_codebook_that_the_format_has_no_use_for(folder: Path, fmt: str, count: int) -> None:
    match = f"{fmt} rows have no codebook"
    refused(
        folder, corpus(count, dim=DIM), match, format=fmt, codebook=codebook_for("residual2", DIM)
    )
    coarse = "int8" if fmt == "bit1" else "residual2"
    refused(
        folder,
        corpus(count, dim=DIM),
        match,
        format=fmt,
        coarse=coarse,
        codebook=codebook_for("residual2", DIM),
    )


@pytest.mark.parametrize("fmt", RESIDUAL)
def test_a_codebook_that_does_not_fit_is_refused_up_front(folder: Path, fmt: str) -> None:
    documents, book = with_rows(fmt)
    for given in (documents, []):
        for d in (24, 40):
            refused(
                folder, given, "rows of another codebook", format=fmt, codebook=codebook_for(fmt, d)
            )
        other = next(name for name in RESIDUAL if name != fmt)
        refused(
            folder, given, "rows of another codebook", format=fmt, codebook=codebook_for(other, DIM)
        )
        for pca in (8, DIM):
            refused(
                folder,
                given,
                f"pca beside codebook=; got {pca}",
                format=fmt,
                codebook=book,
                pca=pca,
            )
    build(folder / "s", documents, dims=(D_CLS, DIM), format=fmt, codebook=book)


@pytest.mark.parametrize("fmt", RESIDUAL)
def test_what_is_said_of_rows_and_codebooks_that_miss_each_other(folder: Path, fmt: str) -> None:
    documents, book = with_rows(fmt)
    options: dict[str, Any] = {"format": fmt, "untouched": False}
    refused(
        folder,
        documents,
        rf"rows of document 0; .*no codebook; expected uint8 \[n, {ROW_BYTES[fmt]}\]",
        **options,
    )
    for other in (
        corpus(1, dim=DIM, tokens=(3, 3)),
        corpus(1, dim=DIM, tokens=(0, 0)),
        [espnx.Document("doc-0", "a text")],
    ):
        match = (
            r"'doc-0' beside codebook=; got (vectors|a text); expected rows, uint8 \[n, "
            rf"{ROW_BYTES[fmt]}\].*leave codebook= out"
        )
        refused(folder, documents[:2] + other, match, codebook=book, **options)
    refused(
        folder,
        documents,
        "document 0 in a store of fp16; got rows; expected vectors",
        format="fp16",
        untouched=False,
    )


@pytest.mark.parametrize("tier", ["records", "coarse"])
@pytest.mark.parametrize("unknown", ["fp8", 6, None, ["fp16"], {}])
def test_a_manifest_of_an_unknown_format_is_named(folder: Path, tier: str, unknown: object) -> None:
    build(folder / "s", corpus(3, dim=DIM), dims=(D_CLS, DIM), coarse="bit1")
    top = folder / "s" / manifest.NAME
    fields = json.loads(top.read_text())
    del fields["checksum"]
    fields[tier]["format"] = unknown
    top.write_text(json.dumps(fields | {"checksum": manifest._digest(fields)}))
    with pytest.raises(
        errors.FormatError, match=rf"field {tier}\.format.*; got .*; expected "
    ) as caught:
        espnx.open(folder / "s")
    assert caught.value.path == str(top)


@pytest.mark.parametrize("unknown", [[], ["fp16"], {}, None, 6])
def test_formats_that_are_no_names(folder: Path, unknown: Any) -> None:
    with pytest.raises(errors.InvalidInputError, match="unknown token format"):
        token_format(unknown)
    if unknown is not None:  # the default of a build
        refused(folder, corpus(3, dim=DIM), "unknown record format", format=unknown)


@pytest.mark.parametrize("fmt", RESIDUAL)
def test_the_record_that_names_an_unknown_centroid(fmt: str) -> None:
    """In any order in memory, at any address; the first and the last row of short and long
    records."""
    schema, counts = (
        RecordSchema(fmt, D_CLS, DIM),
        np.array([0, 5000, 3, 4100, 0, 4096, 1, 65_535, 2, 0], np.uint16),
    )
    order = [7, 2, 9, 0, 5, 1, 8, 3, 4, 6]
    ends = np.cumsum([schema.fixed_bytes + int(counts[i]) * schema.row_bytes + 1 for i in order])
    positions = torch.zeros(len(counts), dtype=torch.int64)
    positions[torch.tensor(order)] = torch.from_numpy(np.r_[0, ends[:-1]])
    memory = torch.full((int(ends[-1]),), 255, dtype=torch.uint8)
    for position, count in zip(positions.tolist(), counts.tolist(), strict=True):
        rows = memory[position + schema.fixed_bytes :][: count * schema.row_bytes].view(
            count, schema.row_bytes
        )
        rows[:, :4] = torch.tensor([12, 0, 0, 0], dtype=torch.uint8)
    find = lambda: unknown_centroid(memory, schema, positions, counts, 13)  # noqa: E731
    assert find() is None
    assert unknown_centroid(memory, schema, positions, counts, 12) == (1, 12)
    for i in np.flatnonzero(counts).tolist():
        for row in (0, int(counts[i]) - 1):
            at = int(positions[i]) + schema.fixed_bytes + row * schema.row_bytes
            for value in (13, -1, 2**31 - 1, -(2**31)):
                memory[at : at + 4] = torch.from_numpy(np.array([value], "<i4").view(np.uint8))
                assert find() == (i, value)
            memory[at : at + 4] = torch.tensor([12, 0, 0, 0], dtype=torch.uint8)
    assert unknown_centroid(memory, schema, positions[:0], counts[:0], 13) is None


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_token_of_any_layout(fmt: str) -> None:
    """PyTorch gives empty arrays of NumPy strides of 0."""
    book = codebook_for(fmt, 8)
    for empty in (
        torch.from_numpy(np.empty((0, 8), np.float32)),
        torch.empty_strided((0, 8), (0, 0)),
        torch.empty(8, 0).T,
    ):
        rows = token_format(fmt).encode(empty, book)
        assert (rows.dtype, list(rows.shape)) == (torch.uint8, [0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("coarse", [None, "bit1", "residual2"])
@pytest.mark.parametrize(
    "options", [{}, {"format": "residual4"}, {"pca": 16}, {"centroids": 5, "format": "residual1"}]
)
@pytest.mark.parametrize("count", [0, 128])
def test_the_report_counts_what_the_open_store_holds(
    folder: Path, count: int, options: dict[str, Any], coarse: str | None
) -> None:
    report = build(
        folder / "s", corpus(count, dim=DIM), dims=(D_CLS, DIM), coarse=coarse, **options
    )
    with espnx.open(folder / "s") as index:
        assert report.resident_bytes_per_document == index.store.resident_bytes / max(1, count)
    if count and coarse == "bit1" and not options:
        assert report.resident_bytes_per_document == 2.5
