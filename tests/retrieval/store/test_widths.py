"""Vectors of any number of dimensions: padded in records and queries, with the scores of the
vectors themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import espnx
from espnx import errors
from espnx.device.record_layout import RecordSchema
from espnx.ops.maxsim import Codebook
from espnx.retrieval.search.index import Index
from tests.retrieval.common import EVERYTHING, build

FORMATS = ["fp32", "fp16", "bf16", "int8", "bit1", "residual1", "residual2", "residual4"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def unit_documents(count: int, d_cls: int, dim: int, seed: int = 0) -> list[espnx.Document]:
    """Tokens of length 1, none in some documents."""
    rng = torch.Generator().manual_seed(seed)
    return [
        espnx.Document(
            i,
            f"text {i}",
            espnx.Encoded(
                torch.randn(d_cls, generator=rng), normalize(torch.randn(i % 5, dim, generator=rng))
            ),
        )
        for i in range(count)
    ]


def as_stored(tokens: torch.Tensor, fmt: str, book: Codebook | None) -> torch.Tensor:
    """What a format makes of fp32 tokens, by its formula, in the dimensions that they have."""
    dim = tokens.shape[1]
    if fmt in DTYPES:
        return tokens.to(DTYPES[fmt]).float()
    if fmt == "int8":
        scale = tokens.abs().amax(1, keepdim=True) / 127
        return torch.where(scale > 0, (tokens / scale).round(), 0.0) * scale
    if fmt == "bit1":
        return torch.where(tokens >= 0, dim**-0.5, -(dim**-0.5)).float()
    assert book is not None
    centroids = book.centroids[:, :dim]
    near = centroids[(tokens @ centroids.T).argmax(1)]
    return normalize(
        near + book.bucket_weights[torch.bucketize(tokens - near, book.bucket_cutoffs)]
    )


def scores_of(index: Index, query: espnx.Encoded, **options: int) -> dict[object, float]:
    hits = index.search(
        query, k=EVERYTHING, candidates=EVERYTHING, nprobe=EVERYTHING, **options
    ).hits
    return {hit.id: hit.score for hit in hits}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("d_cls", "dim"), [(2, 2), (3, 12), (0, 1), (16, 16)])
def test_scores_are_those_of_the_vectors(folder: Path, fmt: str, d_cls: int, dim: int) -> None:
    """Also what lossy codes are made of: fp32 values, not rounded before."""
    documents = unit_documents(60, d_cls, dim)
    build(folder / "s", documents[:50], dims=(d_cls, dim), format=fmt)
    espnx.add(folder / "s", documents[50:])
    query = espnx.Encoded(torch.randn(d_cls), torch.randn(4, dim))
    with espnx.open(folder / "s") as index:
        assert index.store.verify() == 60
        assert (index.store.full.schema.d_cls, index.store.full.schema.dim) == (d_cls, dim)
        found = scores_of(index, query)
        assert len(found) == 60
        cls_dtype = DTYPES.get(fmt, torch.float16)
        for document in documents:
            assert document.vectors is not None
            stored = as_stored(document.vectors.tokens, fmt, index.store.full.codebook)
            expected = float(query.cls @ document.vectors.cls.to(cls_dtype).float())
            expected += float((query.tokens @ stored.T).amax(1).sum()) if len(stored) else 0.0
            assert found[document.id] == pytest.approx(expected, abs=2e-4)
        best = index.search(query, k=3, explain=True).hits[0]
        assert best.matches is not None
        assert sum(match.score for match in best.matches) + float(
            query.cls @ documents[int(best.id)].vectors.cls.to(cls_dtype).float()  # type: ignore[union-attr]
        ) == pytest.approx(best.score, abs=2e-4)


@pytest.mark.parametrize("coarse", ["bit1", "int8", "residual2"])
@pytest.mark.parametrize("place", ["ssd", "ram"])
def test_a_cascade(folder: Path, coarse: str, place: str) -> None:
    documents = unit_documents(60, 3, 5)
    build(folder / "s", documents, dims=(3, 5), coarse=coarse)
    query = espnx.Encoded(torch.randn(3), torch.randn(4, 5))
    with espnx.open(folder / "s", coarse=place) as index:
        assert scores_of(index, query, cascade=EVERYTHING) == scores_of(index, query)


def test_a_projection_to_any_width(folder: Path) -> None:
    documents = unit_documents(60, 4, 12)
    build(folder / "s", documents, dims=(4, 12), pca=5, pooling="muvera")
    with espnx.open(folder / "s") as index:
        projection = index.store.projection
        assert projection is not None
        query = espnx.Encoded(torch.randn(4), torch.randn(4, 12))
        found = scores_of(index, query)
        for document in documents:
            assert document.vectors is not None
            if len(document.vectors.tokens):
                stored = projection(document.vectors.tokens).half().float()
                expected = float((projection(query.tokens) @ stored.T).amax(1).sum()) + float(
                    query.cls @ document.vectors.cls.half().float()
                )
                assert found[document.id] == pytest.approx(expected, abs=2e-2)


@pytest.mark.parametrize("nbits", [1, 2, 4])
def test_zeros_of_a_codebook_are_decoded_to_zeros(nbits: int) -> None:
    """To the bit, whatever the cutoffs, also where several are the same."""
    rng = np.random.default_rng(nbits)
    for turn in range(60):
        weights = np.sort(
            rng.choice([-0.5, -0.1, 0.0, 0.1, 0.3], 2**nbits)
            if turn % 2
            else rng.normal(size=2**nbits)
        ).astype(np.float32)
        cutoffs = np.sort(
            (weights[1:] + weights[:-1]) / 2 if turn % 3 else rng.choice(weights, 2**nbits - 1)
        ).astype(np.float32)
        book = Codebook(torch.randn(7, 5), torch.from_numpy(cutoffs), torch.from_numpy(weights))
        schema = RecordSchema(f"residual{nbits}", 0, 5)
        tokens = normalize(torch.randn(9, 5))
        padded = schema.pad_codebook(book)
        whole = RecordSchema(f"residual{nbits}", 0, 8).decode(schema.encode(tokens, padded), padded)
        assert torch.equal(whole[:, 5:], torch.zeros(9, 3))
        assert torch.allclose(
            schema.decode(schema.encode(tokens, padded), padded),
            as_stored(tokens, f"residual{nbits}", book),
            atol=1e-6,
        )


def test_rows_that_are_coded_already_must_fit(folder: Path) -> None:
    book = Codebook(torch.randn(3, 12), torch.tensor([0.0]), torch.tensor([-0.1, 0.1]))
    with pytest.raises(errors.InvalidInputError, match="multiple of 8"):
        build(
            folder / "s",
            [espnx.Document(1, "", rows=np.zeros((1, 6), np.uint8))],
            dims=(0, 12),
            format="residual1",
            codebook=book,
        )


def test_the_encoder_of_a_functions_docstring(folder: Path) -> None:
    encoder = espnx.FunctionEncoder(
        lambda texts: [([1.0, 0.0], [[0.0, 1.0]] * len(t.split())) for t in texts],
        "toy@1",
        d_cls=2,
        dim=2,
    )
    espnx.build(
        folder / "s", [("a", "two words"), ("b", ""), ("c", "three words here")][::2], encoder
    )
    with espnx.open(folder / "s", encoder) as index:
        assert [hit.score for hit in index.search("any word").hits] == [3.0, 3.0]


def unit_rows(count: int, dim: int, rank: int, seed: int) -> torch.Tensor:
    """Of length 1, most of it in the first few dimensions of a random basis."""
    rng = np.random.default_rng(seed)
    spread = np.exp(-np.arange(dim) / rank)
    return normalize(torch.from_numpy((rng.normal(size=(count, dim)) * spread).astype(np.float32)))


def test_projected_unit_vectors_keep_their_length(folder: Path) -> None:
    """Documents of the build, those added, and queries; a flag in the manifest says so."""
    documents = [
        espnx.Document(i, "", espnx.Encoded(torch.ones(8), unit_rows(3, 24, 4, i)))
        for i in range(40)
    ]
    build(folder / "s", documents[:30], dims=(8, 24), pca=8, format="fp32")
    espnx.add(
        folder / "s",
        [
            *documents[30:],
            espnx.Document("long", "", espnx.Encoded(torch.ones(8), 5 * unit_rows(2, 24, 4, 99))),
        ],
    )
    with espnx.open(folder / "s") as index:
        assert index.store.manifest.is_normalised is True
        projection = index.store.projection
        assert projection is not None
        assert projection.is_normalised
        query = espnx.Encoded(torch.zeros(8), unit_rows(4, 24, 4, 7))
        found = scores_of(index, query)
        shown = normalize(query.tokens @ projection.components)
        for document in documents:
            assert document.vectors is not None
            kept = normalize(document.vectors.tokens @ projection.components)
            assert found[document.id] == pytest.approx(
                float((shown @ kept.T).amax(1).sum()), abs=1e-4
            )
        kept = 5 * normalize(unit_rows(2, 24, 4, 99) @ projection.components)
        assert found["long"] == pytest.approx(float((shown @ kept.T).amax(1).sum()), abs=1e-4)
        espnx.compact(folder / "s")
    with espnx.open(folder / "s") as index:
        assert scores_of(index, query) == pytest.approx(found, abs=1e-5)


def test_projected_vectors_of_any_length_are_not_scaled(folder: Path) -> None:
    documents = [
        espnx.Document(i, "", espnx.Encoded(torch.ones(8), 1.01 * unit_rows(3, 24, 4, i)))
        for i in range(30)
    ]
    build(folder / "s", documents, dims=(8, 24), pca=8)
    with espnx.open(folder / "s") as index:
        assert index.store.manifest.is_normalised is False
    one = torch.eye(24)[:1]
    from espnx.retrieval.store.projection import Projection

    fitted = Projection.fit(
        iter([torch.cat([unit_rows(50, 8, 4, 1), torch.zeros(50, 16)], 1), torch.zeros(1, 24)]),
        24,
        8,
    )
    assert fitted.is_normalised, "a token of zeros is of no length"
    assert torch.equal(fitted(torch.zeros(2, 24)), torch.zeros(2, 8))
    assert float(fitted(one.roll(20, 1)).norm()) < 1e-4, (
        "what a projection leaves of a vector outside it is noise, and stays small"
    )
