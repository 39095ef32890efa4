"""Indexes across to diskannpy and back, for scripts/diskann_check.sh: ``diskann_check.py DIRECTORY
PEER_PYTHON``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import espnx.graph

N, DIM, QUERIES, LIST_SIZE = 5000, 32, 200, 64
#: Of the recall, that the other program may find less with the same graph.
MARGIN = 0.01
PEER = Path(__file__).with_name("diskann_peer.py")


def clustered(n: int, seed: int) -> np.ndarray:
    """float32 [n, DIM]: overlapping clusters in a space of few dimensions, and noise."""
    space, random = np.random.default_rng(99), np.random.default_rng(seed)
    centres, spread = space.standard_normal((50, 12)), space.standard_normal((12, DIM))
    latent = centres[random.integers(0, 50, n)] + 0.5 * random.standard_normal((n, 12))
    return (latent @ spread + 0.1 * random.standard_normal((n, DIM))).astype(np.float32)


def exact(base: np.ndarray, queries: np.ndarray, metric: str) -> np.ndarray:
    """int64 [q, 10]."""
    a, b = base.astype(np.float64), queries.astype(np.float64)
    far = -(b @ a.T) if metric == "ip" else np.square(a).sum(axis=1) - 2 * (b @ a.T)
    return np.argsort(far, axis=1, kind="stable")[:, :10]


def recall_of(found: np.ndarray, true: np.ndarray) -> float:
    return (
        sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(found, true, strict=True))
        / true.size
    )


class Check:
    """Runs both programs on the same vectors and keeps count of what is not as it should be."""

    def __init__(self, work: Path, peer_python: str):
        self._work, self._peer, self.failures = work, peer_python, 0

    def _ask(self, *words: object) -> None:
        with (self._work / "peer.log").open("a") as log:
            subprocess.run([self._peer, PEER, *map(str, words)], check=True, stdout=log, stderr=log)

    def _searched_there(self, directory: Path, prefix: str, queries: np.ndarray) -> np.ndarray:
        np.save(self._work / "queries.npy", queries)
        self._ask(
            "search",
            directory,
            prefix,
            self._work / "queries.npy",
            self._work / "found.npy",
            LIST_SIZE,
        )
        return np.load(self._work / "found.npy")

    def _searched_here(self, path: Path, queries: np.ndarray) -> np.ndarray:
        with espnx.graph.open(path) as index:
            index.verify()
            return index.search(queries, 10, list_size=LIST_SIZE).ids

    def _compare(
        self, what: str, ours: float, theirs: float, *, moved: float, stayed: float
    ) -> None:
        is_well = moved >= stayed - MARGIN
        self.failures += not is_well
        print(
            f"{what:44} recall@10, list of {LIST_SIZE}: espnx {ours:.4f}, diskannpy {theirs:.4f}  "
            f"{'ok' if is_well else 'FAILED'}"
        )

    def export(self, dtype: str, codes: str) -> None:
        """A graph of ours, searched there."""
        base, queries = clustered(N, 0), clustered(QUERIES, 1)
        if dtype == "uint8":
            base, queries = (
                np.clip(each * 12 + 128, 0, 255).astype(np.uint8) for each in (base, queries)
            )
        name = f"ours_{dtype}_{codes}"
        options = {
            "max_degree": 32,
            "list_size": 64,
            "vector_dtype": dtype,
            "codes": codes,
            "pq_bytes": 16,
        }
        espnx.graph.build(base, self._work / name, **options)
        espnx.graph.export_diskann(self._work / name, self._work / f"{name}_ann")
        true = exact(base, queries, "l2")
        ours = recall_of(self._searched_here(self._work / name, queries), true)
        theirs = recall_of(self._searched_there(self._work, f"{name}_ann", queries), true)
        self._compare(f"exported, {dtype}, codes {codes}", ours, theirs, moved=theirs, stayed=ours)

    def bring(self, metric: str, dtype: str, codes: str) -> None:
        """An index of theirs, searched here."""
        base, queries = clustered(N, 2), clustered(QUERIES, 3)
        if dtype == "int8":
            base, queries = (
                np.clip(each * 12, -128, 127).astype(np.int8) for each in (base, queries)
            )
        directory = self._work / f"theirs_{metric}_{dtype}_{codes}"
        directory.mkdir()
        np.save(self._work / "base.npy", base)
        self._ask(
            "build",
            self._work / "base.npy",
            directory,
            "mips" if metric == "ip" else metric,
            N * 16 / 2**30,
        )
        espnx.graph.import_diskann(directory / "ann", directory / "graph", codes=codes)
        with espnx.graph.open(directory / "graph") as index:
            stored = index.vectors(np.arange(N))
        if np.abs(stored.astype(np.float64) - base).max() > (1e-4 if metric == "ip" else 0):
            self.failures += 1
            print("the imported vectors are not those that the index was built from")
        true = exact(base, queries, metric)
        ours = recall_of(self._searched_here(directory / "graph", queries), true)
        theirs = recall_of(self._searched_there(directory, "ann", queries), true)
        self._compare(
            f"imported, {metric}, {dtype}, codes {codes}", ours, theirs, moved=ours, stayed=theirs
        )


def main() -> int:
    check = Check(Path(sys.argv[1]), sys.argv[2])
    try:
        for dtype, codes in (("float32", "inline"), ("float16", "memory"), ("uint8", "memory")):
            check.export(dtype, codes)
        for metric, dtype, codes in (
            ("l2", "float32", "inline"),
            ("l2", "int8", "memory"),
            ("ip", "float32", "memory"),
        ):
            check.bring(metric, dtype, codes)
    except subprocess.CalledProcessError as error:
        print(
            f"diskannpy failed ({error}):\n{(Path(sys.argv[1]) / 'peer.log').read_text()[-2000:]}"
        )
        return 1
    return 1 if check.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
