"""ColBERT's ``Searcher`` on an espnx store: the same calls and the same shape of results.
colbert-ai itself is not needed.

>>> searcher = Searcher(index="store", checkpoint="colbertv2.0")   # doctest: +SKIP
>>> pids, ranks, scores = searcher.search("what is a wing?", k=3)   # doctest: +SKIP
>>> searcher.collection[pids[0]]                                    # doctest: +SKIP
'The lift of a wing ...'
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import torch

from ..checks import check_whole
from ..errors import InvalidInputError
from ..retrieval.encoder import AUTO, Encoded, EncoderLike
from ..retrieval.search.index import Index
from ..retrieval.search.options import SearchKeywords
from ..retrieval.search.result import SearchResult
from ..storage.documents.ids import DocumentId, document_id, document_ids

CANDIDATES = 1000
FilterFunction = Callable[[torch.Tensor], torch.Tensor]
Found = tuple[list[DocumentId], list[int], list[float]]


class Searcher:
    """Searches a store as ``colbert.Searcher`` searches an index.

    Args:
        index: the store's directory, see `espnx.importers.convert.import_index`; or an open
            `Index`, which stays the caller's.
        checkpoint: a ColBERT checkpoint's folder (or any that `load_encoder` knows), or an encoder;
            for queries given as text. None: the encoder that the store remembers, or that of an
            open index.
        index_root: the folder above `index`, if it is not part of it.
        **options: of `Index.search`, but for k: candidates, nprobe, rerank, ...

    ``collection[pid]`` is the text of a document, of the store. Scores are exact sums over query
    tokens; ColBERT's CPU path counts a negative maximum as 0.

    Raises:
        what opening the store and the checkpoint raises; InvalidInputError where the store was
        built with another encoder.
    """

    def __init__(
        self,
        index: str | os.PathLike[str] | Index,
        checkpoint: EncoderLike | None = None,
        *,
        index_root: str | os.PathLike[str] | None = None,
        **options: Unpack[SearchKeywords],
    ):
        self._owned = not isinstance(index, Index)
        if isinstance(index, Index):
            self.index = index
            if checkpoint is not None:
                index.use_encoder(checkpoint)
        else:
            self.index = Index(
                Path(index_root or "") / index, AUTO if checkpoint is None else checkpoint
            )
        self.options = options
        self.collection = StoredCollection(self.index)

    def encode(self, text: str | list[str]) -> torch.Tensor:
        """Queries as vectors, float32 ``[queries, n, dim]``. Raises InvalidInputError where the
        searcher has no checkpoint."""
        encoder = self.index.encoder
        if encoder is None:
            raise InvalidInputError(
                "encode a query",
                got="a Searcher without a checkpoint",
                fix="Searcher(index, checkpoint=...)",
            )
        made = encoder.encode_queries([text] if isinstance(text, str) else text)
        return (
            torch.nn.utils.rnn.pad_sequence([query.tokens for query in made], batch_first=True)
            if made
            else torch.empty(0, 0, encoder.dim)
        )

    def search(
        self,
        text: str,
        k: int = 10,
        filter_fn: FilterFunction | None = None,
        full_length_search: bool = False,
        pids: Sequence[DocumentId] | None = None,
    ) -> Found:
        """Ids, ranks from 1, and scores of the best k documents.

        Args:
            text: the query.
            k: documents wanted; fewer where there are fewer.
            filter_fn: from the ids of all candidates, an int tensor, to those that may be found.
            full_length_search: must be False: a query is cut at the checkpoint's length.
            pids: documents that are scored; no others are.
        """
        if full_length_search:
            raise InvalidInputError(
                "full_length_search",
                got="True",
                expected="False",
                fix="ColBERTEncoder(folder, query_maxlen=...)",
            )
        return _shape(self._search([text], k, filter_fn, pids)[0])

    def search_all(
        self,
        queries: Mapping[Any, str] | list[str] | Any,
        k: int = 10,
        filter_fn: FilterFunction | None = None,
        qid_to_pids: Mapping[Any, Sequence[DocumentId]] | None = None,
    ) -> Ranking:
        """The best k documents of each query.

        Args:
            queries: ``{id: text}``, a list (whose ids are 0, 1, ...), or anything with ``items()``,
                as ColBERT's ``Queries``.
            k, filter_fn: as for `search`.
            qid_to_pids: for each query the documents that are scored.
        """
        named = dict(enumerate(queries) if isinstance(queries, (list, tuple)) else queries.items())
        if qid_to_pids is None:
            results = self._search(list(named.values()), k, filter_fn, None)
        else:
            results = [
                self._search([text], k, filter_fn, qid_to_pids[qid])[0]
                for qid, text in named.items()
            ]
        return Ranking(
            {
                qid: list(zip(*_shape(result), strict=True))
                for qid, result in zip(named, results, strict=True)
            }
        )

    def dense_search(
        self,
        Q: torch.Tensor,
        k: int = 10,
        filter_fn: FilterFunction | None = None,
        pids: Sequence[DocumentId] | None = None,
    ) -> Found:
        """Searches as `search` does, for one query's vectors, ``[1, n, dim]`` or ``[n, dim]``."""
        if (
            not isinstance(Q, torch.Tensor)
            or Q.dim() not in (2, 3)
            or (Q.dim() == 3 and len(Q) != 1)
        ):
            got = f"shape {list(Q.shape)}" if isinstance(Q, torch.Tensor) else type(Q).__name__
            raise InvalidInputError(
                "dense_search",
                got=got,
                expected="one query, [1, n, dim] or [n, dim]",
                fix="search them one by one",
            )
        tokens = Q[0] if Q.dim() == 3 else Q
        return _shape(self._search([Encoded(torch.empty(0), tokens)], k, filter_fn, pids)[0])

    def _search(
        self,
        queries: list[Any],
        k: int,
        filter_fn: FilterFunction | None,
        pids: Sequence[DocumentId] | None,
    ) -> list[list[tuple[DocumentId, float]]]:
        check_whole("k", k, 1)
        pids = None if pids is None else document_ids(pids, "pids")
        candidates = max(
            k, self.options.get("candidates") or CANDIDATES, len(pids) if pids is not None else 0
        )
        options: dict[str, Any] = {**self.options, "candidates": candidates, "include": pids}
        results: list[SearchResult] = self.index.search(
            queries, k if filter_fn is None else candidates, **options
        )
        found = [[(hit.id, hit.score) for hit in result.hits] for result in results]
        return found if filter_fn is None else [_filtered(hits, filter_fn)[:k] for hits in found]

    def close(self) -> None:
        """Closes the store, unless it was given open."""
        if self._owned:
            self.index.close()

    def __enter__(self) -> Searcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Ranking:
    """Results of several queries, with the members of ``colbert.data.Ranking`` that read them.

    Attributes:
        data: for each query's id a list of (document's id, rank, score).
    """

    def __init__(self, data: dict[Any, list[tuple[DocumentId, int, float]]]):
        self.data = data

    @property
    def flat_ranking(self) -> list[tuple[Any, DocumentId, int, float]]:
        """(query's id, document's id, rank, score) of all."""
        return [(qid, *row) for qid, rows in self.data.items() for row in rows]

    def todict(self) -> dict[Any, list[tuple[DocumentId, int, float]]]:
        return dict(self.data)

    def tolist(self) -> list[tuple[Any, DocumentId, int, float]]:
        return self.flat_ranking

    def items(self) -> Any:
        return self.data.items()

    def save(self, path: str | os.PathLike[str]) -> str:
        """Writes lines of query, document, rank and score with tabs between, as ColBERT does;
        returns the path."""
        with Path(path).open("w", encoding="utf-8") as file:
            file.writelines("\t".join(map(str, row)) + "\n" for row in self.flat_ranking)
        return os.fspath(path)


class StoredCollection:
    """Texts of a store by the documents' ids, as ColBERT's ``Collection``."""

    def __init__(self, index: Index):
        self._index = index

    def __getitem__(self, pid: DocumentId) -> str:
        numbers = self._index.store.texts.numbers([document_id(pid)])
        if numbers[0] < 0:
            raise KeyError(pid)
        return self._index.store.texts.get(numbers.tolist())[0][1]

    def __len__(self) -> int:
        return self._index.store.count

    def __iter__(self) -> Iterator[str]:
        """Texts by number, for a store whose ids are 0, 1, 2, ..., as those of an imported index
        are. Raises KeyError for another."""
        return (self[pid] for pid in range(len(self)))


def _filtered(
    hits: list[tuple[DocumentId, float]], filter_fn: FilterFunction
) -> list[tuple[DocumentId, float]]:
    ids = [identifier for identifier, _ in hits]
    if not all(isinstance(identifier, int) for identifier in ids):
        raise InvalidInputError(
            "filter_fn",
            got="a store whose ids are strings",
            expected="ids that are numbers",
            fix="pass pids",
        )
    left = set(filter_fn(torch.tensor(ids, dtype=torch.int64)).tolist())
    return [(identifier, score) for identifier, score in hits if identifier in left]


def _shape(hits: list[tuple[DocumentId, float]]) -> Found:
    return (
        [identifier for identifier, _ in hits],
        list(range(1, len(hits) + 1)),
        [score for _, score in hits],
    )
