"""Corpora: the same everywhere, as their recipes say, chunk by chunk; stores found again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from espnx.benchmarks.corpora import base as corpus_base
from espnx.benchmarks.corpora.base import NOISE, Base, Expanded, ensure_base, expand
from espnx.benchmarks.corpora.mixtures import (
    CHUNK_DOCUMENTS,
    MIXTURES,
    QUERY_CLS_NOISE,
    QUERY_TOKENS,
    Documents,
    Mixture,
    MixtureRecipe,
    chunks_of_cls,
    make_queries,
)
from espnx.benchmarks.corpora.stores import ensure_store, found_store, load_queries, store_key
from espnx.errors import DiskFullError, InvalidInputError

RECIPE = MixtureRecipe(topics=50, latent=8, spread=0.5)


def quiet(text: str) -> None:
    pass


def base(count: int = 5) -> Base:
    rng = np.random.default_rng(0)
    counts = np.arange(1, count + 1)
    tokens = rng.normal(size=(int(counts.sum()), 32)).astype(np.float16)
    return Base(rng.normal(size=(count, 128)).astype(np.float32), tokens, counts, "toy")


def test_a_mixture_is_the_same_however_it_is_read() -> None:
    corpus, again = (
        Mixture("B", CHUNK_DOCUMENTS + 10, RECIPE),
        Mixture("B", CHUNK_DOCUMENTS + 10, RECIPE),
    )
    first, last = corpus.chunk(0), again.chunk(1)
    assert (len(first.counts), len(last.counts)) == (CHUNK_DOCUMENTS, 10)
    np.testing.assert_array_equal(first.tokens, again.chunk(0).tokens)
    np.testing.assert_array_equal(
        np.concatenate(list(chunks_of_cls(corpus))), np.concatenate([first.cls, last.cls])
    )
    documents = list(Documents(corpus))
    assert [document.id for document in documents] == list(range(corpus.count))
    vectors = documents[CHUNK_DOCUMENTS + 3].vectors
    assert vectors is not None
    begin = int(last.counts[:3].sum())
    np.testing.assert_array_equal(
        vectors.tokens.numpy(), last.tokens[begin : begin + int(last.counts[3])]
    )


def test_a_larger_corpus_begins_with_the_smaller_one() -> None:
    small, large = Mixture("B", 100, RECIPE).chunk(0), Mixture("B", 200, RECIPE).chunk(0)
    np.testing.assert_array_equal(small.counts, large.counts[:100])


def test_vectors_of_a_mixture_have_norm_one_and_lengths_their_mean() -> None:
    chunk = Mixture("B", CHUNK_DOCUMENTS, RECIPE).chunk(0)
    np.testing.assert_allclose(np.linalg.norm(chunk.cls, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(chunk.tokens, axis=1), 1, atol=1e-5)
    assert chunk.counts.mean() == pytest.approx(68, rel=0.03)
    assert 12 <= chunk.counts.min() <= chunk.counts.max() <= 200


def test_documents_of_a_topic_are_near_each_other_and_c_is_harder_than_b() -> None:
    def spread(name: str) -> float:
        cls = (
            Mixture(name, 2000, MixtureRecipe(20, MIXTURES[name].latent, MIXTURES[name].spread))
            .chunk(0)
            .cls
        )
        similar = np.sort(cls @ cls.T, axis=1)
        return float(similar[:, -50:-1].mean() - np.median(similar))

    assert spread("B") > spread("C") > 0.2


def test_other_recipes_sizes_and_seeds_have_other_keys() -> None:
    keys = {
        Mixture(*arguments).key
        for arguments in (
            ("B", 10, RECIPE),
            ("B", 11, RECIPE),
            ("C", 10, RECIPE),
            ("B", 10, RECIPE, 2),
        )
    }
    assert len(keys) == 4
    corpus = Mixture("B", 10, RECIPE)
    assert store_key(corpus, {"nlist": 1}) != store_key(corpus, {"nlist": 2})


def test_queries_resemble_the_document_they_were_made_of() -> None:
    corpus = Mixture("B", 300, RECIPE)
    cls, queries = corpus.chunk(0).cls, make_queries(corpus, 20)
    assert [query.tokens.shape for query in queries] == [(QUERY_TOKENS, 32)] * 20
    nearest = np.array([float((cls @ query.cls.numpy()).max()) for query in queries])
    # a unit vector plus noise of norm s, scaled: cosine 1 / sqrt(1 + s^2), give or take its
    # projection
    assert nearest.mean() == pytest.approx(1 / (1 + QUERY_CLS_NOISE**2) ** 0.5, abs=0.05)
    assert all(
        np.array_equal(a.cls, b.cls) for a, b in zip(queries, make_queries(corpus, 20), strict=True)
    )


def test_expansion_is_kioxias_recipe() -> None:
    vectors = np.random.default_rng(0).normal(size=(4000, 32)).astype(np.float32)
    changed = (expand(vectors, np.random.default_rng(1)) - vectors) / (
        np.linalg.norm(vectors, axis=1, keepdims=True) / 32**0.5
    )
    is_zero, is_noise = (
        np.isclose(changed, 0, atol=1e-4),
        np.isclose(np.abs(changed), NOISE, atol=1e-4),
    )
    assert (is_zero | is_noise).all()
    assert is_zero.mean() == pytest.approx(0.5, abs=0.01)
    assert (changed[is_noise] > 0).mean() == pytest.approx(0.5, abs=0.01)


def test_copies_go_round_the_base_and_differ() -> None:
    real = base()
    corpus = Expanded(real, 12)
    chunk = corpus.chunk(0)
    np.testing.assert_array_equal(chunk.counts, real.counts[np.arange(12) % 5])
    np.testing.assert_array_equal(chunk.cls, corpus.cls(0))
    assert not np.array_equal(chunk.cls[0], chunk.cls[5])
    np.testing.assert_allclose(
        chunk.cls[5], real.cls[0], atol=NOISE * np.linalg.norm(real.cls[0]) / 128**0.5 * 1.01
    )
    # document 7 is a copy of base document 2, whose tokens are rows 3 to 5
    begin = int(chunk.counts[:7].sum())
    size = np.linalg.norm(real.tokens[3:6].astype(np.float32), axis=1).max()
    np.testing.assert_allclose(
        chunk.tokens[begin : begin + 3],
        real.tokens[3:6].astype(np.float32),
        atol=NOISE * size / 32**0.5 * 1.01,
    )


def test_a_base_needs_enough_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"_id": str(i), "text": f"text {i}"}) for i in range(3)))
    seen: list[list[str]] = []
    monkeypatch.setattr(corpus_base, "encode", lambda passages, path, say: seen.append(passages))
    with pytest.raises(InvalidInputError, match="at most 3"):
        ensure_base(tmp_path, 4, quiet, texts=texts)
    assert seen == []


def test_a_store_is_built_once(tmp_path: Path) -> None:
    corpus = Mixture("B", 60, RECIPE)
    options = {"nlist": 2, "first_stage_code": "flat"}
    made = ensure_store(tmp_path, "B", corpus, options, quiet)
    manifest = made.store / "MANIFEST.json"
    stamp = manifest.stat().st_mtime_ns
    assert ensure_store(tmp_path, "B", corpus, options, quiet) == made
    assert manifest.stat().st_mtime_ns == stamp
    assert found_store(made.store.parent).documents == 60
    assert load_queries(made.queries)[0].tokens.shape == (QUERY_TOKENS, 32)
    with pytest.raises(InvalidInputError, match=r"queries\.safetensors"):
        found_store(tmp_path)


def test_a_full_disk_is_told_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError):
        ensure_store(tmp_path, "B", Mixture("B", 10**12, RECIPE), {}, quiet)
