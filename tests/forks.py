"""Processes that tests kill at any moment they like. They are forked from one that has imported
everything and started no thread, and not from the test process itself, whose threads a child would
not have.

A module of jobs says in `PACKAGES` what its jobs import, and in `jobs` what it prepares before it
calls `serve`; tests open it with `forks`. The processes of all modules are forked from one, for all
processes of a parallel run, that imports what any of them needs: once, when the first of them is
asked for.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
#: Says who connects in place of a module's name, and is no module's.
STAY = "."
NOBODY_S = 60.0  # that who has begun it may take to connect


def killed_at(owner: Any, name: str, nth: int, after: bool) -> None:
    """This process is gone, as by kill -9, before or after the nth call of a function."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return original(*args, **options)
        finally:  # whether it succeeded or not
            if calls == nth:
                os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, call)


def load(*packages: str) -> None:
    """Imports whole packages, so that no child has to."""
    # of torch, which tests/conftest.py must not import before it has set how threads wait
    from espnx.ops._native import load_ops

    for package in packages:
        path = importlib.import_module(package).__path__
        for found in pkgutil.walk_packages(path, package + "."):
            importlib.import_module(found.name)
    load_ops()


def serve(run: Callable[[dict[str, Any]], int]) -> None:
    """Reads one JSON job a line from standard input and answers with one line: the process id of a
    new child, which runs the job and exits with what `run` returns, or the exit code of an old
    one."""
    gc.collect()
    # what has been imported is garbage of no child, and none gets a copy of it because it looked
    gc.freeze()
    # a shell that starts its children in the background has it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            _, status = os.waitpid(job["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        child = os.fork()
        if child == 0:
            code = 99
            try:
                code = run(job)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(child, flush=True)


def command_line(job: dict[str, Any]) -> int:
    """`espnx` with the words of the job's "argv", what it says going to the files "stdout" and
    "stderr"."""
    from espnx.cli.main import main

    with open(job["stdout"], "w") as sys.stdout, open(job["stderr"], "w") as sys.stderr:
        return main(job["argv"])


def forking() -> BaseContext:
    """Of `multiprocessing`, in place of "spawn": children of one process for all tests, which has
    imported what checks of devices need and started no thread."""
    context = get_context("forkserver")
    context.set_forkserver_preload(
        [
            "espnx.integrations.device_checks",
            "transformers.models.llama.modeling_llama",
            "faiss",
            "pytest",  # of modules of tests, which children import
        ]
    )
    return context


class Forks:
    """The tests' end."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def _ask(self, job: dict[str, Any]) -> int:
        self._stream.write(json.dumps(job, default=str) + "\n")
        self._stream.flush()
        return int(self._stream.readline())

    def start(self, **job: Any) -> int:
        """The new child's process id."""
        return self._ask(job)

    def wait(self, child: int) -> int:
        """Exit code, negative for a signal."""
        return self._ask({"wait": child})

    def run(self, **job: Any) -> int:
        """Exit code of a job that has ended."""
        return self.wait(self.start(**job))


def is_running(child: int) -> bool:
    """Of a child that nobody has waited for: it has not ended."""
    return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def serve_modules(listening: socket.socket) -> None:
    """Forks a process for each connection that names a module, which has the connection in place of
    its standard input and output and runs the module's jobs. Those that say `STAY` are answered,
    and kept: with the last of them this process ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how such a process ended
    staying = list[socket.socket]()
    while True:
        ready, _, _ = select.select([listening, *staying], [], [], None if staying else NOBODY_S)
        if not ready:
            return
        for each in staying[:]:
            if each in ready:  # nothing comes from them but the end
                staying.remove(each)
                each.close()
                if not staying:
                    return
        if listening not in ready:
            continue
        connection, _ = listening.accept()
        # to the end of the line, and not a byte of the jobs after it
        name = connection.makefile("rb", buffering=0).readline().decode().strip()
        if name == STAY:
            connection.sendall(b"yes\n")
            staying.append(connection)
            continue
        with connection:
            try:
                module = importlib.import_module(name)
                load(*module.PACKAGES)
            except Exception:  # those who want another module are served all the same
                traceback.print_exc()
                continue
            gc.collect()
            gc.freeze()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                for each in staying:
                    each.close()
                os.dup2(connection.fileno(), 0)
                os.dup2(connection.fileno(), 1)
                connection.close()
                module.jobs()
                os._exit(0)


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


@contextmanager
def serving(path: Path) -> Iterator[None]:
    """A process that serves modules there, to the end: one that another process of the same run has
    begun, or a new one."""

    def stay() -> socket.socket | None:
        with suppress(OSError):
            connection = connected(path)
            connection.sendall(f"{STAY}\n".encode())
            if connection.recv(4):
                return connection
            connection.close()
        return None

    process = None
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (connection := stay()) is None:
            path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(path))
                listening.listen()
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.forks", str(listening.fileno())],
                    cwd=ROOT,
                    env=os.environ | {"PYTHONPATH": str(ROOT)},
                    pass_fds=[listening.fileno()],
                )
            connection = stay()
    assert connection is not None, "the process that is to serve modules has ended"
    with connection:
        yield
    if process is not None:
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            process.returncode = 0  # it is another's now


@contextmanager
def forks(folder: Path) -> Iterator[Callable[[str], Forks]]:
    """What opens children of a module, by its name. `folder`: that all processes of a run share, as
    they share the one that imports."""
    with ExitStack() as stack:
        path = folder / "modules"
        stack.enter_context(serving(path))

        def open_module(module: str) -> Forks:
            with connected(path) as connection:
                stream = stack.enter_context(connection.makefile("rw"))
            stream.write(f"{module}\n")
            return Forks(stream)

        yield open_module


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        serve_modules(listening)
