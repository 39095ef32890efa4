"""First-stage indexes of several codes over one corpus: built with the same lists, measured by what
they take and what they find."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from espnx.ops.quantise import fit_clusters, load_faiss

from ..corpora.mixtures import Corpus, chunks_of_cls
from ..harness.registry import Say
from ..machine.memory import rss_bytes

_TRAINING_ROWS_PER_LIST = 64


def build_indexes(
    folder: Path, corpus: Corpus, nlist: int, codes: Sequence[str], say: Say
) -> dict[str, Path]:
    """Index files by code, made unless they are there. All have the centroids of the first; ids are
    the documents' numbers."""
    paths = {code: folder / f"index-{nlist}-{code}.faiss" for code in codes}
    if all(path.exists() for path in paths.values()):
        return paths
    faiss = load_faiss()
    begun = time.perf_counter()
    vectors = np.concatenate(list(chunks_of_cls(corpus)))
    rng = np.random.default_rng(0)
    sample = vectors[
        np.sort(
            rng.choice(
                len(vectors), min(len(vectors), _TRAINING_ROWS_PER_LIST * nlist), replace=False
            )
        )
    ]
    centroids = fit_clusters(sample, nlist, is_spherical=True)
    quantizer = faiss.IndexFlatIP(corpus.d_cls)
    quantizer.add(centroids)
    lists = quantizer.search(vectors, 1)[1]
    for code, path in paths.items():
        index = faiss.index_factory(
            corpus.d_cls, f"IVF{nlist},{_factory(code)}", faiss.METRIC_INNER_PRODUCT
        )
        index.quantizer.add(centroids)  # trained already, so that training concerns the code alone
        if hasattr(index, "pq"):
            index.pq.cp.min_points_per_centroid = 1  # small corpora are no mistake
        index.train(sample)
        numbers = np.arange(len(vectors), dtype=np.int64)
        pointer = faiss.swig_ptr
        index.add_core(
            len(vectors), pointer(vectors), pointer(numbers), pointer(np.ascontiguousarray(lists))
        )
        faiss.write_index(index, str(path.with_suffix(".part")))
        path.with_suffix(".part").rename(path)
        del index
    say(f"  built first-stage indexes {', '.join(codes)} in {time.perf_counter() - begun:.0f} s")
    return paths


def _factory(code: str) -> str:
    return f"PQ{code[2:]}np" if code.startswith("pq") else code.upper().replace("FLAT", "Flat")


def measure_index(
    path: str, vectors: np.ndarray, candidates: int, nprobe: int | None
) -> dict[str, Any]:
    """Growth of this process's memory by reading an index, and the ids it finds for `vectors`
    (nprobe None: in all lists)."""
    faiss = load_faiss()
    gc.collect()
    before = rss_bytes()
    index = faiss.read_index(path)
    grown = rss_bytes() - before
    lists = index.nlist if nprobe is None else nprobe
    begun = time.perf_counter()
    found = [
        index.search(one[None], candidates, params=faiss.SearchParametersIVF(nprobe=lists))[1][0]
        for one in vectors
    ]
    seconds = (time.perf_counter() - begun) / len(vectors)
    return {
        "rss_growth_bytes": grown,
        "file_bytes": Path(path).stat().st_size,
        "seconds_per_query": seconds,
        "numbers": [ids[ids >= 0].tolist() for ids in found],
    }


def faiss_overlap(
    index: Any, vectors: np.ndarray, candidates: int, nprobe: int, shares: Sequence[float]
) -> dict[str, Any]:
    """Mean share of the candidates of one FAISS search with `nprobe` lists that one with a share of
    those lists finds, by share, and the recall of the former. Sums of equal parts: nothing of espnx
    is used."""
    faiss = load_faiss()

    def find(vector: np.ndarray, lists: int) -> np.ndarray:
        return index.search(
            vector[None], candidates, params=faiss.SearchParametersIVF(nprobe=lists)
        )[1][0]

    hits, exhaustive = np.zeros(len(shares)), 0.0
    for vector in vectors:
        final = find(vector, nprobe)
        exhaustive += overlap(final, find(vector, index.nlist))
        hits += [overlap(find(vector, max(1, round(share * nprobe))), final) for share in shares]
    return {"hit_rates": (hits / len(vectors)).tolist(), "recall": exhaustive / len(vectors)}


def overlap(found: np.ndarray, wanted: np.ndarray) -> float:
    """Share of `wanted` that was found; ids below 0 are none."""
    wanted = wanted[wanted >= 0]
    return len(np.intersect1d(found, wanted)) / max(1, len(wanted))
