"""From text to terms: what stands between a corpus and its posting lists, and between a query and
its terms.

Index and queries must be cut the same way, or nothing is found. So an analyzer is a value: its
fields stand in an index's manifest, with a hash of them, and an open index makes its own from
there.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from .. import errors

#: Words of two letters or more: the pattern of scikit-learn and bm25s.
WORDS = r"(?u)\b\w\w+\b"
_ENGLISH = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then "
    "there these they this to was will with"
)
#: Lists that have a name: Lucene's 33 words, which bm25s takes, too.
STOP_WORDS = {"english": tuple(_ENGLISH.split())}
_PATTERN_MAX, _STOP_WORDS_MAX = 4096, 100_000


@dataclass(frozen=True)
class Analyzer:
    """How text becomes terms: lower case, the matches of a pattern, without stop words, stemmed; in
    this order, which is bm25s's.

    Attributes:
        pattern: a regular expression, whose matches are the words.
        lower: whether text is made lower case first.
        stop_words: words that are left out, before stemming: ``"english"`` (the 33 of Lucene and
            bm25s), or words; none by default.
        stemmer: a Snowball language such as ``"english"``, by PyStemmer (``pip install
            'espnx[postings]'``); None: no stemming.
    """

    pattern: str = WORDS
    lower: bool = True
    stop_words: str | tuple[str, ...] = ()
    stemmer: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or len(self.pattern) > _PATTERN_MAX:
            raise errors.InvalidInputError(
                "pattern of an analyzer",
                got=repr(self.pattern)[:80],
                expected="a regular expression",
            )
        try:
            groups = re.compile(self.pattern).groups
        except (re.error, RecursionError, OverflowError) as error:
            raise errors.InvalidInputError(
                "pattern of an analyzer", got=repr(self.pattern), expected=f"no error: {error}"
            ) from None
        if groups > 1:
            raise errors.InvalidInputError(
                "pattern of an analyzer",
                got=f"{groups} groups",
                expected="one at most: its text is the word",
            )
        if not isinstance(self.lower, bool):
            raise errors.InvalidInputError(
                "lower of an analyzer", got=repr(self.lower), expected="True or False"
            )
        if isinstance(self.stop_words, str):
            if self.stop_words not in STOP_WORDS:
                raise errors.InvalidInputError(
                    "stop_words of an analyzer",
                    got=repr(self.stop_words),
                    expected=f"one of {', '.join(STOP_WORDS)}, or words",
                )
        else:
            words = tuple(self.stop_words) if isinstance(self.stop_words, Iterable) else None
            if (
                words is None
                or len(words) > _STOP_WORDS_MAX
                or not all(isinstance(word, str) for word in words)
            ):
                got = repr(self.stop_words) if words is None else f"{len(words)} values"
                raise errors.InvalidInputError(
                    "stop_words of an analyzer", got=got, expected="words; () for none"
                )
            object.__setattr__(self, "stop_words", words)
        text = json.dumps(self.fields, ensure_ascii=False)
        if re.search("[\ud800-\udfff]", text) or "\\u0000" in text:
            raise errors.InvalidInputError(
                "analyzer",
                got="half of a character, or NUL",
                expected="text that a manifest can hold",
            )
        if self.stemmer is not None and not isinstance(self.stemmer, str):
            raise errors.InvalidInputError(
                "stemmer of an analyzer",
                got=repr(self.stemmer),
                expected="a language, such as 'english'",
            )

    @classmethod
    def of(cls, language: str) -> Analyzer:
        """Cuts texts of a language as the first stage ``bm25`` does: ``english``: without
        stop words, and stemmed; another Snowball language: stemmed; ``none``: as they are.

        Raises InvalidInputError for a language that has no stemmer, MissingDependencyError without
        PyStemmer.
        """
        if language != "none":
            load_stemmer(language)  # now, not when all is read
        return (
            cls()
            if language == "none"
            else cls(stop_words="english" if language == "english" else (), stemmer=language)
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that a manifest holds."""
        return asdict(self) | {
            "stop_words": self.stop_words
            if isinstance(self.stop_words, str)
            else list(self.stop_words)
        }

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides about terms, 64 hexadecimal digits."""
        words = STOP_WORDS[self.stop_words] if isinstance(self.stop_words, str) else self.stop_words
        canonical = [self.pattern, self.lower, sorted(set(words)), self.stemmer]
        return hashlib.sha256(json.dumps(canonical).encode()).hexdigest()

    @cached_property
    def _find(self) -> Callable[[str], list[str]]:
        return re.compile(self.pattern).findall

    @cached_property
    def _left_out(self) -> frozenset[str]:
        return frozenset(
            STOP_WORDS[self.stop_words] if isinstance(self.stop_words, str) else self.stop_words
        )

    @cached_property
    def _stem(self) -> Callable[[str], str] | None:
        return None if self.stemmer is None else load_stemmer(self.stemmer)

    def words(self, text: str) -> list[str]:
        """The words of a text, stop words among them, not stemmed."""
        if not isinstance(text, str):
            raise errors.InvalidInputError(
                "text to analyze", got=type(text).__name__, expected="a str"
            )
        return self._find(text.lower() if self.lower else text)

    def term(self, word: str) -> str | None:
        """The term of a word; None: it is a stop word."""
        if word in self._left_out:
            return None
        return word if self._stem is None else self._stem(word)

    def terms(self, text: str) -> list[str]:
        """The terms of a text, in its order, as often as they are in it.

        Raises:
            InvalidInputError: not a str.
            MissingDependencyError: the stemmer's package is not installed.
        """
        found = (self.term(word) for word in self.words(text))
        return [term for term in found if term is not None]


def load_stemmer(language: str) -> Callable[[str], str]:
    """A Snowball stemmer. Raises MissingDependencyError, InvalidInputError for an unknown
    language."""
    try:
        package = importlib.import_module("Stemmer")
    except ImportError as error:
        raise errors.MissingDependencyError(
            "stemming needs PyStemmer",
            got=str(error),
            fix="pip install 'espnx[postings]', or leave stemmer out",
        ) from error
    try:
        stemmer = package.Stemmer(language)
    except KeyError:
        known = ", ".join(package.algorithms())
        raise errors.InvalidInputError(
            "stemmer of an analyzer", got=repr(language), expected=f"one of {known}"
        ) from None

    def stem(word: str) -> str:
        try:
            found: str = stemmer.stemWord(word)
        except UnicodeEncodeError:  # half of a character: no language has such a word
            return word
        return found

    return stem
