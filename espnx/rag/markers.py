"""The numbers of sources in an answer: markers such as ``[2]`` or ``[1, 3]``, which of them are of
a source, and the sentences that they stand in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_MARKER = re.compile(r"\[\s*(\d+(?:\s*[,;]\s*\d+)*)\s*\]", re.ASCII)
_EXACT = re.compile(r"\[(\d+(?:\s*[,;]\s*\d+)*)\]", re.ASCII)
_WITH_SPACE = re.compile(rf" ?{_EXACT.pattern}", re.ASCII)
_NUMBER = re.compile(r"\d+", re.ASCII)
# markers right behind a sentence are its own
_SENTENCE_END = re.compile(rf"(?<=[.!?])[\"')]*(?:\s*{_EXACT.pattern})*\s+|\n+", re.ASCII)
#: More than sources could have; Python does not read numbers of any length.
_DIGITS_MAX = 9


@dataclass(frozen=True)
class Marker:
    """Attributes: numbers: of sources, each once. start, end: characters of the text."""

    numbers: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class MarkedText:
    """An answer in which every marker leads to a source.

    Attributes:
        text: without the numbers that lead nowhere.
        markers: in the order of the text.
        unknown: numbers that were taken out, each once.
    """

    text: str
    markers: tuple[Marker, ...]
    unknown: tuple[int, ...]


@dataclass(frozen=True)
class CitedSentence:
    """Attributes: text: of a sentence, without markers. numbers: that it cites, each once."""

    text: str
    numbers: tuple[int, ...]


def parse(text: str, known: int) -> MarkedText:
    """Reads the markers of an answer whose sources have the numbers 1 to `known`.

    A number that was never given is taken out, with its marker where nothing is left of that, and
    is never read as one near it.
    """
    parts, markers, unknown, at, length = list[str](), list[Marker](), dict[int, None](), 0, 0
    for match in _EXACT.finditer(text):
        # what is too long to be a number is no source's either, and is reported by its beginning
        words = [word.lstrip("0")[:_DIGITS_MAX] or "0" for word in _NUMBER.findall(match[1])]
        is_right = [1 <= int(word) <= known for word in words]
        strange = [int(word) for word, right in zip(words, is_right, strict=True) if not right]
        right = tuple(
            dict.fromkeys(int(w) for w, right in zip(words, is_right, strict=True) if right)
        )
        unknown |= dict.fromkeys(strange)
        before = text[at : match.start()]
        at = match.end()
        if not right:
            before = before.rstrip(" ")
        parts.append(before)
        length += len(before)
        if right:
            written = f"[{', '.join(map(str, right))}]" if strange else match[0]
            markers.append(Marker(right, length, length + len(written)))
            parts.append(written)
            length += len(written)
    joined, markers = _of_these("".join([*parts, text[at:]]), markers)
    return MarkedText(joined, tuple(markers), tuple(unknown))


def _of_these(text: str, markers: Sequence[Marker]) -> tuple[str, list[Marker]]:
    """Text in which nothing else reads as a marker: what was taken out may have stood within
    another pair of brackets (``[[9]2]``), which is no marker. Markers move with it."""
    known = {each.start: each for each in markers}
    parts, found, at, more = list[str](), list[Marker](), 0, 0
    for match in _EXACT.finditer(text):
        marker = known.get(match.start())
        if marker is not None:
            found.append(replace(marker, start=marker.start + more, end=marker.end + more))
            continue
        parts += [text[at : match.start()], f"[ {match[1]} ]"]
        at, more = match.end(), more + 2
    return "".join([*parts, text[at:]]), found


def cited_sentences(marked: MarkedText) -> list[CitedSentence]:
    """The sentences with a marker. One that stands between two sentences belongs to the first:
    ``It is. [1] It was.``"""
    text, ends = marked.text, [match.end() for match in _SENTENCE_END.finditer(marked.text)]
    begins = [0, *ends]
    spans = list(zip(begins, [*ends, len(text)], strict=True))
    numbers: list[dict[int, None]] = [{} for _ in spans]
    for marker in marked.markers:
        at = max(i for i, (begin, _) in enumerate(spans) if begin <= marker.start)
        while at and not _EXACT.sub("", text[spans[at][0] : marker.start]).strip():
            at -= 1
        numbers[at] |= dict.fromkeys(marker.numbers)
    return [
        CitedSentence(words, tuple(found))
        for (begin, end), found in zip(spans, numbers, strict=True)
        if found and (words := _WITH_SPACE.sub("", " ".join(text[begin:end].split())).strip())
    ]


def without_markers(text: str) -> str:
    """Text in which nothing reads as a marker, so that a model which copies it cites nothing:
    ``[3]`` becomes ``[ 3 ]``. White space aside it is the same."""
    return _MARKER.sub(lambda match: f"[ {match[1]} ]", text)
