"""What holds for every device that scans posting lists: BM25 in plain Python over the same records,
scores to the bit."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import numpy as np

from .. import errors
from ..device.conformance.faults import fault_checks
from ..device.conformance.requirement import in_threads, raises, require
from ..device.near_storage import NearStorageDevice
from ..device.postings import LIST, PARTIAL, SCAN_REPLY, WEIGHT, Rule, ScanLists, Weights
from ..device.postings.interface import PostingsDevice
from ..postings.split import build_split
from ..postings.split.parts import PartLists, read_parts
from ..postings.stored.terms import hash_of
from ..storage import FaultyEngine

_RECORDS, _K1, _B = 400, 1.5, 0.75
_RULE_LUCENE = 1


class _Known:
    """Lists on storage, and the records that they are of: term i is in about one of i + 2."""

    def __init__(self, directory: str):
        rng = np.random.default_rng(3)
        self.records = [
            [
                f"t{term}"
                for term in range(30)
                for _ in range(int(rng.integers(0, 4)))
                if rng.integers(0, term + 2) == 0
            ]
            or ["t0"]
            for _ in range(_RECORDS)
        ]
        build_split([directory], terms=self.records)
        self.counts = [Counter(record) for record in self.records]
        self.average = sum(map(len, self.records)) / _RECORDS
        self.lists: PartLists = read_parts([directory])[0][0]

    def asked(self, terms: list[str]) -> tuple[ScanLists, Weights]:
        """What a host asks that has the dictionary of all records."""
        held = self.lists.segment.dictionary
        numbers = np.array([self._number(term) for term in terms], np.int64)
        places, weights = np.zeros(len(terms), LIST), np.zeros(len(terms), WEIGHT)
        offset, size = held.place(numbers)
        places["offset"], places["size"], places["term"] = offset // 64, size // 64, numbers
        places["postings"], places["name"] = held.df[numbers], [len(term) for term in terms]
        weights["weight"] = [np.float32(self._idf(term)) for term in terms]
        return ScanLists(places, "".join(terms).encode()), Weights(
            weights, 0.0, Rule(_RULE_LUCENE, _K1, _B, 0.5, self.average)
        )

    def _number(self, term: str) -> int:
        return int(
            np.flatnonzero(self.lists.segment.dictionary.hashes == hash_of(term.encode()))[0]
        )

    def _idf(self, term: str) -> float:
        df = sum(term in count for count in self.counts)
        return math.log(1 + (_RECORDS - df + 0.5) / (df + 0.5))

    def parts(self, term: str) -> list[tuple[int, np.float32]]:
        """(record, its part of the score) of each posting of a term."""
        idf, found = float(np.float32(self._idf(term))), []
        for number, count in enumerate(self.counts):
            if term in count:
                norm = _K1 * ((1 - _B) + _B * count.total() / self.average)
                found.append((number, np.float32(idf * (count[term] / (norm + count[term])))))
        return found

    def best(self, terms: list[str], k: int, allowed: np.ndarray | None) -> list[tuple[float, int]]:
        """The best records: float32 sums, in the order of the terms; of equal ones the lower number
        first."""
        sums = dict[int, np.float32]()
        for term in terms:
            for number, part in self.parts(term):
                sums[number] = np.float32(sums.get(number, np.float32(0)) + part)
        ranked = sorted(
            (-float(score), number)
            for number, score in sums.items()
            if allowed is None or allowed[number]
        )
        return [(-score, number) for score, number in ranked[:k]]

    def require_right(
        self,
        device: PostingsDevice,
        terms: list[str],
        k: int,
        allowed: np.ndarray | None = None,
        **options: float,
    ) -> None:
        lists, weights = self.asked(terms)
        bits = None if allowed is None else np.packbits(allowed, bitorder="little")
        ticket = device.scan(lists, weights, k, allowed=bits, **options)
        found, what = ticket.finish(), f"a scan of {len(terms)} lists for {k or 'all parts'}"
        if k:
            require(
                found.dtype == SCAN_REPLY, f"{what}: entries", got=found.dtype, expected=SCAN_REPLY
            )
            got = list(zip(found["score"].tolist(), found["number"].tolist(), strict=True))
            require(
                got == self.best(terms, k, allowed),
                f"{what}: scores and records",
                got=got,
                expected=self.best(terms, k, allowed),
            )
        else:
            require(found.dtype == PARTIAL, f"{what}: entries", got=found.dtype, expected=PARTIAL)
            wanted = [(number, float(part)) for term in terms for number, part in self.parts(term)]
            require(
                list(zip(found["number"].tolist(), found["score"].tolist(), strict=True)) == wanted,
                f"{what}: parts of scores",
            )
        asked = ticket.stats.bytes_asked
        require(
            asked == lists.size_bytes, f"{what}: bytes asked", got=asked, expected=lists.size_bytes
        )


@contextmanager
def _known(
    device: NearStorageDevice, **options: FaultyEngine
) -> Iterator[tuple[_Known, PostingsDevice]]:
    directory = os.path.join(device.path, "verify.postings")
    try:
        known = _Known(directory)
        with closing(device.open_postings(known.lists, **options)) as opened:
            yield known, opened
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def scans_as_plain_python(device: NearStorageDevice) -> None:
    """The best, all, and parts of scores; filters; no list at all; counters."""
    allowed = np.arange(_RECORDS) % 3 == 1
    with _known(device) as (known, opened):
        for terms in (["t0"], ["t29", "t1", "t7"], [f"t{i}" for i in range(30)], []):
            for k in (1, 10, 5000, 0):
                known.require_right(opened, terms, k)
            known.require_right(opened, terms, 10, allowed)
            known.require_right(opened, terms, 10, np.zeros(_RECORDS, bool))


def answers_threads_at_once(device: NearStorageDevice) -> None:
    with _known(device) as (known, opened):

        def ask(seed: int) -> None:
            for turn in range(10):
                known.require_right(
                    opened, [f"t{(seed * 7 + turn) % 30}", f"t{turn + 15}"][: 1 + turn % 2], 10
                )

        in_threads(ask, range(4))


def is_closed(device: NearStorageDevice) -> None:
    """Twice."""
    with _known(device) as (known, opened):
        lists, weights = known.asked(["t0"])
        for _ in range(2):
            opened.close()
        with raises(errors.EngineClosedError):
            opened.scan(lists, weights, 3)


@contextmanager
def _asked(
    device: NearStorageDevice, *, engine: FaultyEngine, deadline_s: float
) -> Iterator[Callable[[], None]]:
    with _known(device, engine=engine) as (known, opened):
        every = [f"t{i}" for i in range(30)]  # whatever byte is damaged is of one of them
        yield lambda: known.require_right(opened, every, 10, deadline_s=deadline_s)


CHECKS = (scans_as_plain_python, answers_threads_at_once, is_closed)
FAULT_CHECKS = fault_checks(_asked)
