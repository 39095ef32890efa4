"""From records to a segment's file: ids and texts as they come, where postings keep them, then what
was made of all."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from .. import errors
from ..storage import NativeEngine
from ..storage.documents.ids import DocumentId
from ..storage.documents.rows import write_texts
from .build.builder import SegmentBuilder
from .build.records import Records
from .compaction import Rounding
from .deletions import Deletions
from .documents import Row
from .files import SegmentFile, documents_of, open_segments
from .format import Facts, SegmentFacts


def built_segment(
    engine: NativeEngine,
    directory: str,
    name: str,
    records: Records,
    builder: SegmentBuilder,
    facts: Facts,
    rounding: Rounding,
) -> SegmentFacts:
    """Writes the segment that follows those of `facts`, and closes the builder. Raises
    InvalidInputError, WriteError, DiskFullError."""
    first = facts.end_number
    try:
        with SegmentFile(engine, directory, name) as file:
            rows = _rows(records, builder, facts)
            alike = np.zeros(0, np.int64)
            if facts.has_documents:
                alike = write_texts(file, rows, first, builder.salt)
            else:
                deque(rows, maxlen=0)
            segment = SegmentFacts(name, first, builder.n_records, file.finish(builder.sections()))
    finally:
        builder.close()
    if len(alike):
        _check_differ(engine, directory, facts, segment, alike)
    rounding.n_postings, rounding.n_raised = (
        rounding.n_postings + builder.n_postings,
        rounding.n_raised + builder.n_raised,
    )
    return segment


def _rows(records: Records, builder: SegmentBuilder, facts: Facts) -> Iterator[Row]:
    for number, (identifier, text) in enumerate(records.add_to(builder), facts.end_number):
        if identifier is None and facts.has_ids:
            raise errors.InvalidInputError(
                f"record {number}", got="no id", expected="one, as those that the postings have"
            )
        yield number if identifier is None else identifier, text if facts.has_texts else ""


def _check_differ(
    engine: NativeEngine, directory: str, facts: Facts, segment: SegmentFacts, numbers: np.ndarray
) -> None:
    """Raises InvalidInputError for an id that two of these records have."""
    (opened,) = open_segments(engine, directory, facts, [segment])
    try:
        rows = documents_of(engine, [segment], [opened], Deletions()).get(numbers)
    finally:
        opened.close()
    known = dict[tuple[type, DocumentId], int]()
    for number, (identifier, _) in zip(numbers.tolist(), rows, strict=True):
        before = known.setdefault((type(identifier), identifier), number)
        if before != number:
            raise errors.InvalidInputError(
                f"document id {identifier!r} occurs twice",
                got=f"as records {before} and {number}",
                expected="unique ids",
                fix="rename or drop one of the two",
            )
