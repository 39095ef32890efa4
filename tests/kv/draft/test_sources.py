"""Lookup is asked first until what it brings falls behind what a model brings, its own seconds
included, and now and then again."""

from __future__ import annotations

import random

from espnx.kv.draft.sources import LOOKUP, Sources


def turns(sources: Sources, source: str, kept: int, draft_s: float = 0.0, n: int = 12) -> None:
    for _ in range(n):
        sources.note([source], [8], [kept], draft_s, 1.0)


def test_lookup_is_asked_until_both_are_known() -> None:
    sources = Sources()
    assert sources.asks_lookup()
    turns(sources, LOOKUP, 1)
    assert sources.asks_lookup()
    turns(sources, "pages", 8, draft_s=0.1)
    assert not sources.asks_lookup()


def test_the_seconds_of_the_model_count() -> None:
    for draft_s, is_first in ((0.1, False), (2.0, True)):
        sources = Sources()
        turns(sources, LOOKUP, 3)
        turns(sources, "4bit", 6, draft_s=draft_s)
        assert sources.asks_lookup() is is_first  # 3 tokens a second against 6 / (1 + draft_s)


def test_it_is_asked_again() -> None:
    sources = Sources()
    turns(sources, LOOKUP, 1)
    turns(sources, "pages", 8)
    asked = [sources.asks_lookup() for _ in range(60)]
    assert 3 <= sum(asked) <= 4
    turns(sources, LOOKUP, 9, n=40)  # the text quotes now
    assert sources.asks_lookup()


def test_what_each_proposed_is_counted() -> None:
    sources, draw = Sources(), random.Random(1)
    counts = {LOOKUP: [0, 0], "assistant": [0, 0]}
    for _ in range(50):
        of = [draw.choice(list(counts)) for _ in range(3)]
        drafted = [draw.randrange(5) for _ in of]
        kept = [1 + draw.randint(0, n) for n in drafted]
        sources.note(of, drafted, kept, 0.1, 1.0)
        for source, n, got in zip(of, drafted, kept, strict=True):
            counts[source][0] += n
            counts[source][1] += got - 1
    wanted = {name: {"proposed": n, "accepted": stood} for name, (n, stood) in counts.items()}
    assert sources.as_dict() == wanted
