"""``cuda.bindings.cufile`` itself, on a libcufile.so.0 that reads into host memory (libcufile.c):
what `CuFileStub` does in Python goes through the real bindings here, into C, and is done by threads
that know nothing of the interpreter."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from espnx.storage.gds.cufile import _PARAMS
from tests.storage.gds.cufile_stub import Controls, Rule

SOURCE = Path(__file__).with_name("libcufile.c")
#: As in libcufile.c.
FAULTS = ("none", "error", "status", "short", "never", "late", "twice", "flip", "hold")
ORDERS = ("fifo", "lifo", "random")
AFTER_CANCEL = ("works", "refused", "stale")
SETTINGS = (
    "direct",
    "driver",
    "force_compat",
    "mixed",
    "batches",
    "batch_bit",
    "few_is_error",
    "counts_opens",
    "p2p",
    "register_fails",
    "open_hangs",
    "max_batch",
    "order",
    "delay_us",
    "after_cancel",
)
_USERS, _FILES, _REGIONS, _ENTRIES, _COMPAT, _THREADS = range(6)


class _Settings(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in SETTINGS]


class _Fault(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("value", ctypes.c_int64)]


def build(folder: Path, sanitizer: str = "") -> Path:
    """Compiles the library. Skips the test where nothing compiles C, or not with the sanitizer."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        pytest.skip(f"[cufile] no C compiler ({compiler})")
    library = folder / "libcufile.so.0"
    words = ["-shared", "-fPIC", "-O1", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror"]
    if sanitizer:
        words += [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer"]
    done = subprocess.run(
        [compiler, *words, "-Wl,-soname,libcufile.so.0", "-o", str(library), str(SOURCE)],
        capture_output=True,
        text=True,
    )
    if done.returncode and sanitizer and "cannot find" in done.stderr:
        pytest.skip(f"[cufile] the compiler has no {sanitizer} sanitizer")
    assert done.returncode == 0, done.stderr
    return library


@functools.cache
def load() -> tuple[ctypes.CDLL, Any]:
    """The library and the bindings on it, once a process. Skips the test where the bindings are not
    installed, and where the real library belongs: its place cannot be given back."""
    if torch.cuda.is_available():
        pytest.skip("[cufile] a GPU is here: nothing may stand in for its library")
    try:
        from cuda.bindings import cufile
    except ImportError:
        pytest.skip("[cufile] cuda-bindings is not installed (pip install espnx[gds])")
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(
            str(build(Path(folder), os.environ.get("ESPNX_CUFILE_SANITIZER", ""))),
            mode=ctypes.RTLD_GLOBAL,
        )
    library.standin_begin.restype = ctypes.c_void_p
    library.standin_begin.argtypes = [ctypes.c_uint64]
    for name in ("end", "lock", "unlock", "release"):
        getattr(library, f"standin_{name}").argtypes = [ctypes.c_void_p]
    library.standin_enter.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Settings), ctypes.c_int]
    library.standin_faults.argtypes = [ctypes.POINTER(_Fault), ctypes.c_uint]
    library.standin_use.argtypes = library.standin_count.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.standin_violations.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    if cufile.get_version() != 1150:
        pytest.skip("[cufile] the bindings found another libcufile first")
    return library, cufile


class CuFileLibrary(Controls):
    """The module.

    Attributes:
        open_hangs: opening the driver does not return before `release`.
        delay_us: up to this much time passes before a read of a batch is made, drawn from the seed.
    """

    shows_errno = False

    def __init__(self, *, seed: int = 0, **options: Any):
        super().__init__(**options)
        self._library, self._bindings = load()
        self.cuFileError = self._bindings.cuFileError
        self.open_hangs = False
        self.delay_us = 200 if self.order == "random" else 0
        self._world = self._library.standin_begin(seed)
        # Not when the process ends: threads may still be in it then.
        weakref.finalize(self, _end, self._library, self._world, os.getpid()).atexit = False

    def _call(
        self,
        name: str,
        *arguments: Any,
        noted: tuple[int, ...] | None = None,
        reads: Sequence[tuple[int, int]] = (),
    ) -> Any:
        """A call of the bindings; `reads`: (offset, size) of what it asks for."""
        code = self.noted(name, *(arguments if noted is None else noted))
        words = {"order": ORDERS, "after_cancel": AFTER_CANCEL}
        values = [
            words[name].index(getattr(self, name)) if name in words else int(getattr(self, name))
            for name in SETTINGS
        ]
        self._library.standin_enter(self._world, _Settings(*values), code)
        rules = [] if code else [self.rule_of(offset, size) for offset, size in reads]
        faults = (_Fault * len(rules))(*map(_fault, rules))
        self._library.standin_faults(faults, len(rules))
        try:
            return getattr(self._bindings, name)(*arguments)
        finally:
            self._library.standin_faults(None, 0)

    # --- what tests look at

    def _count(self, of: int) -> int:
        return int(self._library.standin_count(self._world, of))

    @property
    def violations(self) -> list[str]:
        text = ctypes.create_string_buffer(4096)
        self._library.standin_violations(self._world, text, len(text))
        return text.value.decode().splitlines()

    @property
    def open_count(self) -> int:
        return self._count(_USERS)

    @open_count.setter
    def open_count(self, users: int) -> None:
        self._library.standin_use(self._world, users)

    @property
    def handles(self) -> dict[int, int]:
        return dict.fromkeys(range(self._count(_FILES)), 0)

    @property
    def regions(self) -> dict[int, int]:
        return dict.fromkeys(range(self._count(_REGIONS)), 0)

    @property
    def allow_compat(self) -> bool:
        return bool(self._count(_COMPAT))

    @property
    def threads(self) -> int:
        """Of its own that are running."""
        return self._count(_THREADS)

    @property
    @contextmanager
    def changed(self) -> Iterator[None]:
        """Nothing moves in the library meanwhile."""
        self._library.standin_lock(self._world)
        try:
            yield
        finally:
            self._library.standin_unlock(self._world)

    def busy(self) -> int:
        return self._count(_ENTRIES)

    def release(self) -> None:
        """Lets go of everything that was held back."""
        self.open_hangs = False
        for rule in self.rules:
            if rule.fault in ("never", "hold"):
                rule.fault = "none"
        self._library.standin_release(self._world)

    # --- the module's functions

    def get_version(self) -> int:
        return int(self._bindings.get_version())

    def op_status_error(self, code: int) -> Any:
        return self._bindings.op_status_error(code)

    def set_parameter_bool(self, which: int, value: bool) -> None:
        self._call("set_parameter_bool", which, value)

    def get_parameter_bool(self, which: int) -> bool:
        return bool(self._call("get_parameter_bool", which))

    def driver_open(self) -> None:
        self._call("driver_open")

    def driver_close(self) -> None:
        self._call("driver_close")

    def driver_get_properties(self, pointer: int) -> None:
        self._call("driver_get_properties", pointer)

    def get_stats_level(self) -> int:
        if not self.statistics:
            raise RuntimeError("function cuFileGetStatsLevel is not found")
        return int(self._call("get_stats_level"))

    def set_stats_level(self, level: int) -> None:
        self._call("set_stats_level", level)

    def stats_start(self) -> None:
        self._call("stats_start")

    def stats_stop(self) -> None:
        self._call("stats_stop")

    def get_stats_l1(self, pointer: int) -> None:
        self._call("get_stats_l1", pointer)

    def handle_register(self, descriptor: int) -> int:
        return int(self._call("handle_register", descriptor))

    def handle_deregister(self, handle: int) -> None:
        self._call("handle_deregister", handle)

    def buf_register(self, pointer: int, size: int, flags: int) -> None:
        self._call("buf_register", pointer, size, flags)

    def buf_deregister(self, pointer: int) -> None:
        self._call("buf_deregister", pointer)

    def read(self, handle: int, base: int, size: int, file_offset: int, base_offset: int) -> Any:
        return self._call(
            "read",
            handle,
            base,
            size,
            file_offset,
            base_offset,
            noted=(handle, size, file_offset),
            reads=[(file_offset, size)],
        )

    def batch_io_set_up(self, capacity: int) -> int:
        return int(self._call("batch_io_set_up", capacity))

    def batch_io_submit(self, number: int, count: int, pointer: int, flags: int) -> None:
        raw = np.frombuffer((ctypes.c_char * (64 * count)).from_address(pointer), dtype=_PARAMS)
        reads = [(int(p["file_offset"]), int(p["size"])) for p in raw] if self.batches else []
        self._call(
            "batch_io_submit", number, count, pointer, flags, noted=(number, count), reads=reads
        )

    def batch_io_get_status(
        self, number: int, least: int, count_pointer: int, events_pointer: int, timeout_pointer: int
    ) -> None:
        self._call(
            "batch_io_get_status", number, least, count_pointer, events_pointer, timeout_pointer
        )

    def batch_io_cancel(self, number: int) -> None:
        self._call("batch_io_cancel", number)

    def batch_io_destroy(self, number: int) -> None:
        self._call("batch_io_destroy", number)


def _end(library: ctypes.CDLL, world: int, process: int) -> None:
    if process == os.getpid():  # a forked child has none of its threads
        library.standin_end(world)


def _fault(rule: Rule | None) -> _Fault:
    return _Fault(0, 0) if rule is None else _Fault(FAULTS.index(rule.fault), rule.value)
