"""Writes a segment: postings that come term after term become its sections, each a stream of
bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from ... import errors
from ...storage import NativeEngine
from ...storage.native import load_native
from ..stored.dictionary import Dictionary, TermsWriter
from ..stored.forward import TERMS_OF_A_RECORD_MAX, ForwardRows, ForwardSpool, term_bytes
from ..stored.layout import (
    COUNT,
    DICTIONARY,
    FLOAT,
    FORWARD,
    IMPACT,
    LENGTHS,
    LIST_ALIGN_BYTES,
    LISTS,
    PLACES,
    TERMS,
    TERMS_MAX,
)
from ..stored.lengths import Lengths
from ..stored.terms import name_of
from .impacts import LargestWeights, into_layers, quantise
from .spool import TermPostings

#: (what is being done, how much is done, of how much or 0 where nobody knows)
Progress = Callable[[str, int, int], None]
SectionContent = tuple[str, Iterable[np.ndarray]]
_BYTES_A_FORWARD_ENTRY = 40  # of memory, while records are sorted


class SegmentWriter:
    """Turns merged postings into sections.

    Args:
        engine: of the forward records' spool.
        directory: for that spool.
        salt: of the segment.
        kind: `espnx.postings.stored.layout.COUNT`, `IMPACT` or `FLOAT`.
        n_records: of the segment.
        n_postings: that will come, at most.
        largest: of impacts: weights that the steps of each list have to reach; None: those of the
            postings that come.
        memory_bytes: for the forward records.
        progress: is told of postings and records.

    Attributes:
        n_postings: so far.
        n_raised: of impacts, so far: weights below half a step, which are stored as one.
    """

    def __init__(
        self,
        engine: NativeEngine,
        directory: str,
        *,
        salt: int,
        kind: int,
        n_records: int,
        n_postings: int,
        largest: LargestWeights | None = None,
        memory_bytes: int,
        progress: Progress,
    ):
        self._salt, self._kind, self._progress, self._n_records = salt, kind, progress, n_records
        self._steps_for, self.n_raised = largest, 0
        self._expected = n_postings
        self._terms = TermsWriter(salt)
        self._hashes, self._df = list[np.ndarray](), list[np.ndarray]()
        self._sizes, self._first_sizes = list[np.ndarray](), list[np.ndarray]()
        self._largest, self._exponents = list[np.ndarray](), list[np.ndarray]()
        self._n_terms = self.n_postings = 0
        self._spool = None
        if kind != COUNT:
            budget = max(1 << 16, memory_bytes // _BYTES_A_FORWARD_ENTRY)
            self._spool = ForwardSpool(
                engine, directory, f"spool-{salt:08x}", n_records, n_postings, budget
            )

    def sections(
        self, merged: Iterable[TermPostings], lengths: np.ndarray | None
    ) -> Iterator[SectionContent]:
        """Name and content of each section. Each content must be used up before the next section is
        asked for.

        Args:
            merged: all postings, by (hash, bytes) of their terms; values are counts, or the bits of
                float32 weights.
            lengths: int64 [n_records], of counts.
        """
        yield LISTS, self._lists(merged)
        self._terms.end()
        yield TERMS, self._terms.parts()
        sum_lengths = 0
        if lengths is not None:
            sum_lengths = int(lengths.sum())
            yield LENGTHS, [Lengths.of(lengths).section(self._salt)]
        if self._spool is not None:
            yield from self._forward(self._spool)
        yield DICTIONARY, [self._dictionary(sum_lengths).section()]

    def _forward(self, spool: ForwardSpool) -> Iterator[SectionContent]:
        most = int(spool.counts.max(initial=0))
        if most > TERMS_OF_A_RECORD_MAX:
            raise errors.InvalidInputError(
                "terms of a vector", got=most, expected=f"at most {TERMS_OF_A_RECORD_MAX}"
            )
        of_term = term_bytes(self._n_terms)
        rows = ForwardRows.of(
            spool.counts.astype(np.uint16), of_term + (4 if self._kind == FLOAT else 1)
        )
        self._progress("forward records", 0, self._n_records)
        yield FORWARD, spool.records(rows, self._salt, self._kind, of_term)
        self._progress("forward records", self._n_records, self._n_records)
        yield PLACES, [rows.section(self._salt)]

    def _lists(self, merged: Iterable[TermPostings]) -> Iterator[np.ndarray]:
        encoder = load_native().ListEncoder(self._salt, self._kind)
        for part in merged:
            first = np.zeros(len(part.names), np.int64)
            if self._kind != COUNT:
                part, first = self._weighted(part)
            if self._n_terms + len(part.names) > TERMS_MAX:
                raise errors.InvalidInputError(
                    "terms of a segment",
                    got=f"more than {TERMS_MAX}",
                    expected="fewer; build several indexes",
                )
            names = [name_of(name) for name in part.names]
            begin = np.cumsum([0, *(len(name) for name, _ in names)])
            sizes, first_sizes = encoder.add_lists(
                self._n_terms,
                torch.frombuffer(
                    bytearray(b"".join(name for name, _ in names) + b"\0"), dtype=torch.uint8
                ),
                torch.from_numpy(begin),
                torch.tensor([is_digest for _, is_digest in names], dtype=torch.uint8),
                torch.from_numpy(part.counts),
                torch.from_numpy(first),
                torch.from_numpy(part.records),
                torch.from_numpy(part.values),
            )
            self._hashes.append(part.hashes)
            self._df.append(part.counts.astype("<u4"))
            self._sizes.append(sizes.numpy())
            self._first_sizes.append(first_sizes.numpy())
            self._terms.add(part.names)
            self._n_terms += len(names)
            self.n_postings += len(part.records)
            yield encoder.take().numpy()
            self._progress("postings", self.n_postings, self._expected)

    def _weighted(self, part: TermPostings) -> tuple[TermPostings, np.ndarray]:
        """Postings as steps or floats, in layers; the forward records are told of them."""
        if self._kind == IMPACT:
            exponents = (self._steps_for or LargestWeights.in_postings(part)).exponents(part.hashes)
            part, n_raised = quantise(part, exponents)
            self._exponents.append(exponents)
            self.n_raised += n_raised
        if self._spool is not None:
            self._spool.add(
                np.repeat(np.arange(self._n_terms, self._n_terms + len(part.names)), part.counts),
                part.records,
                part.values,
            )
        weights = part.values if self._kind == IMPACT else part.values.view(np.float32)
        part, first, largest = into_layers(part, weights)
        self._largest.append(
            largest if self._kind == FLOAT else np.ldexp(largest, exponents.astype(np.int32))
        )
        return part, first

    def _dictionary(self, sum_lengths: int) -> Dictionary:
        """The dictionary of all lists that were written."""
        first = np.concatenate([np.zeros(1, np.int64), *self._sizes]).cumsum() // LIST_ALIGN_BYTES
        if int(first[-1]) >= 2**32:
            size_bytes = int(first[-1]) * LIST_ALIGN_BYTES
            raise errors.InvalidInputError(
                "lists of a segment", got=f"{size_bytes} bytes", expected="less than 256 GiB"
            )
        hashes, df = (
            np.concatenate([np.zeros(0, "<u8"), *self._hashes]),
            np.concatenate([np.zeros(0, "<u4"), *self._df]),
        )
        first_layer = largest = exponents = None
        if self._kind != COUNT:
            layers = np.concatenate([np.zeros(0, np.int64), *self._first_sizes]) // LIST_ALIGN_BYTES
            first_layer, largest = (
                layers.astype("<u2"),
                np.concatenate([np.zeros(0), *self._largest]).astype("<f4"),
            )
        if self._kind == IMPACT:
            exponents = np.concatenate([np.zeros(0, np.int8), *self._exponents])
        return Dictionary(
            self._salt,
            self._kind,
            self._n_records,
            self.n_postings,
            sum_lengths,
            hashes,
            first.astype("<u4"),
            df,
            np.array(self._terms.offsets, "<u8"),
            first_layer,
            largest,
            exponents,
        )

    def close(self) -> None:
        """Removes the spool."""
        if self._spool is not None:
            self._spool.close()
