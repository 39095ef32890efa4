"""Passages that are read while it is still being found out which of them a prompt will have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from ..retrieval.search.known import KnownCandidates, OnCandidates
from ..threads import join
from .prompt import Counter, body_of, label_of


class Prefetch(Protocol):
    """Reads of passages that a prompt may have, as `PassageKV.prefetch` returns them."""

    def want(self, passages: Sequence[Sequence[int]]) -> object:
        """The passages that are likely now, as token ids, the likeliest first."""
        ...

    def cancel(self) -> None:
        """Ends them, unless a prompt has taken them."""
        ...


class EarlyPassages:
    """Begins to read what a search knows after each of its steps. A context manager.

    Searches must not wait: a thread turns texts into tokens and starts the reads, always for what
    is newest. It ends with `finish`, or with the context; whoever is interrupted does not wait for
    it: it may wait for a read.

    Args:
        start: begins with no passages; None: nothing is read.
        counter: of the prompt.
        passage_tokens: of one passage, at most.
        also: is told the same.
    """

    def __init__(
        self,
        start: Callable[[], Prefetch] | None,
        counter: Counter,
        passage_tokens: int,
        also: OnCandidates | None = None,
    ):
        self._start, self._counter, self._tokens = start, counter, passage_tokens
        self._also, self._changed = also, threading.Condition()
        self._texts: list[str] | None = None  # the newest that nobody has worked on
        self._is_over = self._is_abandoned = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._prefetch: Prefetch | None = None

    @property
    def told(self) -> OnCandidates | None:
        """What `Index.search(on_candidates=)` is given."""
        return self._also if self._start is None else self._tell

    def _tell(self, known: KnownCandidates) -> None:
        with self._changed:
            self._texts = [text for _, text in known.documents if text.strip()]
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="espnx-early", daemon=True)
                self._thread.start()
            self._changed.notify()
        if self._also is not None:
            self._also(known)

    def _work(self) -> None:
        try:
            self._want_newest()
        finally:
            if self._is_abandoned:
                self._cancel()

    def _want_newest(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._texts is not None)
                texts, self._texts = self._texts, None
                if texts is None or self._is_abandoned:
                    return
            try:
                self._want(texts)
            except BaseException as error:  # raised where the search was asked for
                self._error = error
                return

    def _want(self, texts: Sequence[str]) -> None:
        passages = list[Sequence[int]]()
        for number, text in enumerate(texts, 1):
            body, _ = body_of(self._counter, text, self._tokens)
            for piece in (label_of(self._counter, number), body):
                passages.append(getattr(piece, "ids", ()))
        if self._prefetch is None and self._start is not None:
            self._prefetch = self._start()
        if self._prefetch is not None and not self._is_abandoned:
            self._prefetch.want(passages)

    def finish(self) -> Prefetch | None:
        """The search is over: the reads, for the prompt that is composed; None: there are none.
        Raises what starting them raised."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        if self._thread is not None:
            join(self._thread)
        if self._error is not None:
            raise self._error
        return self._prefetch

    def __enter__(self) -> Self:
        return self

    def _cancel(self) -> None:
        if self._prefetch is not None:
            self._prefetch.cancel()

    def __exit__(self, *error: Any) -> None:
        if isinstance(error[1], Exception | None):
            try:
                self.finish()
            except BaseException as raised:
                if error[0] is None or raised is not self._error:  # as Ctrl-C
                    raise
            finally:
                self._cancel()
            return
        with self._changed:
            self._is_over = self._is_abandoned = True
            self._changed.notify()
        self._cancel()  # the thread does the same at its end: it may be making it now
