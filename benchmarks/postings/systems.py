"""What is measured: espnx, the same layout by way of mmap, bm25s, Tantivy and SQLite's FTS5. Each
asks the same queries one at a time, and the page cache of its files is dropped before each."""

from __future__ import annotations

import mmap
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espnx.ops.postings import Rules, postings
from espnx.postings import BM25, Postings
from espnx.postings.search.plan import QueryPlan
from espnx.postings.search.search import PostingsSearch

from ..harness.runner import Sample
from ..machine import page_cache
from ..machine.counters import read_counters
from .corpus import Passages

RULE = BM25("lucene", k1=1.5, b=0.75)
# ranks as SQLite does; scores are k1 + 1 times as high there
FTS5_RULE = BM25("robertson", k1=1.2, b=0.75)
INDEXES = ("espnx", "bm25s", "tantivy", "fts5")
#: Of the k best of an exact engine, what one that rounds lengths must find, of all queries
#: together.
OVERLAP = 0.8


class Asked(ABC):
    """A system that is asked one query after the other.

    Args:
        queries: terms of each.
        k: records of each.
        expected: int64 [q, k]: the k best, by bm25s's formula; float32 [q, k]: their scores.
    """

    name = group = ""
    requested_path = effective_path = ""
    is_exact = True
    cache_state = "cold"

    def __init__(
        self, queries: Sequence[list[str]], k: int, expected: tuple[np.ndarray, np.ndarray]
    ):
        self.queries, self.k, self.expected = queries, k, expected

    @abstractmethod
    def files(self) -> list[Path]:
        """The files that it reads."""

    @abstractmethod
    def ask(self, query: list[str]) -> tuple[Any, np.ndarray]:
        """(what was found, scores), best first. Timed."""

    def numbers(self, found: Any) -> np.ndarray:
        """int64: of what `ask` has found. Not timed."""
        return np.asarray(found, np.int64)

    def costs(self) -> tuple[int, int]:
        """(requests, bytes asked) of the last query, where it knows."""
        return 0, 0

    def verify(self) -> str | None:
        hits = wanted = 0
        for row, query in enumerate(self.queries):
            found, scores = self.ask(query)
            numbers, best = (each[row][: len(scores)] for each in self.expected)
            if self.is_exact and not np.array_equal(np.sort(scores)[::-1].astype(np.float32), best):
                return f"query {row}: scores {scores[:3]}, expected {best[:3]}"
            hits += len(set(self.numbers(found).tolist()) & set(numbers.tolist()))
            wanted += len(numbers)
        self._forget()
        return (
            None if hits >= OVERLAP * wanted else f"{hits} of the {wanted} best records were found"
        )

    def prepare(self, turn: int) -> str:
        self.ask(self.queries[turn % len(self.queries)])
        return self._forget()

    def _forget(self) -> str:
        if self.cache_state == "warm":
            return "warm"
        for path in self.files():
            page_cache.drop(path)
        return (
            "cold"
            if all(
                page_cache.resident_fraction(path) < page_cache.COLD_FRACTION
                for path in self.files()
            )
            else "warm"
        )

    def run(self) -> Sample:
        seconds, cpu_s, moved = [], 0.0, 0
        requests = asked = 0
        for query in self.queries:
            self._forget()
            before = read_counters()
            cpu, begin = time.process_time(), time.perf_counter()
            self.ask(query)
            seconds.append(time.perf_counter() - begin)
            cpu_s += time.process_time() - cpu
            moved += (read_counters() - before).device_read_bytes or 0
            own = self.costs()
            requests, asked = requests + own[0], asked + own[1]
        self._forget()  # pages that this process has mapped nobody else can drop
        n = len(self.queries)
        metrics = {
            "cpu_ms": cpu_s / n * 1e3,
            "p99_ms": float(np.percentile(seconds, 99)) * 1e3,
            **self.facts(),
        }
        if requests:
            metrics |= {"requests": requests / n, "asked_bytes": asked / n}
        # The work is the same for all: a "byte" is a query here, so that ratios are of times.
        return Sample(sum(seconds) / n, 1, round(moved / n), metrics)

    def facts(self) -> dict[str, float]:
        """What is the same in every run."""
        return {"index_bytes": float(self.index_bytes())}

    def index_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files())

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Lets go of its files."""


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


class EspnxSystem(Asked):
    """espnx as a user calls it, one query at a time."""

    name = group = "espnx"
    requested_path = "auto"

    def __init__(self, folder: Path, *asked: Any):
        super().__init__(*asked)
        self._folder, self._postings = folder, Postings.open(folder)
        self.effective_path = self._postings.path_of_reads
        self._found: Any = None

    def files(self) -> list[Path]:
        return files_of(self._folder)

    def ask(self, query: list[str]) -> tuple[np.ndarray, np.ndarray]:
        self._found = self._postings.search([query], self.k, threads=1)
        there = self._found.numbers[0] >= 0
        return self._found.numbers[0][there], self._found.scores[0][there]

    def facts(self) -> dict[str, float]:
        size = float(self.index_bytes())
        return {
            "index_bytes": size,
            "bytes_a_posting": size / self._postings.n_postings,
            "resident_bytes": float(self._postings.memory_bytes),
            "resident_allowed_bytes": float(
                24 * self._postings.n_terms + 2 * len(self._postings) + 1_000_000
            ),
        }

    def costs(self) -> tuple[int, int]:
        return int(self._found.requests[0]), int(self._found.bytes_asked[0])

    def close(self) -> None:
        self._postings.close()


class MappedSystem(Asked):
    """The same lists, mapped; the kernel is told at once which pages will be wanted
    (MADV_WILLNEED), and the same kernels score them."""

    name = group = "mmap-willneed"
    requested_path = effective_path = "mmap"

    def __init__(self, folder: Path, *asked: Any):
        super().__init__(*asked)
        self._postings = Postings.open(folder)
        self._search: PostingsSearch = self._postings.searcher
        (self._segment,) = self._search.collection.segments
        self._file = open(self._segment.lists.file.path, "rb")  # noqa: SIM115 - closed in close()
        # Private, so that a tensor may lie over it; nothing is written.
        self._area = mmap.mmap(
            self._file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        self._area.madvise(mmap.MADV_RANDOM)
        self._view = np.frombuffer(self._area, np.uint8)
        self._bytes = torch.from_numpy(self._view)
        held = self._segment.dictionary
        self._rules = Rules(held.salt, "count", held.n_records, RULE.variant, RULE.k1, RULE.delta)
        # A norm for every code that there can be: a shorter table would be checked against all
        # lengths at each query.
        norms = self._search.collection.norms(RULE)[0].view(torch.float64)
        self._norms = torch.cat([norms, norms.new_zeros(65_536 - len(norms))])

    def files(self) -> list[Path]:
        return [Path(self._segment.lists.file.path)]

    def ask(self, query: list[str]) -> tuple[np.ndarray, np.ndarray]:
        rows = QueryPlan(self._search.collection, [query], RULE, None).request({})["lists"]
        for offset, size in rows[:, 2:4].tolist():
            begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._area.madvise(mmap.MADV_WILLNEED, begin, offset + size - begin)
        lists, weights = (
            rows[:, [2, 3, 4, 1]].contiguous(),
            rows[:, 7:9].contiguous().view(torch.float64),
        )
        codes = self._segment.codes
        found = postings(
            self._bytes, lists, weights, self._rules, self.k, lengths=codes, norms=self._norms
        )
        numbers, scores = (each.numpy() for each in found)
        return numbers[numbers >= 0], scores[numbers >= 0]

    def _forget(self) -> str:
        self._area.madvise(mmap.MADV_DONTNEED)  # mapped pages are not dropped
        return super()._forget()

    def close(self) -> None:
        del self._bytes, self._view
        self._area.close()
        self._file.close()
        self._postings.close()


class Bm25sSystem(Asked):
    """bm25s as its documentation says: memory-mapped, or in memory with either of its backends."""

    requested_path = effective_path = "mmap"

    def __init__(self, name: str, folder: Path, *asked: Any):
        super().__init__(*asked)
        import bm25s

        self.name = self.group = name
        self._folder = folder
        self._index = bm25s.BM25.load(str(folder), mmap=name == "bm25s-mmap", show_progress=False)
        if name == "bm25s-numba":
            self._index.backend = "numba"
            self._index.activate_numba_scorer()
        if name != "bm25s-mmap":
            self.cache_state, self.requested_path, self.effective_path = "warm", "memory", "memory"

    def files(self) -> list[Path]:
        return files_of(self._folder)

    def _forget(self) -> str:
        for array in self._index.scores.values():
            if isinstance(array, np.memmap):
                array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined] # mapped pages are not dropped
        return super()._forget()

    def ask(self, query: list[str]) -> tuple[np.ndarray, np.ndarray]:
        numbers, scores = self._index.retrieve([query], k=self.k, show_progress=False, n_threads=1)
        return numbers[0][scores[0] > 0], scores[0][scores[0] > 0]


class TantivySystem(Asked):
    """Tantivy, Lucene's design in Rust: memory-mapped, lengths rounded to a byte."""

    name = group = "tantivy"
    requested_path = effective_path = "mmap"
    is_exact = False

    def __init__(self, folder: Path, *asked: Any):
        super().__init__(*asked)
        import tantivy

        self._tantivy, self._folder = tantivy, folder
        self._schema = tantivy_schema()
        self._open()

    def _open(self) -> None:
        index = self._tantivy.Index(self._schema, path=str(self._folder), reuse=True)
        index.reload()
        self._searcher = index.searcher()

    def _forget(self) -> str:
        del self._searcher  # mapped pages are not dropped
        state = super()._forget()
        self._open()
        return state

    def files(self) -> list[Path]:
        return files_of(self._folder)

    def ask(self, query: list[str]) -> tuple[Any, np.ndarray]:
        made = self._tantivy.Query
        should = self._tantivy.Occur.Should
        parts = [(should, made.term_query(self._schema, "text", term, "freq")) for term in query]
        hits = self._searcher.search(made.boolean_query(parts), self.k, count=False).hits
        return [address for _, address in hits], np.array([score for score, _ in hits], np.float32)

    def numbers(self, found: Any) -> np.ndarray:
        return np.array([self._searcher.doc(address)["number"][0] for address in found], np.int64)


def tantivy_schema() -> Any:
    """The schema of an index: words as they come, with counts; a number."""
    import tantivy

    builder = tantivy.SchemaBuilder()
    builder.add_text_field("text", stored=False, tokenizer_name="whitespace", index_option="freq")
    builder.add_unsigned_field("number", stored=True)
    return builder.build()


class Fts5System(Asked):
    """SQLite's FTS5 without the texts. Its formula is fixed: `FTS5_RULE`."""

    name = group = "fts5"
    requested_path = effective_path = "buffered"
    is_exact = False

    def __init__(self, path: Path, *asked: Any):
        super().__init__(*asked)
        self._path = path
        self._open()

    def _open(self) -> None:
        self._database = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)

    def files(self) -> list[Path]:
        return [self._path]

    def _forget(self) -> str:
        self._database.close()  # and its own cache
        state = super()._forget()
        self._open()
        return state

    def ask(self, query: list[str]) -> tuple[np.ndarray, np.ndarray]:
        asked = "SELECT rowid, -rank FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?"
        rows = self._database.execute(asked, (" OR ".join(query), self.k)).fetchall()
        return np.array([row for row, _ in rows], np.int64) - 1, np.array(
            [score for _, score in rows], np.float32
        )

    def close(self) -> None:
        self._database.close()


_PACKAGES = {
    "bm25s-mmap": ("bm25s",),
    "bm25s-memory": ("bm25s",),
    "bm25s-numba": ("bm25s", "numba"),
    "tantivy": ("tantivy",),
}
_PACKAGES |= {"sindi": ("pyvsag",), "seismic": ("seismic",)}


def packages_of(name: str) -> tuple[str, ...]:
    """The packages that a system needs beside espnx."""
    return _PACKAGES.get(name, ())


def missing(name: str) -> str:
    """The package that a system needs and that is not installed; empty where there is none."""
    return next((package for package in packages_of(name) if find_spec(package) is None), "")


def index_of(name: str) -> str:
    """What of `INDEXES` a system reads."""
    return {"mmap-willneed": "espnx"}.get(name, "bm25s" if name.startswith("bm25s") else name)


def build(name: str, folder: Path, passages: Passages) -> None:
    """One of `INDEXES`, in a folder that has none."""
    if name == "espnx":
        Postings.build(folder / "espnx", terms=passages, bm25=RULE)
    elif name == "bm25s":
        import bm25s

        index = bm25s.BM25(method=RULE.variant, k1=RULE.k1, b=RULE.b)
        index.index(list(passages), show_progress=False)
        index.save(str(folder / "bm25s"))
    elif name == "tantivy":
        import tantivy

        (folder / "tantivy").mkdir()
        writer = tantivy.Index(tantivy_schema(), path=str(folder / "tantivy")).writer(256 << 20, 1)
        for number, terms in enumerate(passages):
            writer.add_document(tantivy.Document(text=" ".join(terms), number=number))
        writer.commit()
        writer.wait_merging_threads()
    elif name == "fts5":
        with sqlite3.connect(folder / "fts5.db") as database:
            database.execute("CREATE VIRTUAL TABLE passages USING fts5(text, content='')")
            texts = ((number + 1, " ".join(terms)) for number, terms in enumerate(passages))
            database.executemany("INSERT INTO passages(rowid, text) VALUES (?, ?)", texts)
            database.execute("INSERT INTO passages(passages) VALUES ('optimize')")
        database.close()


def open_system(name: str, folder: Path, *asked: Any) -> Asked:
    """Opens a system whose files are there."""
    if name == "espnx":
        return EspnxSystem(folder / "espnx", *asked)
    if name == "mmap-willneed":
        return MappedSystem(folder / "espnx", *asked)
    if name.startswith("bm25s"):
        return Bm25sSystem(name, folder / "bm25s", *asked)
    return (
        TantivySystem(folder / "tantivy", *asked)
        if name == "tantivy"
        else Fts5System(folder / "fts5.db", *asked)
    )
