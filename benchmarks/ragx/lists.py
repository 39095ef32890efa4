"""Posting lists on devices that scan them, exact: split by passages, or by terms as RAGX has it
(section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from espnx.postings import Postings, SplitPostings, build_split

from .parts import Answer, Spread, Work

PLACEMENTS = ("passages", "terms")


class Lists:
    """One index of words, or of weights of terms, split over devices.

    Args:
        name, collection: as of `Retriever`.
        given: ``terms=`` or ``vectors=`` of `espnx.postings.Postings.build`, a value for each
            passage.
        queries: likewise.
        placement: one of `PLACEMENTS`.
        whole: of all passages in one index, in their order; asked for what is right.
    """

    effort = least = 0

    def __init__(
        self,
        name: str,
        collection: str,
        given: Mapping[str, Sequence[Any]],
        queries: Sequence[Any],
        placement: str,
        k: int,
        whole: Postings,
    ):
        self.name, self.index, self.collection = name, f"lists by {placement}", collection
        self._given, self._queries, self._placement, self._k, self._whole = (
            given,
            queries,
            placement,
            k,
            whole,
        )

    @cached_property
    def _scores(self) -> np.ndarray:
        """float32 [q, n]: of every passage; 0 where it has no term of the query."""
        found = self._whole.search(list(self._queries), k=len(self._whole))
        scores = np.zeros((len(self._queries), len(self._whole)), np.float32)
        for row, numbers, each in zip(scores, found.numbers, found.scores, strict=True):
            row[numbers[numbers >= 0]] = each[numbers >= 0]
        return scores

    def build(self, folder: Path, shares: Sequence[np.ndarray]) -> Spread:
        # Passage i of what is built lies on device i modulo their number.
        order = np.array(
            [
                row
                for turn in zip_longest(*(share.tolist() for share in shares))
                for row in turn
                if row is not None
            ],
            np.int64,
        )
        given = {
            name: [values[row] for row in order.tolist()] for name, values in self._given.items()
        }
        paths = [folder / str(i) for i in range(len(shares))]
        build_split(paths, **given, placement=self._placement)  # type: ignore[arg-type]
        return _SplitSpread(SplitPostings(paths), self._queries, order)

    def recall(self, ids: Sequence[np.ndarray]) -> float:
        """The share of passages that score as the k-th best does, of those that score at all."""
        found = wanted = 0
        for scores, each in zip(self._scores, ids, strict=True):
            there = min(self._k, int((scores > 0).sum()))
            limit = np.partition(scores, -there)[-there] if there else np.inf
            found += int((scores[each] >= limit).sum())
            wanted += there
        return found / max(wanted, 1)

    def problem(self, answers: Sequence[Answer], k: int) -> str | None:
        """Scores that are not those of one index, to the bit."""
        for i, (scores, each) in enumerate(zip(self._scores, answers, strict=True)):
            best = np.sort(scores[scores > 0])[::-1][:k]
            if (
                len(set(each.ids.tolist())) != len(each.ids)
                or not np.array_equal(-each.far, best)
                or not np.array_equal(scores[each.ids], best)
            ):
                return f"query {i}: {-each.far} instead of {best}"
        return None


class _SplitSpread:
    def __init__(self, postings: SplitPostings, queries: Sequence[Any], order: np.ndarray):
        self._postings, self._queries, self._order = postings, queries, order

    def ask(self, effort: int, k: int) -> list[Answer]:
        """One query alone, so that what a device read is that query's."""
        answers = list[Answer]()
        for query in self._queries:
            before = self._reads()
            found = self._postings.search([query], k)
            reads = [after - then for after, then in zip(self._reads(), before, strict=True)]
            there = found.numbers[0] >= 0
            works = [
                Work(read, float(flash), float(sent + replied), 0, float(read > 0))
                for read, flash, sent, replied in zip(
                    reads,
                    found.flash_bytes[0],
                    found.command_bytes[0],
                    found.reply_bytes[0],
                    strict=True,
                )
            ]
            answers.append(
                Answer(self._order[found.numbers[0][there]], -found.scores[0][there], works)
            )
        return answers

    def _reads(self) -> list[int]:
        return [device.stats().read_requests for device in self._postings.devices]

    def close(self) -> None:
        self._postings.close()
