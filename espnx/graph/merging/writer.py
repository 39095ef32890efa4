"""A graph that its one writer has open: what it adds and deletes is in the log before it is
acknowledged, and in the pages after a merge."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import errors
from ...checks import check_whole, plain
from ...sizes import parse_size
from ...storage import FaultRule
from ...storage.lock import DirectoryLock
from ...storage.manifest import write_manifest
from ...storage.native import given_engine
from ...suggestions import suggests_keywords
from ..format import MAGIC, N_MAX, ROWS_MAX, GraphFacts
from ..index import GraphIndex
from ..options import stored_rows
from ..updates.log import ADD, DELETE, Change, empty_log, read_log
from ..updates.log_writer import DURABILITIES, LogWriter
from ..updates.pending import Pending
from ..updates.search import in_pages
from ..vectors import as_array
from ..write import Progress
from .measuring import measured_again
from .merge import merge_changes

#: Whether a merge measures again what searches find.
MEASURES = ("auto", "always", "never")
_PENDING_BYTES = "64MiB"
_PENDING_MIN, _MERGE_MIN = 4096, 16 << 20
_MERGE_BYTES = "1GiB"
_DEADLINE_S = 600.0


class GraphWriter(GraphIndex):
    """A graph, open for searches and for changes. One process at a time, any thread.

    Attributes:
        torn_bytes: of a change at the end of the log that was not written whole, when this was
            opened: nobody was told that it is there, and it is dropped.

    Args:
        path: the graph's directory.
        durability: when a call returns: ``each``: when its change is on the device; ``group``: the
            same, but calls of several threads wait for one synchronisation together; ``none``:
            when the operating system has it, which outlives the process and not the machine.
        pending_bytes: that additions and deletions may take in memory, as ``"64MiB"`` or in bytes;
            the call that goes beyond it merges them.
        memory: that a merge may take for vectors and codes, see `merge`.
        threads, walks, engine, code_cache_bytes, direct, rules, fault_seed: of `GraphIndex`.

    Raises:
        StoreBusyError: another writer has it.
        ForeignFileError: its log is of another graph.
        What `GraphIndex` raises; ChecksumError, FormatError: a damaged log.
    """

    @suggests_keywords
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: str = "each",
        pending_bytes: int | str = _PENDING_BYTES,
        memory: int | str = _MERGE_BYTES,
        threads: int = 2,
        walks: int = 32,
        engine: str = "auto",
        code_cache_bytes: int = 5 << 20,
        direct: bool | None = None,
        rules: Sequence[FaultRule] = (),
        fault_seed: int = 0,
    ):
        if durability not in DURABILITIES:
            raise errors.InvalidInputError(
                "durability", got=repr(durability), expected=", ".join(DURABILITIES)
            )
        self._limit_bytes, self._memory_bytes = parse_size(pending_bytes), parse_size(memory)
        check_whole("pending_bytes", self._limit_bytes, _PENDING_MIN, 1 << 40)
        check_whole("memory of a merge", self._memory_bytes, _MERGE_MIN, 1 << 50)
        self._changing = threading.RLock()
        with contextlib.ExitStack() as opened:
            if not os.path.isdir(path):
                raise errors.StoreNotFoundError("no graph is there", path=path)
            opened.enter_context(DirectoryLock(path))
            super().__init__(
                path,
                threads=threads,
                walks=walks,
                engine=engine,
                code_cache_bytes=code_cache_bytes,
                direct=direct,
                rules=rules,
                fault_seed=fault_seed,
            )
            opened.callback(super().close)
            log = read_log(self.facts)
            self.torn_bytes = log.torn_bytes
            self._durability = durability
            self._log = LogWriter(self.facts, log, durability)
            opened.callback(lambda: self._log.close())  # noqa: PLW0108 - a merge makes another
            self._log.sync_found()
            self._opened_writer = opened.pop_all()

    def add(self, vectors: Any, ids: Any = None) -> np.ndarray:
        """Adds vectors, which the next search finds.

        Args:
            vectors: [m, dim] or [dim]: as the graph's.
            ids: of each, whole numbers from 0 to 4,294,967,293 that no vector has, each once; of a
                graph of clusters that has come to more, up to twice as large. The file of rows
                takes 4 bytes (of clusters 8 or 16) for every number up to the largest, and a filter
                a bit. None: those behind the largest that there has been.

        Returns:
            int64 [m]: the ids, by which searches name them, also after merges.

        Raises:
            InvalidInputError: NaN, another dimension, values that the graph's format does not
                hold, an id that is there; nothing is added.
            WriteError, DiskFullError: of the log, nothing is added; of a merge that the call has
                begun, see `merge`: what was added stays.
        """
        rows = self._stored(vectors)
        with self._changing:
            self.check_open()
            self._log.check()
            pages, pending = self._now
            chosen = self._chosen(ids, len(rows), pending)
            if ids is not None and len(chosen):
                there = pending.places_of(chosen) >= 0
                there |= in_pages(pages, pending, chosen, _DEADLINE_S)
                if there.any():
                    raise errors.InvalidInputError(
                        "ids to add",
                        got=f"{chosen[there][0]}, which is there",
                        expected="ids that no vector has",
                        fix="delete it first",
                    )
            number = self._changed(Change(ADD, chosen, rows), pending.added(chosen, rows))
        self._log.acknowledge(number)
        self._merge_if_full()
        return chosen

    def delete(self, ids: Any) -> int:
        """Deletes vectors, which no later search finds. Returns how many.

        Args:
            ids: int64 [m], or one: each of a vector that is there, once.

        Raises:
            InvalidInputError: an id that is not there; nothing is deleted.
            WriteError, DiskFullError: see `add`.
        """
        chosen = _whole_numbers(ids)
        with self._changing:
            self.check_open()
            self._log.check()
            pages, pending = self._now
            is_there = pending.places_of(chosen) >= 0
            is_there |= in_pages(pages, pending, chosen, _DEADLINE_S)
            if not is_there.all():
                raise errors.InvalidInputError(
                    "ids to delete",
                    got=f"{chosen[~is_there][0]}, which is not there",
                    expected="ids of vectors that are there",
                )
            number = self._changed(Change(DELETE, chosen, None), pending.deleted(chosen))
        self._log.acknowledge(number)
        self._merge_if_full()
        return len(chosen)

    @suggests_keywords
    def merge(self, progress: Progress | None = None, *, measure: str = "auto") -> bool:
        """Writes what is pending into new pages, beside the old ones, which searches under way and
        other processes keep until they reload. Returns whether there was anything.

        Deleted nodes leave their neighbours' lists, which take over theirs, pruned again
        (FreshDiskANN, section 5); added ones are searched for in the old pages and linked both
        ways. Pages are read and written as a stream. Where all vectors fit in `memory`, lists are
        pruned by these, else by their codes, as FreshDiskANN does. Pages that hold several nodes
        are packed anew, so that neighbours lie together.

        Of a graph of clusters additions go to the nearest cluster, and at its border to the second,
        as the build would have it; clusters that have changed are written anew, each by itself, and
        those with more than `max_points` vectors divided.

        Args:
            measure: whether what searches find is measured again, which `recall=` goes by:
                ``auto``: where the vectors that were added or deleted since it was measured are
                more than a tenth of those that there are; ``always``, also where nothing is
                pending; ``never``: then searches by `recall=` are refused beyond that tenth.

        Raises:
            InvalidInputError: another `measure`.
            WriteError, DiskFullError: the log keeps what is pending; or, where the new pages were
                there already and could not be opened or old ones not removed, the writer takes no
                more changes: open the graph again, nothing is lost.
            What a search raises, for damaged pages.
        """
        if measure not in MEASURES:
            raise errors.InvalidInputError(
                "measure", got=repr(measure), expected=", ".join(MEASURES)
            )
        progress = progress or _no_progress
        with self._changing:
            self.check_open()
            self._log.check()
            pages, pending = self._now
            if not pending.stamp:
                if measure == "always":
                    self._measure(progress)
                return False
            try:
                merge_changes(pages, pending, self._memory_bytes, measure, progress)
                self._log.close()
                now = self._opened()
                log = LogWriter(now[0].facts, empty_log(now[0].facts), self._durability)
                log.broken = self._log.broken
                # Together: nobody reads what is added to the log of pages that are merged.
                self._now, self._log = now, log
            except BaseException as error:
                # the new pages may be there all the same: nobody reads this log any more
                if self._may_be_merged(pages.facts):
                    self._log.broken = error
                raise
            return True

    def _may_be_merged(self, facts: GraphFacts) -> bool:
        try:
            return self._is_merged(facts)
        except (errors.EspnxError, OSError):
            return True  # nobody knows

    def _measure(self, progress: Progress) -> None:
        with given_engine(None) as engine:
            facts = measured_again(engine, self.facts, progress)
            write_manifest(engine, facts.where, MAGIC, facts.version, facts.manifest())
        self._now = self._opened()

    def reload(self) -> bool:
        """Nobody else changes it: False."""
        self.check_open()
        return False

    def close(self) -> None:
        """Ends searches that are under way, and lets another writer in. A second call does
        nothing."""
        if self._is_open and os.getpid() == self._process:
            with self._changing:
                self._opened_writer.close()

    def __enter__(self) -> GraphWriter:
        return self

    def _merge_if_full(self) -> None:
        if self.pending.size_bytes > self._limit_bytes:
            self.merge()

    def _stored(self, vectors: Any) -> np.ndarray:
        """Vectors as the log and the pages have them, [m, dim]. Raises InvalidInputError."""
        facts = self.facts
        layout = facts.layout
        values = as_array(vectors)
        values = values[None] if values.ndim == 1 else values
        if values.ndim != 2 or values.shape[1] != layout.dim or values.dtype.kind not in "iuf":
            raise errors.InvalidInputError(
                "vectors to add",
                got=f"{values.dtype} {list(values.shape)}",
                expected=f"numbers [m, {layout.dim}]",
            )
        if not facts.codebook.centroids.any():
            raise errors.InvalidInputError(
                "a graph to add to",
                got="one that was built of no vectors, so that it has no codes",
                fix="build it of the first vectors",
            )
        if layout.format in ("uint8", "int8"):
            exact = values.astype(layout.row_dtype)
            if not np.array_equal(exact, values):
                raise errors.InvalidInputError(
                    "vectors to add",
                    got=str(values.dtype),
                    expected=f"values that {layout.format} holds, as the graph's",
                )
            return np.ascontiguousarray(exact)
        with np.errstate(over="ignore"):  # infinite ones are refused
            values = values.astype(np.float32)
        rows = stored_rows(values, 0, facts.metric, layout.format)
        return np.ascontiguousarray(rows, dtype=layout.row_dtype)

    def _chosen(self, ids: Any, count: int, pending: Pending) -> np.ndarray:
        most = N_MAX
        if self.facts.clusters is not None:  # no farther apart than there are many
            most = min(ROWS_MAX, max(N_MAX, 2 * pending.id_end))
        if ids is None:
            if pending.id_end + count > most:
                raise errors.InvalidInputError(
                    "ids of a graph",
                    got=f"{pending.id_end:,} that were given, and {count:,} more",
                    expected=f"at most {most:,}",
                    fix="build it again: ids begin anew",
                )
            return np.arange(pending.id_end, pending.id_end + count)
        chosen = _whole_numbers(ids)
        if len(chosen) != count or (count and chosen.max() >= most):
            raise errors.InvalidInputError(
                "ids to add",
                got=f"{len(chosen)} for {count} vectors, the largest {chosen.max(initial=0)}",
                expected=f"one for each, below {most}",
            )
        return chosen

    def _changed(self, change: Change, after: Pending) -> int:
        """Writes a change into the log, and lets searches see it. Returns its number; 0: there is
        nothing to change."""
        if not len(change.ids):
            return 0
        number = self._log.append(change)
        self._now = self._now[0], after
        return number


def _whole_numbers(ids: Any) -> np.ndarray:
    """int64 [m], each 0 or more, and once. Raises InvalidInputError."""
    try:
        found = np.atleast_1d(as_array(plain(ids) if not isinstance(ids, range) else list(ids)))
    except ValueError as error:
        raise errors.InvalidInputError(
            "ids", got=repr(ids)[:60], expected="whole numbers [m]"
        ) from error
    if not found.size:
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu" or found.min() < 0:
        raise errors.InvalidInputError(
            "ids", got=f"{found.dtype} {list(found.shape)}", expected="whole numbers [m], 0 or more"
        )
    if found.max() > np.iinfo(np.int64).max:
        raise errors.InvalidInputError("ids", got=int(found.max()), expected="64-bit ones, signed")
    if len(np.unique(found)) != len(found):
        raise errors.InvalidInputError("ids", got="some twice", expected="each once")
    return found.astype(np.int64)


def _no_progress(what: str, done: int, total: int) -> None:
    pass
