"""A random program on a device for rows: thousands of calls, each with what must come of it. Small
shapes prevail, so that there are many; the others go to 16 sequences, 16 heads and 100,000 rows.
The program follows from its seed and from what the device offers: what it finds, it finds again.
"""

from __future__ import annotations

import gc
import math
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import torch

from ... import errors
from ...ops.attention import Queries, RowsInMemory
from ..interface import RowDevice
from ..row_layout import RowLayout
from .draws import FEW_VALUES, SEQUENCES, Draws, Kind
from .known_rows import Kept, Seen, ShownRows, assert_right, draw, kept, queries
from .requirement import require

#: Of one life of a device: calls, segments of each kind of rows, tickets in line.
_LIFE_CALLS, _SEGMENTS, _TICKETS = 500, 12, 4


def soak(
    open_rows: Callable[..., RowDevice],
    *,
    seconds: float = math.inf,
    calls: float = math.inf,
    seed: int = 0,
    said: Callable[[Counter[str]], None] = lambda calls: None,
    is_alone: bool = True,
) -> Counter[str]:
    """Runs a program until so many seconds are over, or so many calls are made, and a device is
    closed.

    Args:
        open_rows: of `NearStorageDevice`; it is opened anew after some hundred calls.
        said: is told now and then how many calls have come back.
        is_alone: nothing else in this process opens files meanwhile, so that those which are left
            open are counted.

    Returns how many of each kind were made. Raises NotConformingError, which names the call and the
    seed.
    """
    made, draws, values = Counter[str](), random.Random(seed), torch.Generator().manual_seed(seed)
    ends, lives, first_files = time.monotonic() + seconds, 0, 0
    while time.monotonic() < ends and made.total() < calls:
        options = {"read_ahead_bytes": draws.choice((1, 1 << 20, 48 << 20))}
        with _in_words(made, seed):
            rows = open_rows(**options)
            try:
                _Life(rows, draws, values, made, said).run(
                    min(calls, made.total() + _LIFE_CALLS), ends
                )
            finally:
                rows.close()
        lives += 1
        if is_alone:
            first_files = first_files or _open_files()
            most = first_files + max(2, lives // 2)  # something may be opened later, once for all
            if _open_files() > most:
                gc.collect()  # what nobody holds any more is open still
            count = _open_files()
            require(
                count <= most,
                f"files that are open after {lives} devices were closed",
                got=count,
                expected=first_files,
            )
    return made


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def _in_words(made: Counter[str], seed: int) -> Iterator[None]:
    """Says of what goes wrong inside which call it was."""
    try:
        yield
    except errors.PathUnavailableError:
        raise  # of hardware that is not there
    except Exception as error:
        where = f"call {made.total():,} of a soak with seed {seed}"
        if isinstance(error, errors.NotConformingError):
            raise errors.NotConformingError(
                f"{where}: {error.what}", got=error.got, expected=error.expected
            ) from error
        raise errors.NotConformingError(
            where, got=f"{type(error).__name__}: {error}", expected="no error"
        ) from error


@dataclass(eq=False)
class _Look:
    """A ticket in line, and what will be asked of it: `queries`, or to be shown its rows."""

    ticket: int
    layout: RowLayout
    seen: list[Seen]
    queries: Queries | None = None
    tail: RowsInMemory | None = None


@contextmanager
def _asked_from_another_thread(rows: RowDevice) -> Iterator[None]:
    """What any thread may ask at any time."""
    done, wrong = Event(), list[Exception]()

    def ask() -> None:
        try:
            while not done.wait(0.002):
                rows.front(), rows.stats(), rows.path_report()
        except Exception as error:
            wrong.append(error)

    thread = Thread(target=ask, name="espnx soak", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    for error in wrong:
        raise errors.NotConformingError(
            "`front`, `stats` and `path_report` in another thread",
            got=f"{type(error).__name__}: {error}",
        )


@dataclass
class _Counters:
    """What a device's counters of bytes must say, by what it was asked so far.

    Attributes:
        stored: that segments hold now.
        put, joined: that were written; whether a device counts those of `join` is its own affair.
        asked_least, asked_most: that were read: rows that several sequences look at may be read
            once for all of them, and what nobody came for may not have been read.
    """

    stored: int = 0
    put: int = 0
    joined: int = 0
    asked_least: int = 0
    asked_most: int = 0

    def check(self, rows: RowDevice) -> None:
        """Raises NotConformingError."""
        found = rows.stats()
        require(
            found.stored_bytes == self.stored,
            "bytes stored",
            got=found.stored_bytes,
            expected=self.stored,
        )
        for name, least, most in (
            ("bytes_written", self.put, self.put + self.joined),
            ("bytes_asked", self.asked_least, self.asked_most),
        ):
            counted = getattr(found, name)
            require(
                least <= counted <= most,
                name,
                got=counted,
                expected=least if least == most else f"{least} to {most}",
            )


class _Life:
    """A device from its opening to its end."""

    def __init__(
        self,
        rows: RowDevice,
        draws: random.Random,
        values: torch.Generator,
        made: Counter[str],
        said: Callable[[Counter[str]], None],
    ):
        self._rows, self._draws, self._values, self._made, self._said = (
            rows,
            draws,
            values,
            made,
            said,
        )
        self._drawn = Draws(rows.capabilities, draws, values)
        self._line = deque[_Look]()
        # (a result, what it was)
        self._results = deque[tuple[torch.Tensor, torch.Tensor]](maxlen=6)
        self._bytes = _Counters()
        self._kinds = [self._drawn.kind() for _ in range(3)]

    def run(self, calls: float, ends: float) -> None:
        steps: dict[Callable[[], None], int] = {
            self._ask: 50, self._serve: 52, self._put_rows: 8, self._release: 6, self._join: 2,
            self._show_unseen: 1, self._wait: 1, self._forget: 1,
        }  # fmt: skip
        with _asked_from_another_thread(self._rows):
            while self._made.total() < calls and time.monotonic() < ends:
                (step,) = self._draws.choices(list(steps), list(steps.values()))
                step()
            self._end()

    def _end(self) -> None:
        """Everything that is stored is looked at once at least, and given back."""
        while self._line:
            self._serve()
        for kind in self._kinds:
            self._show_whole(kind)
            for part in kind.stored:
                while part:
                    self._let_go(part, part[-1])
        self._rows.flush()
        self._bytes.check(self._rows)

    def _call(self, name: str) -> None:
        self._made[name] += 1
        self._said(self._made)

    # --- rows come and go ---

    def _put_rows(self) -> None:
        kind = self._draws.choice(self._kinds)
        while sum(map(len, kind.stored)) > _SEGMENTS * len(kind.parts):
            self._show_whole(kind)
            for part in kind.stored:
                for each in part[: len(part) // 2]:
                    self._let_go(part, each)
        n_sequences, size = self._drawn.small(SEQUENCES), self._draws.choice((1, 1, 1, 0.01, 4))
        n_rows = self._drawn.n_rows(kind, n_sequences)
        for heads, stored in zip(kind.parts, kind.stored, strict=True):
            k, v = draw(kind.layout, n_sequences, heads, n_rows, self._values)
            k *= size
            self._call("put")
            segments = self._rows.put(kind.layout, k, v, heads)
            require(
                len(segments) == n_sequences,
                "segments of a put",
                got=len(segments),
                expected=n_sequences,
            )
            facts = {(each.layout, each.heads, each.n_rows) for each in segments}
            require(
                facts == {(kind.layout, heads, n_rows)},
                "facts of segments",
                got=facts,
                expected=(kind.layout, heads, n_rows),
            )
            found = kept(kind.layout, segments, k.clone(), None if v is None else v.clone())
            for rows in (k, v):
                if rows is not None:
                    rows.fill_(torch.nan)  # they may be changed when `put` returns
            stored += found
            kind.unseen.update(found)
            size_bytes = sum(each.size_bytes for each in segments)
            self._bytes.stored += size_bytes
            self._bytes.put += size_bytes
        self._bytes.check(self._rows)

    def _join(self) -> None:
        kind = self._draws.choice(self._kinds)
        stored = self._draws.choice(kind.stored)
        whole = [
            each
            for each in stored
            if each.segment.n_rows and each.segment.n_rows % kind.layout.block_rows == 0
        ]
        parts = self._draws.sample(
            whole, min(len(whole), self._draws.randint(1, 3))
        ) + self._draws.sample(stored, min(len(stored), 1))
        if (
            len(set(parts)) < 2
            or len(set(parts)) < len(parts)
            or sum(each.k.numel() for each in parts) > 4 * FEW_VALUES
        ):
            return
        self._call("join")
        joined = self._rows.join([each.segment for each in parts])
        found = Kept(
            joined,
            *(torch.cat([getattr(each, name) for each in parts], dim=1) for name in ("k", "v")),
        )
        require(
            joined.n_rows == found.k.shape[1],
            "rows of joined segments",
            got=joined.n_rows,
            expected=found.k.shape[1],
        )
        stored.append(found)
        kind.unseen.add(found)
        self._bytes.stored += joined.size_bytes
        self._bytes.joined += joined.size_bytes
        self._bytes.check(self._rows)

    def _release(self) -> None:
        kind = self._draws.choice(self._kinds)
        stored, busy = (
            self._draws.choice(kind.stored),
            {seen.kept for look in self._line for seen in look.seen},
        )
        free = [each for each in stored if each not in busy and each not in kind.unseen]
        if free:
            self._let_go(stored, self._draws.choice(free))
            self._bytes.check(self._rows)

    def _let_go(self, stored: list[Kept], each: Kept) -> None:
        self._call("release")
        self._rows.release(each.segment)
        stored.remove(each)
        self._bytes.stored -= each.segment.size_bytes

    def _wait(self) -> None:
        self._call("flush")
        (self._rows.sync if self._draws.random() < 0.1 else self._rows.flush)()
        for kind in self._kinds:
            require(
                all(self._rows.is_written(each.segment) for part in kind.stored for each in part),
                "is_written after a flush",
                got=False,
            )

    # --- rows are looked at ---

    def _ask(self) -> None:
        if len(self._line) >= _TICKETS:
            return
        kind, draws = self._draws.choice(self._kinds), self._draws
        n_sequences = self._drawn.small(SEQUENCES)
        n = draws.choice((1, 1, 1, 1, 1, 1, 2, 2, 3, 4, 8, 0))
        seen, positions = self._drawn.views(kind, n_sequences)
        look = queries(
            kind.layout,
            n_sequences,
            kind.n_heads,
            n,
            self._values,
            **self._drawn.masks(kind, n_sequences, n, positions + 24),
        )
        look.q.mul_(draws.choice((1, 1, 1, 1, 0.1, 3)))
        tail = self._drawn.tail(kind, n_sequences, positions) if draws.random() < 0.4 else None
        is_visit = draws.random() < 0.2 or self._rows.capabilities.lacks(look, kind.layout)
        self._ahead(kind.layout, seen, *(() if is_visit else (look, tail)))

    def _ahead(self, layout: RowLayout, seen: list[Seen], *asked: Any) -> None:
        self._call("ahead")
        ticket = self._rows.ahead(layout, [each.use for each in seen])
        require(
            ticket >= 0 and all(ticket != each.ticket for each in self._line),
            "a ticket",
            got=ticket,
            expected="a new one",
        )
        self._line.append(_Look(ticket, layout, seen, *asked))
        # Rows that several sequences look at may be read once for all of them.
        sizes = [
            len(each.use.segment.heads) * layout.blocks(each.use.n_rows) * layout.block_bytes
            for each in seen
        ]
        self._bytes.asked_most += sum(sizes)

    def _serve(self) -> None:
        if not self._line:
            return
        look, front = self._line[0], self._rows.front()
        require(front == look.ticket, "the ticket in front", got=front, expected=look.ticket)
        if look.queries is None:
            self._visit(look)
        else:
            self._attend(look, look.queries)
        used = dict[Kept, int]()
        for each in look.seen:
            used[each.kept] = max(used.get(each.kept, 0), each.use.n_rows)
        for each_kept, n in used.items():
            self._bytes.asked_least += (
                len(each_kept.segment.heads) * look.layout.blocks(n) * look.layout.block_bytes
            )
        self._line.popleft()
        front, expected = self._rows.front(), self._line[0].ticket if self._line else -1
        require(
            front == expected,
            "the ticket in front after one was served",
            got=front,
            expected=expected,
        )
        self._bytes.check(self._rows)

    def _visit(self, look: _Look) -> None:
        shown = ShownRows(look.layout, look.seen)
        self._call("visit")
        self._rows.visit(look.ticket, shown.show)
        shown.finish()
        for kind in self._kinds:
            kind.unseen -= {
                each.kept for each in look.seen if each.use.n_rows == each.use.segment.n_rows
            }

    def _attend(self, look: _Look, asked: Queries) -> None:
        q = asked.q.clone()
        self._call("attend")
        o, lse = self._rows.attend(look.ticket, asked, look.tail)
        require(
            torch.equal(asked.q, q),
            "queries that `attend` was given",
            got="other values when it returned",
        )
        for result, was in self._results:
            require(
                torch.equal(result, was), "an earlier result", got="other values after a later call"
            )
        assert_right((o, lse), look.seen, asked, look.tail, self._rows.capabilities.exchanges)
        self._results += [(o, o.clone()), (lse, lse.clone())]

    def _show_unseen(self) -> None:
        self._show_whole(self._draws.choice(self._kinds))

    def _show_whole(self, kind: Kind) -> None:
        """Whatever no visit has shown whole yet; what is in line goes first."""
        unseen = [each for part in kind.stored for each in part if each in kind.unseen]
        if unseen:
            self._ahead(kind.layout, [each.use(sequence) for sequence, each in enumerate(unseen)])
        while self._line:
            self._serve()

    def _forget(self) -> None:
        self._call("forget")
        self._rows.forget()
        self._line.clear()
        require(
            self._rows.front() == -1,
            "the ticket in front after `forget`",
            got=self._rows.front(),
            expected=-1,
        )
