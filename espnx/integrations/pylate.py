"""PyLate's index and re-ranking on an espnx store: the same calls, the vectors on SSD. PyLate
itself is not needed.

>>> index = EspnxIndex(index_folder="indexes", index_name="mine")      # doctest: +SKIP
>>> embeddings = model.encode(texts, is_query=False)                   # doctest: +SKIP
>>> index.add_documents(["a", "b"], embeddings)                        # doctest: +SKIP
>>> index(model.encode(["what?"], is_query=True), k=10)                # doctest: +SKIP
[[{'id': 'b', 'score': 23.4}, {'id': 'a', 'score': 11.0}]]

An `EspnxIndex` can also be given to ``pylate.retrieve.ColBERT(index=...)``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict

import numpy as np
import torch

from ..checks import check_whole
from ..errors import InvalidInputError
from ..retrieval.build.api import build
from ..retrieval.build.changes.change import add, delete
from ..retrieval.build.documents import Document
from ..retrieval.encoder import Encoded
from ..retrieval.search.index import Index
from ..storage.documents.ids import DocumentId, document_id, document_ids
from ..storage.files import make_given_directory
from ..storage.manifest import NAME as MANIFEST

CANDIDATES = 1000


class RerankResult(TypedDict):
    """One document of a ranking, as in ``pylate.rank``."""

    id: DocumentId
    score: float


class EspnxIndex:
    """An index with the methods of ``pylate.indexes.PLAID``, kept in an espnx store.

    Args:
        index_folder, index_name: the store's directory is ``index_folder/index_name``; a store that
            is there is used.
        override: begin anew; the first documents that are added replace the store that is there.
        candidates: how many documents the first stage hands on to be scored exactly (PLAID's
            ``n_full_scores``); at least k are.
        build_options: of `espnx.build`: format (``fp16`` unless given; ``residual2`` or
            ``residual4`` make the sizes of a PLAID index), first_stage_code, nlist, pooling,
            memory, directories, ...
        search_options: of `Index.search`: nprobe, rerank, cascade, ...

    Safe to search from several threads; adding, removing and searching at the same time is not.

    Raises:
        what opening the store raises; InvalidInputError where the store's documents have a CLS
        vector, which PyLate's do not have.
    """

    is_end_to_end_index = True

    def __init__(
        self,
        index_folder: str | os.PathLike[str] = "indexes",
        index_name: str = "colbert",
        override: bool = False,
        *,
        candidates: int = CANDIDATES,
        build_options: dict[str, Any] | None = None,
        search_options: dict[str, Any] | None = None,
    ):
        self.path = Path(index_folder) / index_name
        self.candidates = candidates
        self._build_options, self._search_options = build_options or {}, search_options or {}
        self._override = override
        self._opened: Index | None = None

    @property
    def is_indexed(self) -> bool:
        """Whether there are documents to search."""
        return not self._override and (self.path / MANIFEST).is_file()

    @property
    def index(self) -> Index:
        """The open index. Raises InvalidInputError where no documents were added, and what opening
        raises."""
        if self._opened is None:
            self._check_indexed()
            opened = Index(self.path)
            if opened.store.manifest.encoder.d_cls:
                opened.close()
                raise InvalidInputError(
                    f"store {self.path}",
                    got="documents with a CLS vector",
                    expected="tokens alone, as PyLate has",
                    fix="use espnx.Index",
                )
            self._opened = opened
        return self._opened

    def _check_indexed(self) -> None:
        if not self.is_indexed:
            raise InvalidInputError(
                f"index {self.path}",
                got="an empty index",
                expected="documents",
                fix="add_documents first",
            )

    def add_documents(
        self,
        documents_ids: DocumentId | Iterable[DocumentId],
        documents_embeddings: Sequence[Any],
        **_: Any,
    ) -> EspnxIndex:
        """Adds documents to the index: ids (str or int) and for each an array ``[n, d]`` (numpy,
        torch, or nested lists).

        Raises InvalidInputError for numbers that differ and vectors that do not fit, and what
        `build` and `add` raise.
        """
        return self._add("add_documents", documents_ids, documents_embeddings, replace=False)

    def remove_documents(self, documents_ids: DocumentId | Iterable[DocumentId]) -> EspnxIndex:
        """Removes documents; ids of others stay as they are. Unknown ids have no effect. Raises
        InvalidInputError for an empty index."""
        ids = _ids(documents_ids)
        self._check_indexed()
        self.close()
        delete(self.path, ids, missing_ok=True)
        return self

    def update_documents(
        self, documents_ids: DocumentId | Iterable[DocumentId], documents_embeddings: Sequence[Any]
    ) -> EspnxIndex:
        """Replaces documents, and adds those that are not there, in one step: where one does not
        fit, none is replaced. Raises what `add_documents` does."""
        return self._add("update_documents", documents_ids, documents_embeddings, replace=True)

    def _add(
        self, what: str, documents_ids: Any, documents_embeddings: Sequence[Any], *, replace: bool
    ) -> EspnxIndex:
        ids = _ids(documents_ids)
        if len(ids) != len(documents_embeddings):
            got = f"{len(ids)} ids and {len(documents_embeddings)} embeddings"
            raise InvalidInputError(what, got=got, expected="as many of one as of the other")
        if not ids:
            return self
        documents = _documents(ids, documents_embeddings)
        is_indexed = self.is_indexed
        self.close()
        if is_indexed:
            add(self.path, documents, replace=replace, memory=self._build_options.get("memory"))
            return self
        dim = _matrix(documents_embeddings[0], "embeddings of document 0").shape[1]
        # What an attempt that failed has spooled is of documents that may have changed since.
        make_given_directory(self.path.parent)
        build(
            self.path,
            documents,
            dims=(0, dim),
            restart=True,
            replace=self._override,
            **self._build_options,
        )
        self._override = False
        return self

    def __call__(
        self,
        queries_embeddings: Any,
        k: int = 10,
        subset: Sequence[DocumentId] | Sequence[Sequence[DocumentId]] | None = None,
    ) -> list[list[RerankResult]]:
        """The best k documents of each query.

        Args:
            queries_embeddings: ``[queries, n, d]``, a list of ``[n, d]``, or ``[n, d]`` for one
                query.
            k: documents wanted.
            subset: ids that may be found, for all queries or a list for each.
        """
        queries = _queries(queries_embeddings)
        check_whole("k", k, 1)
        options = {"candidates": max(k, self.candidates), **self._search_options}
        shared, each = _subsets(subset, len(queries))
        if each is None:
            return [
                _results(result)
                for result in self.index.search(queries, k, include=shared, **options)
            ]
        return [
            _results(self.index.search(query, k, include=one, **options))
            for query, one in zip(queries, each, strict=True)
        ]

    def retrieve(
        self, queries_embeddings: Any, k: int = 10, subset: Any = None, **_: Any
    ) -> list[list[RerankResult]]:
        """Does what ``pylate.retrieve.ColBERT(index).retrieve`` does; k_token, device and
        batch_size mean nothing here."""
        return self(queries_embeddings, k=k, subset=subset)

    def rerank(
        self, documents_ids: Sequence[Sequence[DocumentId]], queries_embeddings: Any
    ) -> list[list[RerankResult]]:
        """Does what ``pylate.rank.rerank`` does, with documents of this index, whose vectors are
        scored where they are. See `rerank`."""
        return rerank(documents_ids, queries_embeddings, self)

    def close(self) -> None:
        """Closes the store; the next search opens it again."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def __enter__(self) -> EspnxIndex:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def rerank(
    documents_ids: Sequence[Sequence[DocumentId]],
    queries_embeddings: Any,
    documents_embeddings: EspnxIndex | Index | Sequence[Sequence[Any]],
    device: str | None = None,
) -> list[list[RerankResult]]:
    """Does what ``pylate.rank.rerank`` does: the given documents of each query by MaxSim, best
    first, equal ones in the order given.

    Args:
        documents_ids: for each query, ids of documents.
        queries_embeddings: ``[queries, n, d]``, a list of ``[n, d]``, or ``[n, d]`` for one query.
        documents_embeddings: an index that holds the documents, scored in place; or for each query
            an array ``[n, d]`` for each document.
        device: where given arrays are scored; an index scores where it was opened to.

    Documents are not padded to the longest one, so a negative similarity counts as what it is
    (PyLate's padding makes it 0 for all but the longest).

    Raises:
        InvalidInputError: numbers that differ, or an id that the index does not hold.
    """
    queries = _queries(queries_embeddings)
    if len(queries) != len(documents_ids):
        raise InvalidInputError(
            "rerank",
            got=f"{len(queries)} queries and {len(documents_ids)} lists of ids",
            expected="as many of both",
        )
    if isinstance(documents_embeddings, (EspnxIndex, Index)):
        index = (
            documents_embeddings.index
            if isinstance(documents_embeddings, EspnxIndex)
            else documents_embeddings
        )
        scored = [
            _stored_scores(index, query, list(ids))
            for query, ids in zip(queries, documents_ids, strict=True)
        ]
    else:
        if len(documents_embeddings) != len(queries):
            got = f"{len(documents_embeddings)} lists of embeddings"
            raise InvalidInputError(
                "rerank", got=got, expected=f"one for each of {len(queries)} queries"
            )
        scored = [
            _scores(query.tokens, made, device)
            for query, made in zip(queries, documents_embeddings, strict=True)
        ]
    results = []
    for ids, scores in zip(documents_ids, scored, strict=True):
        if len(ids) != len(scores):
            raise InvalidInputError(
                "rerank",
                got=f"{len(ids)} ids and {len(scores)} embeddings",
                expected="as many of both",
            )
        order = sorted(range(len(scores)), key=lambda number: -scores[number])
        results.append([RerankResult(id=ids[number], score=scores[number]) for number in order])
    return results


def _stored_scores(index: Index, query: Encoded, ids: list[DocumentId]) -> list[float]:
    if not ids:
        return []
    wanted = list(dict.fromkeys(document_ids(ids, "rerank")))
    found = {
        hit.id: hit.score
        for hit in index.search(query, len(wanted), include=wanted, candidates=len(wanted)).hits
    }
    unknown = [identifier for identifier in wanted if identifier not in found]
    if unknown:
        raise InvalidInputError(
            "rerank",
            got=f"{unknown[0]!r}",
            expected="ids of documents in the index",
            fix="leave it out, or add it",
        )
    return [found[identifier] for identifier in ids]


def _scores(query: torch.Tensor, documents: Sequence[Any], device: str | None) -> list[float]:
    query = query.to(device or "cpu")
    made = [
        _matrix(document, "embeddings of a document").to(query.device) for document in documents
    ]
    return [
        float((query @ document.T).amax(1).sum()) if len(document) else 0.0 for document in made
    ]


def _results(result: Any) -> list[RerankResult]:
    return [RerankResult(id=hit.id, score=hit.score) for hit in result.hits]


def _ids(ids: Any) -> list[DocumentId]:
    is_one = isinstance(ids, (str, int)) or getattr(ids, "ndim", None) == 0
    return [document_id(ids)] if is_one else document_ids(ids)


def _subsets(
    subset: Any, queries: int
) -> tuple[list[DocumentId] | None, list[list[DocumentId]] | None]:
    """(ids for all queries, or None for every document; else a list for each query)."""
    if subset is None:
        return None, None
    if isinstance(subset, (str, bytes)) or not isinstance(subset, Iterable):
        return document_ids(subset, "subset"), None  # which refuses it
    items = [item.tolist() if hasattr(item, "tolist") else item for item in subset]
    if not any(isinstance(item, Iterable) and not isinstance(item, (str, bytes)) for item in items):
        return document_ids(items, "subset"), None
    if len(items) != queries:
        raise InvalidInputError(
            "subset", got=f"{len(items)} lists", expected=f"one for each of {queries} queries"
        )
    return None, [
        document_ids(item, f"subset of query {number}") for number, item in enumerate(items)
    ]


def _documents(ids: list[DocumentId], embeddings: Sequence[Any]) -> Iterator[Document]:
    for identifier, values in zip(ids, embeddings, strict=True):
        tokens = _matrix(values, f"embeddings of document {identifier!r}")
        yield Document(identifier, "", Encoded(torch.empty(0), tokens))


def _queries(embeddings: Any) -> list[Encoded]:
    if isinstance(embeddings, (np.ndarray, torch.Tensor)) and embeddings.ndim == 2:
        embeddings = [embeddings]
    return [
        Encoded(torch.empty(0), _matrix(values, f"embeddings of query {i}"))
        for i, values in enumerate(embeddings)
    ]


def _matrix(values: Any, what: str) -> torch.Tensor:
    """float32 ``[n, d]`` on the CPU. Raises InvalidInputError for another number of dimensions."""
    try:
        tensor = (
            values.detach()
            if isinstance(values, torch.Tensor)
            else torch.as_tensor(np.asarray(values, dtype=np.float32))
        )
    except (ValueError, TypeError) as error:
        raise InvalidInputError(what, got=str(error), expected="an array [n, d]") from None
    if tensor.ndim != 2 or tensor.is_complex():
        raise InvalidInputError(
            what, got=f"{tensor.dtype} {list(tensor.shape)}", expected="numbers [n, d]"
        )
    return tensor.to("cpu", torch.float32).contiguous()
