"""Long texts as passages that know where they come from: spans of characters in the source, for
citations.

The cuts are those of text-splitter (the package ``semantic-text-splitter``): the largest units that
fit, paragraphs before sentences before words before letters, never inside a code point, and inside
what is read as one letter only where that alone is too long.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checks import check_path
from ..encoders.minilm import WHEEL
from ..errors import FormatError, InvalidInputError, MissingDependencyError
from ..retrieval.build.documents import check_documents, to_document
from ..suggestions import suggests_keywords

_TOKENS_MAX = 1 << 30
_WORD = re.compile(r"\w+|[^\w\s]")
_LETTERS_OF_A_WORD = 16
_SPAN = re.compile(r"(.*)#([0-9]{1,18})-([0-9]{1,18})", re.DOTALL)


@dataclass(frozen=True)
class Chunk:
    """A passage of a text.

    Attributes:
        text: what stands there: ``source[start_char:end_char]``.
        start_char, end_char: characters (code points) of the source.
    """

    text: str
    start_char: int
    end_char: int


class _Splitter:
    """Cuts texts, with one tokenizer for all of them."""

    def __init__(self, tokens: int, overlap: int, tokenizer: Any):
        for name, value, least in (("tokens", tokens, 1), ("overlap", overlap, 0)):
            if (
                not isinstance(value, int)
                or isinstance(value, bool)
                or not least <= value <= _TOKENS_MAX
            ):
                raise InvalidInputError(
                    f"chunk: {name}",
                    got=repr(value),
                    expected=f"a whole number of at least {least}",
                )
        if overlap >= tokens:
            raise InvalidInputError(
                "chunk: overlap", got=overlap, expected=f"less than a chunk's {tokens} tokens"
            )
        try:
            from semantic_text_splitter import TextSplitter
        except ImportError as error:
            raise MissingDependencyError(
                "chunk", got=str(error), expected="text-splitter", fix="pip install 'espnx[chunks]'"
            ) from error
        counted = _tokenizer(tokenizer)
        if counted is None:
            self._splitter = TextSplitter.from_callback(count_words, tokens, overlap=overlap)
        else:
            self._splitter = TextSplitter.from_huggingface_tokenizer(
                counted, tokens, overlap=overlap
            )

    def __call__(self, text: str) -> list[Chunk]:
        found = self._splitter.chunk_indices(text)
        return [Chunk(part, begin, begin + len(part)) for begin, part in found]


@suggests_keywords
def chunk(text: str, tokens: int = 256, overlap: int = 32, *, tokenizer: Any = None) -> list[Chunk]:
    """A text as passages, in order.

    Args:
        text: of any length.
        tokens: at most so many in a passage.
        overlap: at most so many that a passage shares with the one before it.
        tokenizer: what counts tokens: the tokenizer of the encoder that will see the passages, as
            ``"minilm"``, a folder with its ``tokenizer.json``, or a ``tokenizers.Tokenizer`` (whose
            own special tokens are not counted); None: words and signs, of which models make a third
            more wordpieces, or several times as many of scripts without spaces.

    Returns:
        Passages without the white space around them; none for a text without anything else. Every
        other character is in one at least.

    Raises:
        InvalidInputError: an argument out of range, or text that UTF-8 cannot hold.
        FormatError: a tokenizer's file is damaged.
        MissingDependencyError: ``semantic-text-splitter`` is not installed.
    """
    split = _Splitter(tokens, overlap, tokenizer)
    return split(to_document(("text", text), 0).text)


@suggests_keywords
def chunk_documents(
    documents: Iterable[Any], tokens: int = 256, overlap: int = 32, *, tokenizer: Any = None
) -> Iterator[dict[str, Any]]:
    """Documents as passages, as `espnx.build` takes them, one document in memory at a time.

    A passage of document ``7`` has the id ``"7#120-480"``: where it stands in the document's text
    (`chunk_source` reads it). A title is that of each passage, and is not counted.

    Args:
        documents: pairs ``(id, text)``, mappings, `espnx.Document` without vectors, or a corpus.
        tokens, overlap, tokenizer: as of `chunk`.

    Raises:
        InvalidInputError: what `chunk` and `espnx.build` refuse, and documents with vectors.
    """
    check_documents(documents)
    split = _Splitter(tokens, overlap, tokenizer)
    return _passages(documents, split)


def _passages(documents: Iterable[Any], split: _Splitter) -> Iterator[dict[str, Any]]:
    for number, item in enumerate(documents):
        title = item.get("title") if isinstance(item, dict) else None
        document = to_document({**item, "title": None} if title else item, number)
        if document.vectors is not None or document.rows is not None:
            raise InvalidInputError(
                f"chunk document {document.id!r}",
                got="vectors of the whole",
                expected="a text alone",
            )
        for part in split(document.text):
            identifier = f"{document.id}#{part.start_char}-{part.end_char}"
            yield {"id": identifier, "text": part.text} | ({"title": title} if title else {})


def chunk_source(identifier: str) -> tuple[str, int, int]:
    """(the document's id as text, start_char, end_char) of a passage's id. Raises InvalidInputError
    for another id."""
    match = _SPAN.fullmatch(identifier) if isinstance(identifier, str) else None
    if match is None or int(match[2]) > int(match[3]):
        raise InvalidInputError(
            "id of a passage",
            got=repr(identifier)[:80],
            expected="DOCUMENT#START-END, as chunk_documents gives it",
        )
    return match[1], int(match[2]), int(match[3])


def count_words(text: str) -> int:
    """Words and signs; a word counts once for each 16 letters that it has begun."""
    return sum(-(-len(match[0]) // _LETTERS_OF_A_WORD) for match in _WORD.finditer(text))


def _tokenizer(given: Any) -> Any:
    """A ``tokenizers.Tokenizer`` that cuts and pads nothing, or None."""
    if given is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependencyError(
            "chunk: tokenizer", got=str(error), expected="tokenizers", fix="pip install tokenizers"
        ) from error
    if isinstance(given, Tokenizer):
        made = Tokenizer.from_str(given.to_str())  # the caller's is not changed
    elif isinstance(given, (str, os.PathLike)):
        folder = WHEEL.folder() if given == "minilm" else Path(check_path("tokenizer", given))
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidInputError(
                "chunk: tokenizer",
                got=f"no {path}",
                expected='"minilm", or a folder with tokenizer.json',
            )
        try:
            made = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing more special
            raise FormatError(
                "tokenizer",
                path=path,
                got=str(error).strip()[:200],
                expected="a whole tokenizer.json",
            ) from error
    else:
        expected = 'None, "minilm", a folder, or a tokenizers.Tokenizer'
        raise InvalidInputError(
            "chunk: tokenizer",
            got=type(given).__name__,
            expected=expected,
            fix="of transformers: tokenizer.backend_tokenizer",
        )
    made.no_truncation()
    made.no_padding()
    return made
