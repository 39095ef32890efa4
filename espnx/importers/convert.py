"""Existing indexes as espnx stores: residual codes are kept as they are, so scores are those of the
index they come from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

from ..checks import check_path
from ..errors import InvalidInputError
from ..retrieval.build.api import build
from ..retrieval.build.builder import Progress
from ..retrieval.build.documents import Document
from ..retrieval.build.options import FirstStages
from ..retrieval.build.reports import BuildReport
from ..retrieval.encoder import EncoderLike, encoder_of
from ..retrieval.sparse_encoder import SparseEncoderLike
from ..storage import NativeEngine
from ..storage.documents.ids import DocumentId
from ..suggestions import suggests_keywords
from .colbert import ColBERTIndex
from .collection import Texts, text_for, texts_of
from .fast_plaid import FastPlaidIndex
from .plaid import IndexFolder
from .pylate_ids import IDS, read_ids


@dataclass(frozen=True)
class IndexSummary:
    """What an index folder holds."""

    documents: int
    tokens: int
    dim: int
    format: str
    centroids: int


def open_index(folder: Path) -> IndexFolder:
    """A reader for the kind of index that the folder holds. Raises what the reader raises."""
    inner = folder / "fast_plaid_index"  # PyLate's own folder, with fast-plaid's inside
    kinds: dict[Path, Callable[[Path], IndexFolder]] = {
        folder / "centroids.pt": ColBERTIndex,
        folder / "centroids.npy": FastPlaidIndex,
        inner / "centroids.npy": FastPlaidIndex,
    }
    for mark, kind in kinds.items():
        if mark.is_file():
            return kind(mark.parent)
    if not folder.is_dir():
        raise InvalidInputError(
            f"index folder {folder}", got="no such directory", expected="the folder of an index"
        )
    names = sorted(path.name for path in folder.iterdir())
    raise InvalidInputError(
        f"index folder {folder}",
        got=f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
        if names
        else "an empty directory",
        expected=(
            "centroids.pt (ColBERT), centroids.npy (fast-plaid) or fast_plaid_index (PyLate) in it"
        ),
        fix="give the folder that holds metadata.json and the chunks, not the one above it",
    )


def inspect_index(folder: str | os.PathLike[str]) -> IndexSummary:
    """What an index folder holds, from its metadata. Raises what `import_index` raises."""
    index = open_index(Path(check_path("index folder", folder)))
    return IndexSummary(
        index.documents, index.tokens, index.dim, index.format, index.codebook.n_centroids
    )


@suggests_keywords
def import_index(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    texts: Texts = None,
    ids: Iterable[DocumentId] | None = None,
    encoder: EncoderLike | None = None,
    coarse: str | None = None,
    pooling: str | None = None,
    first_stages: FirstStages | None = None,
    language: str | None = None,
    sparse_encoder: SparseEncoderLike | None = None,
    first_stage_code: str | None = None,
    nlist: int | None = None,
    centroids: int | None = None,
    memory: int | str | None = None,
    directories: Sequence[str | os.PathLike[str]] | None = None,
    engine: NativeEngine | None = None,
    restart: bool = False,
    replace: bool = False,
    progress: Progress = lambda phase, done, total: None,
) -> BuildReport:
    """Builds a store from an index of ColBERT (v2, PLAID), fast-plaid or PyLate, in memory that
    does not grow with it.

    Rows of tokens are the index's own centroid numbers and residual codes, byte for byte; nothing
    is encoded again. The first stage has a vector for each document that is pooled from its decoded
    tokens.

    Args:
        folder: with centroids.pt (ColBERT), centroids.npy (fast-plaid), or fast_plaid_index
            (PyLate).
        path: the store's directory; made if need be.
        texts: of the documents: a path of collection.tsv or of JSON lines in the order of the
            index, a mapping from ids, or None for empty texts.
        ids: of the documents, in the order of the index. Default: those of a PyLate index, else
            those of the JSON lines, else 0, 1, 2, ...
        encoder: that the index was made with, or a description of it as `espnx.load_encoder` takes
            it. Recorded, so that the store refuses queries of another; documents are not encoded.
        coarse, pooling, first_stages, language, sparse_encoder, first_stage_code, nlist, centroids:
            as of `espnx.build`. Format, dimensions and codebook are the index's own.
        memory, directories, engine, restart, replace, progress: as of `espnx.build`.

    Raises:
        InvalidInputError: not an index, texts or ids that are not its own, or options that do not
            fit.
        FormatError: the index is damaged, incomplete or contradicts itself. What was built is kept
            as an unfinished build.
        DiskFullError, WriteError, StoreBusyError: as `espnx.build`.
    """
    index, makes = open_index(Path(check_path("index folder", folder))), encoder_of(encoder)
    if makes is not None and (makes.d_cls, makes.dim) != (0, index.dim):
        got = f"vectors of {makes.dim} dimensions" + (
            f" and a CLS of {makes.d_cls}" if makes.d_cls else ""
        )
        raise InvalidInputError(
            f"import {folder} with encoder {makes.name}",
            got=got,
            expected=f"the index's {index.dim} and no CLS",
        )
    return build(
        path,
        _Documents(index, texts, ids),
        makes,
        dims=(0, index.dim),
        format=index.format,
        codebook=index.codebook,
        coarse=coarse,
        pooling=pooling,
        first_stages=first_stages,
        language=language,
        sparse_encoder=sparse_encoder,
        first_stage_code=first_stage_code,
        nlist=nlist,
        centroids=centroids,
        memory=memory,
        directories=directories,
        engine=engine,
        restart=restart,
        replace=replace,
        progress=progress,
    )


class _Documents:
    """The documents of an index, one at a time; its length is known for the sake of progress."""

    def __init__(self, index: IndexFolder, texts: Texts, ids: Iterable[DocumentId] | None):
        if ids is not None and isinstance(ids, Sized) and len(ids) != index.documents:
            raise InvalidInputError(
                "import: ids", got=len(ids), expected=f"{index.documents}, one for each document"
            )
        self.index, self.texts, self.ids = index, texts, ids

    def __len__(self) -> int:
        return self.index.documents

    def __iter__(self) -> Iterator[Document]:
        lines = texts_of(self.texts, len(self))
        known = self._known_ids()
        number = -1
        for number, rows in enumerate(self.index.rows()):
            named, line = next(lines)
            identifier = self._id(known, named, number)
            yield Document(
                identifier, text_for(self.texts, identifier, line), rows=rows.numpy().copy()
            )  # a slice of a block would keep all of it
        # Reads on, so that a file with more lines is found out.
        for _ in lines:
            pass
        if known is not None and next(known, None) is not None:
            raise InvalidInputError(
                "import: ids", got=f"more than {number + 1}", expected="one for each document"
            )

    def _known_ids(self) -> Iterator[DocumentId] | None:
        if self.ids is not None:
            return iter(self.ids)
        for where in (self.index.folder, self.index.folder.parent):
            inside = where == self.index.folder or self.index.folder.name == "fast_plaid_index"
            if inside and (where / IDS).is_file():
                return iter(read_ids(where / IDS, len(self)))
        return None

    @staticmethod
    def _id(
        known: Iterator[DocumentId] | None, named: DocumentId | None, number: int
    ) -> DocumentId:
        if known is None:
            return number if named is None else named
        identifier = next(known, None)
        if identifier is None:
            raise InvalidInputError("import: ids", got=number, expected="one for each document")
        if named is not None and str(named) != str(identifier):
            raise InvalidInputError(
                f"texts: line of document {number}",
                got=f"id {named!r}",
                expected=repr(identifier),
                fix="pass texts as a mapping from ids",
            )
        return identifier
