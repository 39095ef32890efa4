"""Where lists lie in the file: which of them share a page of flash.

Whatever the order, a list touches no more pages than its size asks for: what is left of its size
behind whole pages must fit what is left of the page that it begins in.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device.clusters.layout import ALIGNMENT_BYTES

#: Neighbours of a head that are looked at, and lists of a sampled query.
NEIGHBOURS, LISTS_OF_QUERY = 16, 32
#: Beside what queries read together, neighbourhood decides between what is equal.
_TIE = 1e-3
_HEADS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Gains:
    """How much each list gains by lying on one page with others.

    Attributes:
        first: int64 [lists + 1]: where each one's begin. others: int64 [sum]: their numbers.
        weights: float64 [sum].
    """

    first: np.ndarray
    others: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, pairs: np.ndarray, weights: np.ndarray, count: int) -> Gains:
        """Makes them of pairs, int64 [m, 2], both ways; what comes twice is added up."""
        codes = np.concatenate(
            [pairs[:, 0] * count + pairs[:, 1], pairs[:, 1] * count + pairs[:, 0]]
        )
        known, place = np.unique(codes, return_inverse=True)
        summed = np.bincount(place, np.concatenate([weights, weights]), minlength=len(known))
        first = np.searchsorted(known, np.arange(count + 1) * count)
        return cls(first, known % max(1, count), summed)

    def __getitem__(self, number: int) -> dict[int, float]:
        part = slice(self.first[number], self.first[number + 1])
        return dict(zip(self.others[part].tolist(), self.weights[part].tolist(), strict=True))


def in_order(size_bytes: np.ndarray, page_bytes: int) -> np.ndarray:
    """int64 [lists]: where each begins, one behind the other as far as pages allow."""
    begin = np.zeros(len(size_bytes), np.int64)
    end = 0
    for number, size in enumerate(size_bytes.tolist()):
        if end % page_bytes + (size - 1) % page_bytes + 1 > page_bytes:
            end = -(-end // page_bytes) * page_bytes
        begin[number] = end
        end = -(-(end + size) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return begin


def best_fit(size_bytes: np.ndarray, page_bytes: int) -> np.ndarray:
    """int64 [lists]: where each begins: each page is filled as far as it goes, the longest first,
    each onto the page that it leaves the least room of."""
    return _joined([[number] for number in range(len(size_bytes))], size_bytes, page_bytes)


def co_access(size_bytes: np.ndarray, gains: Gains, page_bytes: int) -> np.ndarray:
    """int64 [lists]: where each begins, so that lists that are read together share pages.

    A page begins with the list that gains most by the pages before it, and takes one after the
    other the list that gains most by those on it, as long as one fits. Pages with room left are
    then joined, by best fit.
    """
    groups: list[list[int]] = []
    is_placed = np.zeros(len(size_bytes), bool)
    before: dict[int, float] = {}
    following = 0
    while True:
        first = _best(before, is_placed)
        if first is None:
            while following < len(size_bytes) and is_placed[following]:
                following += 1
            if following == len(size_bytes):
                break
            first = following
        group = _grown(first, size_bytes, gains, page_bytes, is_placed)
        groups.append(group)
        before = {}
        for number in group:
            _add(before, gains[number])
    return _joined(groups, size_bytes, page_bytes)


def _grown(
    first: int, size_bytes: np.ndarray, gains: Gains, page_bytes: int, is_placed: np.ndarray
) -> list[int]:
    """A page's lists, from its first one on."""
    group, is_placed[first] = [first], True
    room = page_bytes - _used(int(size_bytes[first]), page_bytes)
    near = gains[first]
    while near:
        chosen = _best(near, is_placed)
        if chosen is None:
            break
        del near[chosen]
        if _used(int(size_bytes[chosen]), page_bytes) > room or size_bytes[chosen] > page_bytes:
            continue
        room -= _used(int(size_bytes[chosen]), page_bytes)
        group.append(chosen)
        is_placed[chosen] = True
        _add(near, gains[chosen])
    return group


def _used(size: int, page_bytes: int) -> int:
    """Bytes that a list takes of the last page that it lies on, up to where another may begin."""
    rest = (size - 1) % page_bytes + 1 if size else 0
    return -(-rest // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _best(gained: Mapping[int, float], is_placed: np.ndarray) -> int | None:
    left = [(gain, -number) for number, gain in gained.items() if not is_placed[number]]
    return -max(left)[1] if left else None


def _add(gained: dict[int, float], more: Mapping[int, float]) -> None:
    for number, gain in more.items():
        gained[number] = gained.get(number, 0.0) + gain


def _joined(groups: Sequence[Sequence[int]], size_bytes: np.ndarray, page_bytes: int) -> np.ndarray:
    """int64 [lists]: where each begins when groups of lists, each of a page, are put together onto
    fewer pages: the fullest first, each onto the page that it leaves the least room of. A group
    that begins with a list of several pages begins a page."""
    used = [sum(_used(int(size_bytes[each]), page_bytes) for each in group) for group in groups]
    is_long = [int(size_bytes[group[0]]) > page_bytes for group in groups]
    pages: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(page_bytes // ALIGNMENT_BYTES + 1)]
    has_room = 0  # bit r: some page has r times the alignment left
    for which in sorted(
        range(len(groups)), key=lambda each: (not is_long[each], -used[each], each)
    ):
        need = used[which] // ALIGNMENT_BYTES
        fits = 0 if is_long[which] else has_room >> need
        if fits:
            left = need + (fits & -fits).bit_length() - 1
            page = heapq.heappop(by_room[left])
            if not by_room[left]:
                has_room &= ~(1 << left)
            pages[page].append(which)
        else:
            page, left = len(pages), page_bytes // ALIGNMENT_BYTES
            pages.append([which])
        left -= need
        heapq.heappush(by_room[left], page)
        has_room |= 1 << left
    pages.sort(key=min)  # near groups have near numbers
    begin = np.zeros(len(size_bytes), np.int64)
    end = 0
    for page_groups in pages:
        end = -(-end // page_bytes) * page_bytes
        for number in (each for which in page_groups for each in groups[which]):
            begin[number] = end
            end += -(-int(size_bytes[number]) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return begin


def gains_of(heads: np.ndarray, index: Any, asked: np.ndarray | None) -> Gains:
    """How much lists gain by sharing a page.

    Args:
        heads: float32 [lists, dim]: near ones are read together.
        index: of FAISS, that finds the nearest of them.
        asked: int64 [queries, m]: the lists that each of some queries reads, -1 for none: then
            lists are together as often as queries read both, the more the nearer both are.
    """
    count = len(heads)
    pairs, weights = [np.empty((0, 2), np.int64)], [np.empty(0)]
    wanted = min(count, NEIGHBOURS + 1)
    for first in range(0, count, _HEADS_AT_ONCE):
        near = index.search(heads[first : first + _HEADS_AT_ONCE], wanted)[1]
        own = np.repeat(np.arange(first, first + len(near)), wanted)
        ranks = np.tile(np.arange(wanted), len(near))
        others = near.ravel()
        held = (others >= 0) & (others != own)
        pairs.append(np.stack([own[held], others[held]], axis=1))
        weights.append((1.0 if asked is None else _TIE) / (1 + ranks[held]))
    for lists in [] if asked is None else asked:
        held = lists[lists >= 0]
        one, other = np.triu_indices(len(held), 1)
        pairs.append(np.stack([held[one], held[other]], axis=1))
        weights.append(1.0 / (1 + other))  # of the farther one: searches of few lists read the near
    return Gains.of(np.concatenate(pairs), np.concatenate(weights), count)
