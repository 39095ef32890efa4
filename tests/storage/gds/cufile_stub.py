"""``cuda.bindings.cufile`` without a GPU: the same functions on the same C structures, reading real
files into host memory.

Entries complete when they are told to (`Rule`), their bytes arrive at that moment and not before,
and everything a caller must not do is noted in `CuFileStub.violations`: memory that is not
registered, a handle given up under a read, two submissions of one batch, a busy batch destroyed.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from espnx.errors import OutOfMemoryError
from espnx.storage.gds import cufile as d
from espnx.storage.gds.memory import Fence


class cuFileError(Exception):  # noqa: N801 - the bindings' own name
    """What the bindings raise; `status` is a CUfileOpError."""

    def __init__(self, status: int, cu_err: int | None = None):
        super().__init__(f"STUB ({status})")
        self.status, self.cuda_error = status, cu_err


@dataclass
class Rule:
    """What happens to matching entries; the first rule that matches counts.

    Attributes:
        fault: ``error`` (value = the entry's negative return), ``status`` (value = CUfileStatus_t),
            ``short`` (value = bytes moved), ``never`` (until `CuFileStub.release`), ``late`` (value
            = polls it stays pending), ``twice`` (reported in two polls), ``flip`` (value = bit),
            ``hold`` (bytes and event wait for `CuFileStub.release`, as for ``never``, but
            cancelling drops it).
        match: of the entry's file offset and size.
        nth, count: fires from the nth match on (from 1), `count` times (-1: forever).
    """

    fault: str
    value: int = 0
    match: Callable[[int, int], bool] = lambda offset, size: True
    nth: int = 1
    count: int = -1
    seen: int = 0

    def fires(self, offset: int, size: int) -> bool:
        if not self.match(offset, size):
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.count < 0 or self.seen < self.nth + self.count)


@dataclass
class Entry:
    handle: int
    pointer: int
    offset: int
    size: int
    cookie: int
    rule: Rule | None = None
    polls_left: int = 0
    reports: int = 1
    is_over: bool = False


@dataclass
class StubBatch:
    capacity: int
    waiting: list[Entry] = field(default_factory=list)
    cancelled: bool = False
    is_stale: bool = False

    def busy(self) -> bool:
        return any(not entry.is_over for entry in self.waiting)


class HostArray:
    """Memory as an object that numpy can adopt, with a reference to its owner."""

    def __init__(self, owner: object, pointer: int, size_bytes: int):
        self.owner = owner
        self.__array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


class StubFence:
    """Passed when none of its streams is busy."""

    def __init__(self, memory: HostMemory, streams: set[str]):
        self.memory, self.streams = memory, streams

    def passed(self) -> bool:
        self.memory.looks += 1
        if self.memory.looks == self.memory.done_at_look:
            self.memory.busy = set()
        return not (self.streams & self.memory.busy)


class HostMemory:
    """`DeviceMemory` in host memory.

    Attributes:
        busy: streams whose kernels have not run.
        looks, done_at_look: how often fences were asked, and at which time of these every kernel
            has run (0: never by itself).
        limit_bytes: how much there is.
    """

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.device = torch.device("cpu")
        self.limit_bytes, self.looks, self.done_at_look = limit_bytes, 0, 0
        self.threads: set[int] = set()
        self.allocated: list[torch.Tensor] = []
        self.busy: set[str] = set()
        self.streams, self.inside = threading.local(), threading.local()

    def enter_thread(self) -> None:
        self.threads.add(threading.get_ident())

    @contextmanager
    def current(self) -> Iterator[None]:
        self.inside.depth = getattr(self.inside, "depth", 0) + 1
        try:
            yield
        finally:
            self.inside.depth -= 1

    def is_current(self) -> bool:
        """Whether the device is the calling thread's current one."""
        return threading.get_ident() in self.threads or getattr(self.inside, "depth", 0) > 0

    def allocate(self, size_bytes: int) -> torch.Tensor:
        free_bytes = self.limit_bytes - sum(each.numel() for each in self.allocated)
        if size_bytes > free_bytes:
            raise OutOfMemoryError(
                "memory of the stub", needed_bytes=size_bytes, free_bytes=free_bytes
            )
        memory = torch.full((size_bytes,), 0xEE, dtype=torch.uint8)
        self.allocated.append(memory)
        return memory

    def wrap(self, owner: object, pointer: int, size_bytes: int) -> torch.Tensor:
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)

        return torch.from_numpy(np.asarray(HostArray(owner, pointer, size_bytes)))

    def settle(self) -> None:
        return

    def stream(self) -> str:
        return getattr(self.streams, "stream", "default")

    def fence(self, streams: Iterable[Any]) -> Fence:
        return StubFence(self, {*streams, self.stream()})


class Controls:
    """How a stand-in for cuFile behaves, and what it was asked: set and read by tests at any time.

    Attributes:
        direct: what the machine can do.
        driver: whether nvidia-fs is loaded; files may be of a disk that it does not serve.
        order: in which entries complete (``fifo``, ``lifo``, ``random``).
        refuse: function name -> what it fails with, always: a CUfileOpError, or an errno, as the
            bindings show them.
        passing: the same, once for each number in the list; what was asked for has not been done.
        batches: whether submitted batches are taken at all; `batch_bit`: what the feature flags say
            of that.
        few_is_error: a status call fails where fewer entries than asked for have ended in its time.
        counts_opens: whether opening the driver again makes another user of it, or an error.
        after_cancel: of what use a context is that was cancelled and has nothing outstanding:
            ``works``, ``refused`` (submissions to it), ``stale`` (what is submitted to it comes
            back cancelled).
        shows_errno: whether a call that fails with an errno is seen to fail. cuda-bindings take it
            for success, but in ``read``.
    """

    shows_errno = True

    def __init__(
        self,
        *,
        direct: bool = False,
        max_batch: int = 128,
        order: str = "fifo",
        rules: Iterable[Rule] = (),
    ):
        self.direct, self.max_batch, self.order, self.rules = direct, max_batch, order, list(rules)
        self.force_compat, self.driver = False, True
        self.statistics = True
        self.mixed = False  # every read shows up as a read through the host, too
        self.batches, self.batch_bit = True, False
        self.few_is_error, self.counts_opens, self.p2p = False, True, False
        self.after_cancel = "works"
        self.register_fails = False
        self.refuse: dict[str, int] = {}
        self.passing: dict[str, list[int]] = {}
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def noted(self, name: str, *arguments: int) -> int:
        """Notes a call; what it fails with, or 0."""
        self.calls.append((name, arguments))
        waiting = self.passing.get(name)
        return waiting.pop(0) if waiting else self.refuse.get(name, 0)

    def count(self, name: str) -> int:
        return sum(call == name for call, _ in self.calls)

    def rule_of(self, offset: int, size: int) -> Rule | None:
        """What happens to a read; each question counts as one."""
        return next((rule for rule in self.rules if rule.fires(offset, size)), None)


class CuFileStub(Controls):
    """The module, in Python."""

    cuFileError = cuFileError  # noqa: N815

    def __init__(self, *, seed: int = 0, **options: Any):
        super().__init__(**options)
        self.allow_compat = True
        self.violations: list[str] = []
        self.open_count = 0
        self.handles: dict[int, int] = {}
        self.regions: dict[int, int] = {}
        # what could not be registered; in compatibility mode it can be read into all the same
        self._without: set[int] = set()
        self._batches: dict[int, StubBatch] = {}
        self._next = 100
        self._level = 0
        self._counts = {"direct": 0, "posix": 0}
        self._random = random.Random(seed)
        self.changed = threading.Condition()

    def _note(self, name: str, *arguments: int) -> None:
        code = self.noted(name, *arguments)
        if code >= 5000:
            raise cuFileError(code)
        if code:
            raise ValueError(f"{code} is not a valid OpError")  # as the bindings do

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            self.violations.append(what)

    # --- the driver

    def get_version(self) -> int:
        return 1150

    def op_status_error(self, code: int) -> str:
        return f"stub error {code}"

    def set_parameter_bool(self, which: int, value: bool) -> None:
        self._note("set_parameter_bool", which, int(value))
        if self.open_count:
            raise cuFileError(d.DRIVER_ALREADY_OPEN)
        if which == 1:
            self.allow_compat = bool(value)

    def get_parameter_bool(self, which: int) -> bool:
        return self.force_compat if which == 2 else self.allow_compat

    def driver_open(self) -> None:
        self._note("driver_open")
        if self.open_count and not self.counts_opens:
            raise cuFileError(d.DRIVER_ALREADY_OPEN)
        if not self.allow_compat and not self.direct:
            raise cuFileError(5010)
        self.open_count += 1

    def driver_close(self) -> None:
        self._note("driver_close")
        self._require(
            not any(batch.busy() for batch in self._batches.values()), "driver closed under reads"
        )
        self.open_count -= 1
        given_up = self.open_count > 0 or {"handle_deregister", "buf_deregister"} & set(self.refuse)
        self._require(
            bool(given_up) or not (self.handles or self.regions),
            "driver closed with files or memory registered",
        )

    def driver_get_properties(self, pointer: int) -> None:
        raw = np.zeros(14, dtype=np.uint32)
        raw[0], raw[1] = (2, 26) if self.driver else (0, 0)
        raw[6], raw[7] = self.p2p << 11, self.allow_compat << 1
        raw[8] = self.batch_bit << 1
        raw[12] = self.max_batch
        ctypes.memmove(pointer, raw.ctypes.data, raw.nbytes)

    def get_stats_level(self) -> int:
        self._note("get_stats_level")
        if not self.statistics:
            raise RuntimeError("function cuFileGetStatsLevel is not found")
        return self._level

    def set_stats_level(self, level: int) -> None:
        self._level = level

    def stats_start(self) -> None:
        return

    def stats_stop(self) -> None:
        return

    def get_stats_l1(self, pointer: int) -> None:
        raw = np.zeros(64, dtype=np.uint64)
        raw[d._NVFS_AT // 8], raw[d._POSIX_AT // 8] = self._counts["direct"], self._counts["posix"]
        ctypes.memmove(pointer, raw.ctypes.data, raw.nbytes)

    # --- files and memory

    def handle_register(self, descriptor: int) -> int:
        self._note("handle_register")
        fd = ctypes.c_int32.from_address(descriptor + 8).value
        self._require(ctypes.c_int32.from_address(descriptor).value == 1, "descriptor type")
        if not self.allow_compat and not self.direct:
            raise cuFileError(5008)
        with self.changed:
            self._next += 1
            # A descriptor of its own, without O_DIRECT: the stub copies through memory that is not
            # aligned.
            self.handles[self._next] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            return self._next

    def handle_deregister(self, handle: int) -> None:
        self._note("handle_deregister", handle)
        with self.changed:
            busy = any(
                entry.handle == handle
                for batch in self._batches.values()
                for entry in batch.waiting
            )
            self._require(not busy, "handle given up under a read")
            os.close(self.handles.pop(handle))

    def buf_register(self, pointer: int, size: int, flags: int) -> None:
        self._without.add(pointer)
        self._note("buf_register", pointer, size)
        if self.register_fails:
            raise cuFileError(5036)
        self._without.remove(pointer)
        self.regions[pointer] = size

    def buf_deregister(self, pointer: int) -> None:
        self._note("buf_deregister", pointer)
        inside = (
            pointer <= e.pointer < pointer + self.regions[pointer]
            for b in self._batches.values()
            for e in b.waiting
        )
        self._require(not any(inside), "memory given up under a read")
        del self.regions[pointer]

    # --- reads

    def read(self, handle: int, base: int, size: int, file_offset: int, base_offset: int) -> int:
        self._note("read", handle, size, file_offset)
        entry = Entry(handle, self._inside(base, base_offset, size), file_offset, size, 0)
        with self.changed:
            entry.rule = self.rule_of(file_offset, size)
            if entry.rule is not None and entry.rule.fault == "never":
                self.changed.wait_for(lambda: entry.rule is None or entry.rule.fault != "never", 20)
        status, moved = self._perform(entry)
        if moved < 0 and -moved < 5000:
            raise ValueError(f"{-moved} is not a valid OpError")  # as the bindings do
        return moved if status == d.COMPLETE else -5044

    def _inside(self, base: int, base_offset: int, size: int) -> int:
        pointer = base + base_offset
        within = (
            base in self.regions and base_offset >= 0 and base_offset + size <= self.regions[base]
        )
        self._require(
            within or (base in self._without and self.allow_compat),
            f"{size} bytes at {base_offset} are not inside registered memory",
        )
        return pointer

    def batch_io_set_up(self, capacity: int) -> int:
        self._note("batch_io_set_up", capacity)
        if capacity > self.max_batch:
            raise cuFileError(5039)
        self._next += 1
        self._batches[self._next] = StubBatch(capacity)
        return self._next

    def batch_io_submit(self, number: int, count: int, pointer: int, flags: int) -> None:
        self._note("batch_io_submit", number, count)
        batch = self._batches[number]
        if not self.batches:
            raise cuFileError(5008)
        if count > batch.capacity:
            raise cuFileError(5037)
        self._require(not batch.busy(), "a batch was submitted twice")
        if batch.cancelled and self.after_cancel == "refused":
            raise cuFileError(5008)
        batch.is_stale |= batch.cancelled and self.after_cancel == "stale"
        batch.cancelled = False
        raw = np.frombuffer((ctypes.c_char * (64 * count)).from_address(pointer), dtype=d._PARAMS)
        with self.changed:
            for p in raw:
                self._require(
                    p["mode"] == 1 and p["opcode"] == 0 and int(p["handle"]) in self.handles,
                    "entry is not a read of an open file",
                )
                offset, size = int(p["file_offset"]), int(p["size"])
                entry = Entry(
                    int(p["handle"]),
                    self._inside(int(p["base"]), int(p["base_offset"]), size),
                    offset,
                    size,
                    int(p["cookie"]),
                )
                entry.rule = self.rule_of(offset, size)
                entry.polls_left = (
                    entry.rule.value if entry.rule and entry.rule.fault == "late" else 0
                )
                entry.reports = 2 if entry.rule and entry.rule.fault == "twice" else 1
                batch.waiting.append(entry)
            self.changed.notify_all()

    def batch_io_get_status(
        self, number: int, least: int, count_pointer: int, events_pointer: int, timeout_pointer: int
    ) -> None:
        self._note("batch_io_get_status", number)
        seconds, nanoseconds = (ctypes.c_int64 * 2).from_address(timeout_pointer)
        count = ctypes.c_uint32.from_address(count_pointer)
        until = time.monotonic() + seconds + nanoseconds * 1e-9
        batch = self._batches[number]
        with self.changed:
            ready = self._ready(batch)
            while len(ready) < least and (left := until - time.monotonic()) > 0:
                self.changed.wait(left)
                ready = self._ready(batch)
            if self.few_is_error and len(ready) < least:
                raise cuFileError(5041)
            ready = ready[: count.value]
            events = np.zeros(len(ready), dtype=d.EVENTS)
            for event, entry in zip(events, ready, strict=True):
                is_held = entry.rule is not None and entry.rule.fault == "hold"
                dropped = batch.is_stale or (batch.cancelled and is_held)
                event["cookie"] = entry.cookie
                if entry.is_over:  # told again; nothing is moved again
                    event["status"], event["ret"] = d.COMPLETE, entry.size
                else:
                    event["status"], event["ret"] = (
                        (d.CANCELED, 0) if dropped else self._perform(entry)
                    )
                entry.is_over = True
                entry.reports -= 1
                if entry.reports == 0:
                    batch.waiting.remove(entry)
            ctypes.memmove(events_pointer, events.ctypes.data, events.nbytes)
            count.value = len(ready)

    def _ready(self, batch: StubBatch) -> list[Entry]:
        ready = []
        for entry in batch.waiting:
            fault = entry.rule.fault if entry.rule else ""
            if fault == "never" or (fault == "hold" and not batch.cancelled):
                continue
            if entry.polls_left > 0:
                entry.polls_left -= 1
                continue
            ready.append(entry)
        if self.order == "lifo":
            ready.reverse()
        elif self.order == "random":
            self._random.shuffle(ready)
            ready = ready[: max(1, len(ready) // 2)]
        return ready

    def _perform(self, entry: Entry) -> tuple[int, int]:
        """Moves the bytes; the entry's status and return."""
        rule = entry.rule
        if rule is not None and rule.fault == "error":
            return d.FAILED, -rule.value
        if rule is not None and rule.fault == "status":
            return rule.value, entry.size  # a count that means nothing: the entry did not complete
        size = (
            min(entry.size, rule.value)
            if rule is not None and rule.fault == "short"
            else entry.size
        )
        data = bytearray(os.pread(self.handles[entry.handle], size, entry.offset))
        if rule is not None and rule.fault == "flip" and data:
            data[rule.value // 8 % len(data)] ^= 1 << rule.value % 8
        ctypes.memmove(entry.pointer, bytes(data), len(data))
        is_direct = self.direct and not self.force_compat
        self._counts["direct"] += is_direct
        self._counts["posix"] += self.mixed or not is_direct
        return d.COMPLETE, len(data)

    def batch_io_cancel(self, number: int) -> None:
        self._note("batch_io_cancel", number)
        with self.changed:
            self._batches[number].cancelled = True
            self.changed.notify_all()

    def batch_io_destroy(self, number: int) -> None:
        self._note("batch_io_destroy", number)
        self._require(not self._batches[number].busy(), "a busy batch was destroyed")
        del self._batches[number]

    def release(self) -> None:
        """Lets go of everything that was held back."""
        with self.changed:
            for rule in self.rules:
                if rule.fault in ("never", "hold"):
                    rule.fault = "none"
            self.changed.notify_all()

    def busy(self) -> int:
        return sum(not entry.is_over for batch in self._batches.values() for entry in batch.waiting)
