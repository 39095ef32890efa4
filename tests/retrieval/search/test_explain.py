"""Explanations: the matches of a hit add up to its MaxSim."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import espnx
from tests.retrieval.common import DIM, EVERYTHING, build, corpus, queries


@pytest.mark.parametrize("fmt", ["fp16", "fp32"])
def test_matches_are_the_sum_of_the_score(folder: Path, fmt: str) -> None:
    documents = {d.id: d for d in corpus(60, tokens=(0, 9))}
    build(folder / "s", documents.values(), format=fmt)
    with espnx.open(folder / "s") as index:
        for query in queries(3):
            result = index.search(
                query, k=60, candidates=60, nprobe=EVERYTHING, cls_weight=0.0, explain=True
            )
            for hit in result.hits:
                tokens = (
                    documents[hit.id].vectors.tokens.half().float()
                    if fmt == "fp16"
                    else documents[hit.id].vectors.tokens
                )
                if not len(tokens):
                    assert hit.matches == ()
                    continue
                products = query.tokens @ tokens.T
                assert [match.query_token for match in hit.matches] == list(
                    range(len(query.tokens))
                )
                assert [match.document_token for match in hit.matches] == products.argmax(
                    dim=1
                ).tolist()
                assert sum(match.score for match in hit.matches) == pytest.approx(
                    hit.score, abs=1e-4
                )
            assert index.search(query, k=3).hits[0].matches is None


def test_nothing_to_explain(folder: Path) -> None:
    build(folder / "s", corpus(5))
    with espnx.open(folder / "s") as index:
        empty = espnx.Encoded(queries(1)[0].cls, torch.empty(0, DIM))
        assert all(hit.matches == () for hit in index.search(empty, explain=True).hits)
        assert index.search(queries(1)[0], explain=True, include=[]).hits == []
