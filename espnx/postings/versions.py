"""Changes to postings that stand alone: each publishes a version, by its manifest, when all of it
is on storage. Searches that are open continue with the one that they have."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np

from .. import errors
from ..checks import check_whole, plain
from ..sizes import BUILD_BYTES
from ..storage.documents.ids import DocumentId, require_known
from ..storage.work import remove_work
from ..suggestions import suggests_keywords
from .adding import built_segment
from .build.builder import SegmentBuilder
from .build.records import CsrArrays, Records
from .build.writer import Progress
from .draft import Draft, changing
from .files import PostingsReport, remove_others, report_of, warn_of_rounding
from .format import KINDS, Facts, SegmentFacts
from .queries import ids_or_mask, marked

_IDS_AT_ONCE = 4096


@suggests_keywords
def add(
    path: str | os.PathLike[str],
    texts: Iterable[Any] | None = None,
    *,
    terms: Iterable[Any] | None = None,
    vectors: Iterable[Any] | CsrArrays | None = None,
    ids: Iterable[DocumentId] | None = None,
    replace: bool = False,
    memory_bytes: int = BUILD_BYTES,
    progress: Progress | None = None,
) -> PostingsReport:
    """Appends records, numbered from the end. Totals are summed over segments when a query is
    asked, so scores of BM25 are those of an index built of all.

    They become a segment of their own, and eight additions of a size one of the next: there are few
    segments however many additions there were, and few files are open at a time.

    Args:
        texts, terms, vectors, ids, memory_bytes, progress: of `espnx.Postings.build`; of the kind
            that the index is, with ids where it has them. With no record, nothing is published.
        replace: a record whose id the index has takes the other's place, in one step: no version
            has both, or neither. It has a number of its own.

    Raises:
        InvalidInputError: of arguments; an id that comes twice, or that the index has (without
            `replace`).
        StoreBusyError: another process writes there.
        StoreNotFoundError, FormatError, ChecksumError: no postings, or damaged ones.
        WriteError, DiskFullError: the index is as it was.
    """
    memory_bytes = plain(memory_bytes)
    check_whole("memory_bytes", memory_bytes, 1 << 20)
    with changing(path) as draft:
        facts = draft.facts
        if (vectors is not None) != (facts.kind != "bm25") or (texts is None) + (terms is None) + (
            vectors is None
        ) != 2:
            expected = "texts or terms" if facts.kind == "bm25" else "vectors"
            raise errors.InvalidInputError(
                "records to add", got="others, or none", expected=expected
            )
        records = Records(texts, terms, vectors, ids)
        _check_ids(records, facts, replace=replace)
        name, salt = draft.new_name(), secrets.randbits(32)
        builder = SegmentBuilder(
            draft.engine,
            draft.directory,
            kind=KINDS[facts.kind],
            analyzer=facts.analyzer,
            memory_bytes=memory_bytes,
            progress=progress,
            salt=salt,
        )
        segment = built_segment(
            draft.engine, draft.directory, name, records, builder, facts, draft.rounding
        )
        if not segment.n_records:
            remove_work(draft.directory)  # of a build that ended right after it was done
            remove_others(draft.directory, facts)
            return PostingsReport(0, 0, 0, 0, 0, n_segments=len(facts.segments))
        replaced = _replace(draft, segment, replace=replace) if facts.has_ids else 0
        report = report_of(draft.engine, draft.directory, facts, segment, draft.rounding)
        draft.append(segment, memory_bytes=memory_bytes)
        published = draft.publish()
        warn_of_rounding(draft.directory, draft.rounding, stacklevel=2)
        return _with(
            report,
            n_raised=draft.rounding.n_raised,
            n_replaced=replaced,
            n_segments=len(published.segments),
        )


def _with(report: PostingsReport, **changes: int) -> PostingsReport:
    return PostingsReport(**{**vars(report), **changes})


def _check_ids(records: Records, facts: Facts, *, replace: bool) -> None:
    if replace and not facts.has_ids:
        raise errors.InvalidInputError(
            "replace",
            got="postings without ids",
            expected="False",
            fix="build them with ids; here: delete by number, then add",
        )
    if records.has_ids and not facts.has_ids:
        raise errors.InvalidInputError(
            "records to add",
            got="records with ids",
            expected="records alone: these postings were built without ids",
            fix="leave the ids out, or build the postings with them",
        )


def _replace(draft: Draft, segment: SegmentFacts, *, replace: bool) -> int:
    """Deletes records of the ids of a new segment that segments before it have: how many. Raises
    InvalidInputError for an id that comes twice, and without `replace` for one that is there."""
    older = list(draft.segments)
    with draft.documents([segment]) as documents:
        found = list[np.ndarray]()
        for first in range(segment.first_number, segment.end_number, _IDS_AT_ONCE):
            numbers = np.arange(first, min(first + _IDS_AT_ONCE, segment.end_number))
            ids = [identifier for identifier, _ in documents.get(numbers)]
            places = draft.numbers(ids, older)
            if (places >= 0).any() and not replace:
                known = ids[int(np.flatnonzero(places >= 0)[0])]
                raise errors.InvalidInputError(
                    f"document id {known!r}",
                    got="one that the postings have",
                    expected="new ids",
                    fix="replace=True (--replace) puts the new record in the place of the old one",
                )
            found.append(places[places >= 0])
    return draft.delete(np.sort(np.concatenate(found)))


@suggests_keywords
def delete(path: str | os.PathLike[str], records: Any, *, missing_ok: bool = False) -> int:
    """Takes records out: they are found no more, and count no more in the totals, so scores of BM25
    are those of an index of the others.

    Goes through all lists of the segments that have them once, to see which terms they had. Numbers
    of other records stay; those of deleted ones are not given again.

    Args:
        records: in any collection: their ids, where the postings have ids; else their numbers. Or
            bool [n], as `espnx.Postings.search` takes ``include``, n the end of the numbers given
            so far.
        missing_ok: ids that no record has have no effect.

    Returns:
        How many were deleted; a number that was deleted before is none.

    Raises as `add`; InvalidInputError for an id or a number that no record has, and for what is
    none; nothing is deleted then.
    """
    with changing(path) as draft:
        numbers = _numbers(draft, records, missing_ok=missing_ok)
        deleted = draft.delete(numbers)
        if deleted:
            draft.publish()
        return deleted


def _numbers(draft: Draft, records: Any, *, missing_ok: bool) -> np.ndarray:
    """Ascending."""
    end = draft.facts.end_number
    if not draft.facts.has_ids:
        return np.flatnonzero(marked("numbers to delete", records, end))
    named = ids_or_mask("ids to delete", records)
    if isinstance(named, np.ndarray):
        return np.flatnonzero(marked("records to delete", named, end))
    wanted = list(dict.fromkeys(named))
    found = draft.numbers(wanted, draft.segments)
    if not missing_ok:
        require_known(wanted, found, "record", "postings have")
    return np.unique(found[found >= 0])


@suggests_keywords
def compact(
    path: str | os.PathLike[str],
    *,
    memory_bytes: int = BUILD_BYTES,
    progress: Progress | None = None,
) -> PostingsReport | None:
    """Merges all segments into one, without what was deleted. Numbers of records stay.

    Returns:
        What was written; None where nothing was to be done.

    Raises as `add`. A weight in one byte is rounded to the steps of the merged list, if these are
    coarser than its own were.
    """
    memory_bytes = plain(memory_bytes)
    check_whole("memory_bytes", memory_bytes, 1 << 20)
    with errors.while_compacting(), changing(path) as draft:
        if len(draft.segments) <= 1 and draft.deletions.n_present == 0:
            return None
        segment = draft.merge(0, len(draft.segments), memory_bytes=memory_bytes, progress=progress)
        report = report_of(draft.engine, draft.directory, draft.facts, segment, draft.rounding)
        draft.publish()
        warn_of_rounding(draft.directory, draft.rounding, stacklevel=2)
        return _with(report, n_segments=1)


__all__ = ["add", "compact", "delete"]
