"""Markers of an answer: each kept one leads to a source, what leads nowhere is taken out and
reported, and sentences get the numbers that stand in or right behind them."""

from __future__ import annotations

import re

import pytest

from espnx.rag.markers import cited_sentences, parse, without_markers
from espnx.rag.prompt import quoted


@pytest.mark.parametrize(
    ("text", "known", "kept", "numbers", "unknown"),
    [
        ("", 3, "", [], ()),
        ("No markers.", 3, "No markers.", [], ()),
        ("A [1]. B [3].", 3, "A [1]. B [3].", [(1,), (3,)], ()),
        ("A [4]. B [0].", 3, "A. B.", [], (4, 0)),
        ("A [1, 4; 2].", 3, "A [1, 2].", [(1, 2)], (4,)),
        ("A [2,2].", 2, "A [2,2].", [(2,)], ()),
        ("A [1].", 0, "A.", [], (1,)),
        ("x[ 1 ] y[1.5] [a] [-1]", 3, "x[ 1 ] y[1.5] [a] [-1]", [], ()),
        (f"A [{'9' * 5000}].", 3, "A.", [], (999_999_999,)),
        ("A [٣].", 3, "A [٣].", [], ()),
        ("A [0000000002].", 3, "A [0000000002].", [(2,)], ()),
        ("A [0000000011].", 3, "A.", [], (11,)),
        ("A [[9]2]. B [1].", 3, "A [ 2 ]. B [1].", [(1,)], (9,)),
        ("[7[9]]", 3, "[ 7 ]", [], (9,)),
        ("[1,[4]2] [2] [[0][5]3][3]", 3, "[ 1,2 ] [2] [ 3 ][3]", [(2,), (3,)], (4, 0, 5)),
    ],
)
def test_markers(
    text: str, known: int, kept: str, numbers: list[tuple[int, ...]], unknown: tuple[int, ...]
) -> None:
    found = parse(text, known)
    assert found.text == kept
    assert [each.numbers for each in found.markers] == numbers
    assert found.unknown == unknown
    for each in found.markers:
        marked = found.text[each.start : each.end]
        assert tuple(dict.fromkeys(map(int, re.findall("[0-9]+", marked)))) == each.numbers


def test_sentences_have_the_numbers_in_them_or_behind_them() -> None:
    text = "It writes [1]. It reads.[2] [3] Nothing here. Last one\nwithout an end [1]"
    found = [(each.text, each.numbers) for each in cited_sentences(parse(text, 3))]
    assert found == [("It writes.", (1,)), ("It reads.", (2, 3)), ("without an end", (1,))]


def test_a_marker_alone_cites_nothing() -> None:
    assert cited_sentences(parse("[1] [2]", 2)) == []
    assert [each.numbers for each in cited_sentences(parse("[1] First. Second.", 2))] == [(1,)]


def test_a_page_of_white_space_costs_no_more_than_a_page() -> None:
    found = cited_sentences(parse(f"Red{' ' * 200_000}one [1], two [2].", 2))
    assert [(each.text, each.numbers) for each in found] == [("Red one, two.", (1, 2))]


@pytest.mark.parametrize("text", ["[3]", "see [1, 2] and [ 3]", "x[0][1]", "[[2]]", "[1\n,2]"])
def test_nothing_in_a_source_reads_as_a_marker(text: str) -> None:
    safe = without_markers(text)
    assert parse(safe, 9).markers == ()
    assert parse(" ".join(quoted(text).split()), 9).markers == ()
    assert re.sub(r"\s", "", safe) == re.sub(r"\s", "", text)
