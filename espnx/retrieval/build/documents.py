"""What can be indexed: texts for an encoder, or vectors that are there already."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ... import errors
from ...ops.maxsim import Codebook, token_format, token_row_bytes
from ...storage.documents.ids import DocumentId, document_id
from ..encoder import Encoded, Encoder, check_count

DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class Document:
    """A text and its id, an int (64 bits) or a str.

    Attributes:
        vectors: replace the encoder's work where they are known.
        rows: uint8 [n, row bytes], token rows in the store's residual format already, kept bit for
            bit; `build` then takes the codebook. Of `vectors`, only `cls` counts beside them.
    """

    id: DocumentId
    text: str
    vectors: Encoded | None = None
    rows: np.ndarray | None = None


def to_document(item: Any, number: int) -> Document:
    """Takes a `Document`, an ``(id, text)`` pair or a mapping with ``id`` (or ``_id``) and ``text``
    (``title`` is put before it)."""
    if isinstance(item, dict):
        identifier = item.get("id", item.get("_id"))
        text = item.get("text")
        if item.get("title") and isinstance(text, str):
            text = f"{item['title']} {text}"
        item = Document(identifier, text)  # type: ignore[arg-type]
    elif isinstance(item, tuple) and len(item) == 2:
        item = Document(*item)
    if not isinstance(item, Document):
        raise errors.InvalidInputError(
            f"document {number}",
            got=type(item).__name__,
            expected="a Document, an (id, text) pair or a mapping with id and text",
            fix="enumerate(texts) numbers them" if isinstance(item, str) else None,
        )
    identifier = document_id(item.id, f"id of document {number}")
    if identifier is not item.id:
        item = replace(item, id=identifier)
    if item.vectors is not None:
        if not isinstance(item.vectors, Encoded):
            raise errors.InvalidInputError(
                f"vectors of document {identifier!r}",
                got=type(item.vectors).__name__,
                expected="an Encoded",
            )
        item = replace(
            item,
            vectors=Encoded(*(_values(part) for part in (item.vectors.cls, item.vectors.tokens))),
        )
    if not isinstance(item.text, str):
        raise errors.InvalidInputError(
            f"text of document {item.id!r}", got=type(item.text).__name__, expected="a str"
        )
    try:
        item.text.encode()
    except UnicodeEncodeError as error:
        raise errors.InvalidInputError(
            f"document {item.id!r}",
            got=f"a lone surrogate ({error.reason})",
            expected="text that UTF-8 can hold",
        ) from None
    return item


def _values(part: Any) -> Any:
    """A tensor's values alone: what made them, and could still be asked for gradients, is not
    kept."""
    return part.detach() if isinstance(part, torch.Tensor) and part.requires_grad else part


def digest(document: Document) -> bytes:
    """A digest of everything that a document brings: 16 bytes that another one does not have;
    vectors that could not be stored anyway have none."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    kind = "i" if isinstance(document.id, int) else "s"
    for text in (f"{kind}{document.id}", document.text):
        data = text.encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    vectors = document.vectors
    for part in (document.rows, *((vectors.cls, vectors.tokens) if vectors is not None else ())):
        if (
            isinstance(part, torch.Tensor)
            and part.dtype == torch.float32
            and part.device.type == "cpu"
        ):
            array = np.ascontiguousarray(part.numpy())
        elif isinstance(part, np.ndarray) and part.dtype == np.uint8:
            array = np.ascontiguousarray(part)
        elif part is None:
            array = np.empty(0, np.uint8)
        else:
            return b""
        hasher.update(f"{array.dtype.str}{array.shape}\0".encode())
        hasher.update(array.reshape(-1).view(np.uint8).data)
    return hasher.digest()


def count_hint(items: Iterable[Any]) -> int | None:
    """How many there are, as far as a collection can tell without being read; None: not known."""
    return operator.length_hint(items, 0) or None


def check_documents(items: object) -> None:
    """Raises InvalidInputError for what cannot be iterated, and for what is no collection of
    documents but names one."""
    if isinstance(items, (str, bytes, os.PathLike)):
        raise errors.InvalidInputError(
            "documents",
            got=repr(items),
            expected="an iterable of documents",
            fix="espnx.read_corpus(path), for one in a file or a folder",
        )
    if not isinstance(items, Iterable) and not hasattr(items, "__getitem__"):
        raise errors.InvalidInputError(
            "documents", got=type(items).__name__, expected="an iterable of documents"
        )


def batches(
    items: Iterable[Any], limit: int, limit_bytes: int, dim: int, *, numbers_texts: bool = False
) -> Iterator[list[Document]]:
    """Documents in batches of at most `limit`, whose vectors are expected to take at most
    `limit_bytes` (or of one document).

    A text is taken to have a token for every four characters, as English has; the estimate steers
    memory, nothing else.

    numbers_texts: where the first is a text alone, all are, and their ids are their places.
    """
    # What yields texts where documents were meant (a mapping its ids, a data frame its columns) is
    # none of these.
    numbers_texts = numbers_texts and isinstance(items, (Sequence, Iterator))
    batch: list[Document] = []
    held_bytes = 0
    for number, item in enumerate(items):
        numbers_texts = numbers_texts and (number > 0 or isinstance(item, str))
        document = to_document(Document(number, item) if numbers_texts else item, number)
        expected_bytes = _expected_tokens(document) * dim * 4
        if batch and held_bytes + expected_bytes > limit_bytes:
            yield batch
            batch, held_bytes = [], 0
        batch.append(document)
        held_bytes += expected_bytes
        if len(batch) == limit:
            yield batch
            batch, held_bytes = [], 0
    if batch:
        yield batch


def _expected_tokens(document: Document) -> int:
    if isinstance(document.rows, np.ndarray):
        return len(document.rows)
    if document.vectors is None:
        return len(document.text) // 4 + 8
    # of anything else, which is refused when its turn comes
    shape = getattr(document.vectors.tokens, "shape", ())
    return int(shape[0]) if shape else 0


def decode_rows(
    batch: list[Document], fmt: str, dim: int, codebook: Codebook | None
) -> list[Document]:
    """The batch, documents that bring token rows with the vectors they stand for. Raises
    InvalidInputError for rows that do not fit."""
    bringing = [document for document in batch if document.rows is not None]
    if not bringing and codebook is None:
        return batch
    size = token_row_bytes(fmt, dim)
    if len(bringing) < len(batch) and codebook is not None:
        other = next(document for document in batch if document.rows is None)
        raise errors.InvalidInputError(
            f"document {other.id!r} beside codebook=",
            got="a text" if other.vectors is None else "vectors",
            expected=f"rows, uint8 [n, {size}]",
            fix="code its tokens with that codebook, or leave codebook= out: the build trains one",
        )
    if not token_format(fmt).needs_codebook:
        raise errors.InvalidInputError(
            f"document {bringing[0].id!r} in a store of {fmt}",
            got="rows",
            expected="vectors",
            fix="only residual formats take rows",
        )
    parts = [_flat_rows(document, size, codebook) for document in bringing]
    # Together: a codebook's tables are prepared once a call.
    tokens = (
        token_format(fmt)
        .decode(torch.from_numpy(np.concatenate(parts)), dim, codebook)
        .split([len(part) // size for part in parts])
    )
    values = iter(tokens)
    return [
        document if document.rows is None else _with_tokens(document, next(values))
        for document in batch
    ]


def _flat_rows(document: Document, size: int, codebook: Codebook | None) -> np.ndarray:
    rows = document.rows
    if (
        not isinstance(rows, np.ndarray)
        or codebook is None
        or rows.dtype != np.uint8
        or rows.ndim != 2
        or rows.shape[1] != size
    ):
        got = (
            f"{rows.dtype} {list(rows.shape)}"
            if isinstance(rows, np.ndarray)
            else type(rows).__name__
        )
        raise errors.InvalidInputError(
            f"rows of document {document.id!r}",
            got=got + ("" if codebook else ", and no codebook"),
            expected=f"uint8 [n, {size}], and build(codebook=...)",
        )
    return np.ascontiguousarray(rows).reshape(-1)


def _with_tokens(document: Document, tokens: torch.Tensor) -> Document:
    cls = torch.empty(0) if document.vectors is None else document.vectors.cls
    return Document(document.id, document.text, Encoded(cls, tokens), document.rows)


def encode(batch: list[Document], encoder: Encoder | None) -> list[Encoded]:
    """The vectors of a batch, from the documents themselves or from the encoder."""
    missing = [document for document in batch if document.vectors is None]
    if missing and encoder is None:
        raise errors.InvalidInputError(
            f"document {missing[0].id!r} has no vectors",
            fix="pass an encoder, or Document(id, text, vectors)",
        )
    made = (
        list(encoder.encode_documents([document.text for document in missing]))
        if missing and encoder
        else []
    )
    check_count(encoder, len(missing), len(made))
    vectors = iter(made)
    return [
        document.vectors if document.vectors is not None else next(vectors) for document in batch
    ]
