"""Progress on standard error: a bar with rate and time left on a terminal (rich), a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_PLAIN_EVERY_S = 10.0


class ProgressLine:
    """Shows one phase at a time; a context manager."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._phase = ""
        self._begun = self._last = time.monotonic()
        self._first_done = 0

    def __enter__(self) -> ProgressLine:
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            except ImportError:
                return self
            rate = TextColumn("{task.fields[rate]}")
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                rate,
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
        return self

    def say(self, text: str) -> None:
        """A sentence beside the bar."""
        print(text, file=sys.stderr)

    def update(self, phase: str, done: int, total: int | None) -> None:
        """`total` None: not known."""
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._begun, self._last, self._first_done = phase, now, now - _PLAIN_EVERY_S, done
            if self._bar is not None:
                if self._task is not None:
                    self._bar.stop_task(self._task)
                self._task = self._bar.add_task(phase, total=total, rate="")
        elapsed = max(now - self._begun, 1e-9)
        rate = (done - self._first_done) / elapsed
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, rate=f"{rate:,.0f}/s")
        elif now - self._last >= _PLAIN_EVERY_S or done == total:
            self._last = now
            left = f", {(total - done) / rate:,.0f} s left" if total and rate > 0 else ""
            print(f"{phase}: {done:,}{f' of {total:,}' if total else ''}, {rate:,.0f}/s{left}", file=sys.stderr)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
