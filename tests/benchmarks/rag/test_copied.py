"""Which passage an answer's words come from: by hand, and against looking for every run."""

from __future__ import annotations

import random

import pytest

from espnx.benchmarks.rag.copied import copied_from


@pytest.mark.parametrize(
    ("text", "question", "passages", "expected"),
    [
        ("silver river", "garden", ["KEY garden: silver river stone", "a river"], 0),
        ("Silver, river.", "garden", ["a river", "silver\nRIVER"], 1),  # words alone count
        ("river", "garden", ["a river", "river"], None),  # two have it
        ("silver river", "garden", ["river", "silver"], None),  # as long a run
        ("stone", "garden", ["a river", "no stones"], None),  # nobody has it
        ("garden", "the garden", ["garden", "river"], None),  # the question has it
        ("garden wall", "the garden", ["garden wall", "the garden", "a garden"], 0),
        ("the garden wall", "the garden", ["the garden", "a wall"], 1),
        ("a b c", "", ["b c d", "a b x c", "a b c"], 2),
        ("", "garden", ["a", "b"], None),
        ("a", "", [""], None),
        ("a", "", [], None),
    ],
)
def test_by_hand(text: str, question: str, passages: list[str], expected: int | None) -> None:
    assert copied_from(text, question, passages) == expected


def test_against_every_run() -> None:
    rng, found = random.Random(5), set[int | None]()
    for _ in range(400):
        text, question, *passages = (
            " ".join(rng.choices("abcd", k=rng.randint(0, 7))) for _ in range(5)
        )
        words, asked = text.split(), set(question.split())
        longest = [
            max(
                (
                    end - begin
                    for begin in range(len(words))
                    for end in range(begin + 1, len(words) + 1)
                    if set(words[begin:end]) - asked
                    and f" {' '.join(words[begin:end])} " in f" {each} "
                ),
                default=0,
            )
            for each in passages
        ]
        most = max(longest)
        expected = longest.index(most) if most and longest.count(most) == 1 else None
        assert copied_from(text, question, passages) == expected
        found.add(expected)
    assert found == {None, 0, 1, 2}
