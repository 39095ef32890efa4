"""What KIOXIA published of AiSAQ's global index, and what is predicted with its settings: shown
beside one another, and not scored, for the length of the list at which 90 % of the neighbours were
found is not published."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..figures import Range, draw, middles
from ..predictions import DRAWS, RANGE, SEED, check_draws
from .answer import Answer, answer
from .server import Specs, load_server

SERVER, COLLECTION, BLIND = "dell-r760xa", "falcon-4.8b", "falcon-4.8b-blind"
#: Of the settings that the publication names: Lsearch = 10, 20, ..., 250.
LIST_SIZES = (10, 50, 100, 150, 200, 250)
#: At which shards are all searched, too.
BLIND_LIST_SIZES = (10, 100)
#: Of each stream in a draw: nearly all queries take the same there.
DRAWN_WINDOW = 2


@dataclass(frozen=True)
class Published:
    """What the publication measured.

    Attributes:
        p95_s, queries_per_s: with nProbe 14 and 9 streams, at 90 % recall@10.
        blind_over: P95 where all of 60 shards are searched, over that of the global index.
        source: where it is from.
    """

    p95_s: float = 0.057
    queries_per_s: float = 200.0
    blind_over: float = 4.1
    source: str = "KIOXIA AiSAQ, 4.8 billion vectors: index search, figures 4 and 5"


@dataclass(frozen=True)
class Row:
    """A length of the list.

    Attributes:
        list_size: it.
        p95_s, queries_per_s: value, low and high each: with the middles of all ranges, and the 5th
            and 95th percentile of draws from them.
        answer: with the middles.
    """

    list_size: int
    p95_s: Mapping[str, float]
    queries_per_s: Mapping[str, float]
    answer: Answer


@dataclass(frozen=True)
class Shown:
    """Attributes:
    published: beside which it is shown.
    rows: of each length of the list.
    blind_over: P95 of blind shards over that of the global index, by the length of the list.
    figures: that it was computed with.
    """

    published: Published
    rows: tuple[Row, ...]
    blind_over: Mapping[int, float]
    figures: Mapping[str, Range]


@functools.cache
def specs(collection: str = COLLECTION) -> Specs:
    return load_server(SERVER, collection)


def show(
    n_draws: int = DRAWS,
    list_sizes: Sequence[int] = LIST_SIZES,
    blind_list_sizes: Sequence[int] = BLIND_LIST_SIZES,
) -> Shown:
    """Raises InvalidInputError: too few draws for a range."""
    check_draws(n_draws)
    known = specs().ranges
    values = middles(known)
    rng = np.random.default_rng(SEED)
    drawn = [draw(known, rng) for _ in range(n_draws)]
    rows = tuple(_row(each, values, drawn) for each in list_sizes)
    blind = {each: _blind_over(each) for each in blind_list_sizes}
    asked = _Asked(values)
    answer(specs().given(asked), list_sizes[0], window=DRAWN_WINDOW)
    used = {name: each for name, each in known.items() if name in asked.names}
    return Shown(Published(), rows, blind, used)


class _Asked(dict[str, float]):
    """Values that remember which of them were asked for.

    Attributes:
        names: of those.
    """

    def __init__(self, values: Mapping[str, float]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def _row(list_size: int, values: Mapping[str, float], drawn: Sequence[Mapping[str, float]]) -> Row:
    middle = answer(specs().given(values), list_size)
    answers = [answer(specs().given(each), list_size, window=DRAWN_WINDOW) for each in drawn]

    def of(name: str) -> dict[str, float]:
        low, high = np.percentile([getattr(each, name) for each in answers], RANGE)
        return {"value": getattr(middle, name), "low": float(low), "high": float(high)}

    return Row(list_size, of("p95_s"), of("queries_per_s"), middle)


def _blind_over(list_size: int) -> float:
    blind, clusters = (
        answer(each.given(middles(each.ranges)), list_size, window=DRAWN_WINDOW)
        for each in (specs(BLIND), specs())
    )
    return blind.p95_s / clusters.p95_s
