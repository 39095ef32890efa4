"""Lookup is asked first where it brings as many tokens a second as a model, the model's own seconds
included; whether it does is known without asking it."""

from __future__ import annotations

import random

from espnx.kv.draft.sources import LOOKUP, Sources, would_bring


def turns(
    sources: Sources,
    source: str,
    kept: int,
    draft_s: float = 0.0,
    n: int = 40,
    looked: int | None = None,
) -> None:
    for _ in range(n):
        sources.note([source], [8], [kept], draft_s, 1.0, [looked])


def test_a_model_is_asked_until_both_are_known() -> None:
    """Two tokens of most texts stood somewhere before, and something else followed."""
    sources = Sources()
    assert not sources.asks_lookup()
    turns(sources, "pages", 5, draft_s=0.1, looked=1)
    assert not sources.asks_lookup()
    turns(sources, "pages", 5, draft_s=0.1, looked=None)
    assert not sources.asks_lookup()


def test_the_seconds_of_the_model_count() -> None:
    for draft_s, is_first in ((0.1, False), (2.0, True)):
        sources = Sources()
        turns(sources, LOOKUP, 3)
        turns(sources, "4bit", 6, draft_s=draft_s)
        assert sources.asks_lookup() is is_first  # 3 tokens a second against 6 / (1 + draft_s)
        assert not sources.asks_lookup(by_clock=False)


def test_lookup_is_judged_while_others_propose() -> None:
    """And as soon as the text quotes, or does so no longer."""
    sources, changes = Sources(), list[int]()
    was = sources.asks_lookup()
    for turn in range(200):
        quotes = 50 <= turn < 120
        if sources.asks_lookup():
            sources.note([LOOKUP], [8], [8 if quotes else 1], 0.0, 1.0, [None])
        else:
            sources.note(["pages"], [8], [5], 0.2, 1.0, [8 if quotes else 1])
        if sources.asks_lookup() is not was:
            was = sources.asks_lookup()
            changes.append(turn)
    assert len(changes) == 2
    assert 50 < changes[0] < 75
    assert 120 < changes[1] < 145


def test_what_lookup_finds_for_itself_counts_once() -> None:
    """Where it proposed, what it would have brought is what it brought."""
    by_use, by_both = Sources(), Sources()
    for sources, looked in ((by_use, None), (by_both, 8)):
        turns(sources, LOOKUP, 2, looked=looked)
        turns(sources, "pages", 3, draft_s=0.5)
    assert by_use.asks_lookup() == by_both.asks_lookup()


def test_would_bring() -> None:
    assert would_bring([], [1, 2]) is None
    assert would_bring([9, 1], [1, 2]) == 1
    assert would_bring([1, 9, 3], [1, 2, 3]) == 2
    assert would_bring([1, 2], [1, 2, 3]) == 3
    assert would_bring([1, 2, 3, 4], [1, 2]) == 3  # at least


def test_would_bring_is_what_a_pass_brings() -> None:
    """By the definition: the longest equal prefix, and one more."""
    draw = random.Random(2)
    for _ in range(300):
        text = [draw.randrange(2) for _ in range(draw.randint(1, 6))]
        proposed = [draw.randrange(2) for _ in range(draw.randint(1, 6))]
        prefix = max(
            n for n in range(min(len(text), len(proposed)) + 1) if text[:n] == proposed[:n]
        )
        assert would_bring(proposed, text) == prefix + 1


def test_what_each_proposed_is_counted() -> None:
    sources, draw = Sources(), random.Random(1)
    counts = {LOOKUP: [0, 0], "assistant": [0, 0]}
    for _ in range(50):
        of = [draw.choice(list(counts)) for _ in range(3)]
        drafted = [draw.randrange(5) for _ in of]
        kept = [1 + draw.randint(0, n) for n in drafted]
        sources.note(of, drafted, kept, 0.1, 1.0, [None, 3, 1])
        for source, n, got in zip(of, drafted, kept, strict=True):
            counts[source][0] += n
            counts[source][1] += got - 1
    wanted = {name: {"proposed": n, "accepted": stood} for name, (n, stood) in counts.items()}
    assert sources.as_dict() == wanted
