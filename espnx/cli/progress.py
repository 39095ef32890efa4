"""Progress on standard error: a bar with rate and time left on a terminal (rich), a line now and
then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

_PLAIN_EVERY_S = 10.0


class ProgressLine:
    """Shows one phase at a time; a context manager.

    Args:
        is_terse: nothing is said where there is no terminal: for commands that are over in a
            moment.
    """

    def __init__(self, *, is_terse: bool = False) -> None:
        self._is_terse = is_terse
        self._bar: Any = None
        self._task: Any = None
        self._phase = self._line = self._printed = ""
        self._begun = self._last = time.monotonic()
        self._first_done = 0

    def __enter__(self) -> ProgressLine:
        if sys.stderr.isatty():
            try:
                self._bar = _make_bar()
            except ImportError:
                return self
            self._bar.start()
        return self

    def say(self, text: str) -> None:
        """A sentence beside the bar."""
        print(text, file=sys.stderr)

    @contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Says what takes the time before there is anything to count."""
        if self._bar is None:
            if not self._is_terse:
                print(f"loading {what} ...", file=sys.stderr, flush=True)
            yield
            return
        task = self._bar.add_task(f"loading {what}", total=None, shown="")
        try:
            yield
        finally:
            self._bar.remove_task(task)

    def update(self, phase: str, done: int, total: int | None) -> None:
        """`total` None: not known. The first call of a phase says where it begins: what is done
        then counts in no rate."""
        now = time.monotonic()
        if total is not None:
            # lines of a file were counted, and a document may have several
            total = max(done, total)
        if phase != self._phase:
            self._end_phase()
            self._phase, self._begun, self._last, self._first_done = (
                phase,
                now,
                now - _PLAIN_EVERY_S,
                done,
            )
            if self._bar is not None:
                self._task = self._bar.add_task(phase, total=total, shown="", ends_at=None)
        rate = (done - self._first_done) / max(now - self._begun, 1e-9)
        if self._bar is not None:
            shown = _rate(rate) if total is not None else f"{done:,}  {_rate(rate)}"
            ends_at = now + (total - done) / rate if total and rate > 0 else None
            self._bar.update(self._task, completed=done, total=total, shown=shown, ends_at=ends_at)
            return
        left = (
            f", {(total - done) / rate:,.0f} s left" if total and rate > 0 and done < total else ""
        )
        known = f"{done:,} of {total:,}" if total else f"{done:,}"
        self._line = f"{phase}: {known}{', ' if rate > 0 else ''}{_rate(rate)}{left}"
        if now - self._last >= _PLAIN_EVERY_S or done == total:
            self._last = now
            self._print_line()

    def _end_phase(self) -> None:
        """What was done in the end is said, even if that is not what was expected."""
        if self._bar is None:
            self._print_line()
        elif self._task is not None:
            self._bar.stop_task(self._task)

    def _print_line(self) -> None:
        if self._line != self._printed:
            print(self._line, file=sys.stderr, flush=True)
        self._printed = self._line

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_phase()
        if self._bar is not None:
            self._bar.stop()


def _rate(rate: float) -> str:
    return "" if rate <= 0 else f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"


def _make_bar() -> Any:
    """Raises ImportError without rich."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    class Counted(ProgressColumn):
        """Another column for tasks whose end is known; a full bar would say of the others that they
        are done."""

        def __init__(self, column: ProgressColumn, otherwise: ProgressColumn | None = None):
            super().__init__()
            self._column, self._otherwise = column, otherwise

        def render(self, task: Task) -> Any:
            column = self._column if task.total is not None else self._otherwise
            return Text("") if column is None else column.render(task)

    class Left(ProgressColumn):
        """Time left, from the first piece of work on; rich's own waits for a second."""

        def render(self, task: Task) -> Any:
            ends_at = task.fields.get("ends_at")
            if ends_at is None:
                return Text("")
            return Text(f"{timedelta(seconds=max(0, round(ends_at - time.monotonic())))} left")

    return Progress(
        TextColumn("{task.description}"),
        Counted(BarColumn(), SpinnerColumn("line")),
        Counted(MofNCompleteColumn()),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
        Counted(Left()),
        console=Console(stderr=True),
    )
