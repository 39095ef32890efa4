"""A judged collection: a folder in BEIR's form, or a few sentences."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import espnx
from espnx.importers.beir import read_beir

_TOPICS = ("reads", "graphs", "caches", "lists", "disks", "tokens", "codes", "pages")


@dataclass(frozen=True)
class Collection:
    """Attributes: queries: text by query. qrels: judgements by query."""

    documents: Any
    queries: dict[str, str]
    qrels: Mapping[str, Mapping[str, int]]
    name: str

    def params(self, index: espnx.Index) -> dict[str, Any]:
        """Parameters of every row."""
        encoder = index.store.manifest.encoder.name  # which says, too, where it computes in bf16
        return {
            "collection": self.name,
            "documents": len(index),
            "queries": len(self.queries),
            "encoder": encoder,
        }


def read_collection(folder: str) -> Collection:
    """Raises what `read_beir` raises."""
    found = read_beir(folder)
    return Collection(
        found.corpus, found.queries, found.qrels, os.path.basename(os.path.abspath(folder))
    )


def toy_collection() -> Collection:
    """Forty sentences, each asked for by some of its words."""
    rng = np.random.default_rng(0)
    texts = [
        f"{_TOPICS[i % 8]} of {' and '.join(rng.choice(_TOPICS, 3, replace=False))} number {i}"
        for i in range(40)
    ]
    documents = [{"id": str(i), "text": text} for i, text in enumerate(texts)]
    asked = {f"q{i}": " ".join(texts[i].split()[-5:]) for i in range(0, 40, 8)}
    return Collection(documents, asked, {name: {name[1:]: 1} for name in asked}, "toy")
