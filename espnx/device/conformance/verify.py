"""Runs checks on a device in a process of its own, which is ended where a check does not end: there
is a result whatever a device does."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from typing import Any

from ... import errors
from ..near_storage import NearStorageDevice
from ..registry import is_emulated, open_device
from .requirement import Found

#: A check returns what it has to say, or None where a device does what it must, and raises
#: NotConformingError where it does not. It is given what to call now and then: its deadline begins
#: anew then.
Check = Callable[[NearStorageDevice, Callable[[], None]], Found | None]
#: Names and checks, in the order in which they are run; a function of a module, since a process of
#: its own looks it up.
Checks = Callable[[NearStorageDevice, float], Iterable[tuple[str, Check]]]

#: After so many checks without an end nothing more is asked of a device.
_HANGS = 2


@dataclass(frozen=True)
class Outcome:
    """What came of one check of one device.

    Attributes:
        check: its name.
        outcome: ``ok``, ``failed``, ``no hardware`` (what it needs is not there), or as `Found` has
            it.
        message: why.
        duration_s: that it took.
    """

    check: str
    outcome: str
    message: str
    duration_s: float


def verify(
    name: str,
    path: str,
    checks: Checks,
    *,
    soak_s: float,
    deadline_s: float,
    said: Callable[[int, int], None],
) -> Iterator[Outcome]:
    """Every check of a device, as they end: one that fails says nothing about the next, and one
    that does not end, or ends the process, neither.

    Args:
        name: of the device, as `espnx.device.open` takes it. An emulated one is not waited for.
        path: a directory below which it may write; nothing stays there.
        checks: what is run.
        soak_s: for `checks`.
        deadline_s: of each check.
        said: how many are done, of how many.

    Raises what opening the device does.
    """
    done = list[str]()
    hangs = 0
    while True:
        with tempfile.TemporaryDirectory(
            prefix=".espnx-verify-", dir=path, ignore_cleanup_errors=True
        ) as directory:
            child = _Child(name, directory, checks, soak_s, done)
            try:
                for outcome in child.outcomes(deadline_s, said, len(done)):
                    done.append(outcome.check)
                    yield outcome
            finally:
                child.kill()
        if child.is_finished:
            return
        hangs += child.has_hung
        if hangs == _HANGS or not child.begun:
            for each in child.names:
                if each not in done:
                    yield Outcome(
                        each, "failed", f"not begun: {_HANGS} checks before it did not end", 0.0
                    )
            return


class _Child:
    """The process: what it says is (``checks``, names), (``begin``, name), (``lives``), (``end``,
    name, outcome, message, duration), (``raised``, the error that opening raised), or that it has
    ``finished``."""

    def __init__(self, name: str, directory: str, checks: Checks, soak_s: float, done: list[str]):
        self.names, self.begun, self.has_hung, self.is_finished = list[str](), "", False, False
        context = get_context("spawn")
        self._said, theirs = context.Pipe(duplex=False)
        with tempfile.NamedTemporaryFile(prefix="espnx-stacks-", delete=False) as file:
            self._stacks_path = file.name
        arguments = (theirs, self._stacks_path, name, directory, checks, soak_s, list(done))
        self._process = context.Process(
            target=_run, args=arguments, name=f"espnx device verify {name}", daemon=True
        )
        self._process.start()
        theirs.close()

    def outcomes(
        self, deadline_s: float, said: Callable[[int, int], None], n_done: int
    ) -> Iterator[Outcome]:
        began = time.monotonic()
        while True:
            try:
                # before the first it imports torch
                is_there = self._said.poll(max(deadline_s, 60.0) if not self.begun else deadline_s)
                kind, *facts = self._said.recv() if is_there else ("hangs",)
            except EOFError:
                kind, facts = "died", []
            if kind == "checks":
                (self.names,) = facts
            elif kind == "begin":
                (self.begun,), began = facts, time.monotonic()
                said(n_done, len(self.names))
            elif kind == "lives":
                said(n_done, len(self.names))
            elif kind == "end":
                n_done += 1
                yield Outcome(*facts)
            elif kind == "raised":
                raise facts[0]
            elif kind == "finished":
                self.is_finished = True
                return
            else:
                self.has_hung = kind == "hangs"
                yield Outcome(
                    self.begun or "opening it",
                    "failed",
                    self._end_in_words(deadline_s),
                    time.monotonic() - began,
                )
                return

    def _end_in_words(self, deadline_s: float) -> str:
        if not self.has_hung:
            self._process.join(10)
            code = self._process.exitcode
            how = (
                signal.Signals(-code).name
                if code is not None and code < 0
                else f"exit status {code}"
            )
            return f"the process has ended: {how}"
        return (
            f"no end after {deadline_s:g} s; it stands in "
            f"{self._where() or 'a place that does not tell'}"
        )

    def _where(self) -> str:
        """The innermost lines of Python that the check has come to, from the process's own
        stacks."""
        if self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGUSR1)
        for _ in range(50):
            time.sleep(0.02)
            with open(self._stacks_path, encoding="utf-8", errors="replace") as file:
                stacks = file.read().strip().split("\n\n")
            if stacks[-1]:
                break
        # The main thread's is the last.
        lines = [line.strip() for line in stacks[-1].splitlines() if line.startswith("  File ")]
        return ", called from ".join(line.removeprefix("File ") for line in lines[:3])

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._said.close()
        os.unlink(self._stacks_path)


def _run(
    said: connection.Connection,
    stacks: str,
    name: str,
    directory: str,
    checks: Checks,
    soak_s: float,
    done: list[str],
) -> None:
    """Runs the checks in a process of their own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.dup2(2, 1)  # standard output is the parent's, for its result
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(stacks, "w", encoding="utf-8") as file:
        faulthandler.register(signal.SIGUSR1, file)
        try:
            device = open_device(name, directory, **({"stretch": 0} if is_emulated(name) else {}))
        except errors.EspnxError as error:
            said.send(("raised", _Portable(error)))
            return
        try:
            every = list(checks(device, soak_s))
            said.send(("checks", [what for what, _ in every]))
            for what, check in every:
                if what not in done:
                    said.send(("begin", what))
                    began = time.monotonic()
                    outcome, message = _outcome(check, device, lambda: said.send(("lives",)))
                    said.send(("end", what, outcome, message, time.monotonic() - began))
        finally:
            device.close()
        said.send(("finished",))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


class _Portable:
    """An error on its way to another process. Errors of espnx are made of named arguments, which
    pickle does not know of."""

    def __init__(self, error: errors.EspnxError):
        self._kind, self._facts, self._message = type(error), dict(vars(error)), error.args

    def __reduce__(self) -> Any:
        return _made_again, (self._kind, self._facts, self._message)


def _made_again(
    kind: type[errors.EspnxError], facts: dict[str, Any], message: tuple[Any, ...]
) -> errors.EspnxError:
    error = kind.__new__(kind)
    error.args = message
    vars(error).update(facts)
    return error


def _outcome(check: Check, device: NearStorageDevice, lives: Callable[[], None]) -> tuple[str, str]:
    try:
        found = check(device, lives)
    except errors.NotConformingError as error:
        return "failed", " ".join(str(error).split())
    except errors.PathUnavailableError as error:
        return "no hardware", " ".join(str(error).split())
    except Exception as error:
        return "failed", " ".join(f"{type(error).__name__}: {error}".split())
    finally:
        sys.stdout.flush()
    return ("ok", "") if found is None else (found.outcome, found.message)
