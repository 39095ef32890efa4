"""What the storage tests share: files with known bytes, random plans, and children that may hang
without hanging the suite."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import select
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from espnx.errors import DeadlineExceededError, PathUnavailableError
from espnx.storage import FileHandle, NativeEngine, Plan

OpenEngine = Callable[..., NativeEngine]

FILLER = 0xA5  # what `poison=True` puts into memory before the device writes there
CANARY = 0xC7
BLOCK = 4096


@functools.cache
def uring_refusal() -> str | None:
    """Why this machine has no io_uring, or None where it has."""
    try:
        NativeEngine("uring").close()
    except PathUnavailableError as error:
        return str(error)
    return None


def content(size_bytes: int, seed: int) -> bytes:
    """Random bytes without the filler: a filler byte among data was never read."""
    return random.Random(seed).randbytes(size_bytes).replace(bytes([FILLER]), b"\x5a")


def make_file(path: Path, size_bytes: int, seed: int = 0) -> bytes:
    data = content(size_bytes, seed)
    path.write_bytes(data)
    return data


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def crc32c(data: bytes) -> int:
    """Bit by bit, from the definition: shares nothing with the code under test."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _crc_of_byte(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value


_CRC_TABLE = [_crc_of_byte(byte) for byte in range(256)]


def read_bytes(
    engine: NativeEngine, file: FileHandle, offset_bytes: int, size_bytes: int, **options: Any
) -> bytes:
    """One item, read and cut out of the engine's buffer."""
    future = engine.read(Plan.of(file, [offset_bytes], [size_bytes]), **options)
    memory = future.wait()
    at = int(future.position_bytes[0])
    return raw(memory[at : at + size_bytes])


@dataclass
class Case:
    """A random plan over files whose bytes are known."""

    plan: Plan
    wanted: list[bytes]

    def check(self, memory: torch.Tensor, position_bytes: torch.Tensor) -> None:
        everything = memory.numpy()
        for i, (at, wanted) in enumerate(zip(position_bytes.tolist(), self.wanted, strict=True)):
            if not wanted:
                assert at == -1, f"item {i} is empty and has no place, got {at}"
                continue
            assert at >= 0
            assert everything[at : at + len(wanted)].tobytes() == wanted, (
                f"item {i} of {len(self.wanted)}: {len(wanted)} bytes at {at}"
            )


def random_case(
    rng: random.Random,
    files: list[tuple[FileHandle, bytes]],
    request_bytes: int,
    *,
    count: int | None = None,
    aligned: bool = False,
) -> Case:
    """Offsets and sizes around everything that matters: blocks, requests, the end of the file, each
    other."""
    handles: list[FileHandle] = []
    offsets: list[int] = []
    sizes: list[int] = []
    for _ in range(rng.randint(1, 40) if count is None else count):
        if offsets and rng.random() < 0.25:  # again, or close to what is there already
            at = rng.randrange(len(offsets))
            handle, data = next(pair for pair in files if pair[0] is handles[at])
            offset = max(
                0,
                min(
                    len(data),
                    offsets[at]
                    + rng.choice([0, 0, 1, -1, sizes[at], sizes[at] + 1, BLOCK, -BLOCK]),
                ),
            )
        else:
            handle, data = rng.choice(files)
            anywhere = rng.randint(0, len(data))
            offset = rng.choice(
                [0, anywhere, anywhere // BLOCK * BLOCK, max(0, len(data) - rng.randint(0, 5000))]
            )
        small = [0, 1, 2, 4095, 4096, 4097, rng.randint(0, 300)]
        size = rng.choice(
            [
                *small,
                request_bytes - 1,
                request_bytes,
                request_bytes + 1,
                rng.randint(0, 4 * request_bytes),
                len(data),
            ]
        )
        if aligned:
            offset, size = offset // BLOCK * BLOCK, size // BLOCK * BLOCK
        size = min(size, len(data) - offset)
        if aligned:
            size = size // BLOCK * BLOCK
        handles.append(handle)
        offsets.append(offset)
        sizes.append(size)
    by_number = {handle.number: data for handle, data in files}
    wanted = [
        by_number[handle.number][offset : offset + size]
        for handle, offset, size in zip(handles, offsets, sizes, strict=True)
    ]
    return Case(Plan.of(handles, offsets, sizes), wanted)


def until(condition: Callable[[], bool], limit_s: float = 30.0) -> bool:
    """Whether the condition came true in time."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.002)
    return condition()


@contextlib.contextmanager
def interrupted(is_time: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C, once: a signal to this process as soon as `is_time` says so, of another thread."""

    def interrupt() -> None:
        if until(is_time):
            os.kill(os.getpid(), signal.SIGINT)

    # a shell that starts its children in the background has it ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


T = TypeVar("T")


def patiently(attempt: Callable[[float], T | None], first_s: float = 0.05) -> T:
    """What `attempt`, given a limit in seconds, returns. Where that is None, or it ends because a
    deadline passed, a busy machine was slower than the limit: again, with ten times as much."""
    for limit_s in (first_s, 10 * first_s, 100 * first_s):
        with contextlib.suppress(DeadlineExceededError):
            found = attempt(limit_s)
            if found is not None:
                return found
    raise AssertionError(f"even {limit_s:g} s were over too soon")


def open_descriptors() -> set[str]:
    """What this process has open. Sockets, pipes and the engine's own descriptors included."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found


class ChildError(AssertionError):
    """A child process hung, crashed or raised."""


def in_child(
    work: Callable[[], Any],
    *,
    limit_s: float = 60.0,
    meanwhile: Callable[[int], None] | None = None,
) -> Any:
    """Runs `work` in a forked child and returns its JSON-able result. A child that hangs is killed
    and reported.

    `meanwhile(pid)` runs in the parent once the child has begun.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of any fork with threads; here that is the point
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        answer: dict[str, Any]
        try:
            answer = {"result": work()}
        except BaseException:
            answer = {"raised": traceback.format_exc()}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    ended = False
    try:
        if meanwhile is not None:
            meanwhile(pid)
        if not select.select([reader], [], [], limit_s)[0]:
            raise ChildError(f"the child hangs: no answer within {limit_s} s")
        text = os.read(reader, 1 << 16)
        _, status = os.waitpid(pid, 0)
        ended = True
    finally:
        os.close(reader)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if not text:
        raise ChildError(f"the child crashed: wait status {status}")
    answer = json.loads(text)
    if "raised" in answer:
        raise ChildError(answer["raised"])
    return answer["result"]
