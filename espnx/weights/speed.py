"""Short measurements: how fast a disk is read past the page cache, memory is read, and matrices are
multiplied."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import errors
from ..storage.engine import Plan, paths_of
from ..storage.files import StreamWriter, aligned_empty, write_error
from ..storage.native import NativeEngine, NativeFuture

PROBE_BYTES = 256 << 20
_READ_BYTES = 16 << 20
_AHEAD = 3
_RUN_S = 0.3


@dataclass(frozen=True)
class ReadSpeed:
    """A measured bandwidth.

    Attributes:
        bytes_asked: that were read for it.
        effective_path: that the bytes took; with `` (buffered)`` they came through the page cache,
            and the number is not the disk's.
        written_bytes_per_s: with which the file was written before, flushed to the device; None: it
            was there.
    """

    bytes_per_s: float
    bytes_asked: int
    effective_path: str
    written_bytes_per_s: float | None = None


def read_speed(directory: str | os.PathLike[str], probe_bytes: int | None = None) -> ReadSpeed:
    """Measures a directory's disk: writes a temporary file of at most 256 MiB, reads it in large
    requests, and removes it.

    Raises:
        WriteError, DiskFullError: the directory cannot be written.
    """
    size = PROBE_BYTES if probe_bytes is None else probe_bytes
    try:
        descriptor, name = tempfile.mkstemp(prefix=".espnx-speed-", dir=directory)
    except OSError as error:
        raise write_error(
            "cannot write", directory, error, "name a directory that you may write to"
        ) from error
    os.close(descriptor)
    try:
        with NativeEngine(pool_bytes=1 << 20) as engine:
            part = torch.randint(0, 256, (min(size, 4 << 20),), dtype=torch.uint8).numpy()
            begun = time.perf_counter()
            with StreamWriter(engine, name) as writer:
                for begin in range(0, size, part.size):
                    writer.write(part[: size - begin])
                writer.sync()
            written = size / (time.perf_counter() - begun)
        return dataclasses.replace(read_speed_of([name], size), written_bytes_per_s=written)
    finally:
        os.unlink(name)


def read_speed_of(paths: Sequence[str], most_bytes: int | None = None) -> ReadSpeed:
    """Measures reads of files that are there, from their beginnings, in all at most 256 MiB. Raises
    ReadError."""
    left = PROBE_BYTES if most_bytes is None else most_bytes
    with NativeEngine(pool_bytes=1 << 20) as engine:
        reads = []
        for path in paths:
            file = engine.open(path)
            whole = min(file.size_bytes // 4096 * 4096, left // 4096 * 4096)
            reads += [
                (file, begin, min(_READ_BYTES, whole - begin))
                for begin in range(0, whole, _READ_BYTES)
            ]
            left -= whole
        if not reads:
            raise errors.InvalidInputError(
                "measure a disk", got="files of less than 4 KiB", expected="something to read"
            )
        slots = [aligned_empty(_READ_BYTES) for _ in range(_AHEAD)]
        begun = time.perf_counter()
        line: list[NativeFuture] = []
        for i, (file, begin, size) in enumerate(reads):
            if len(line) == _AHEAD:
                line.pop(0).wait()
            line.append(
                engine.read(Plan.of(file, [begin], [size], out_offset_bytes=[0]), slots[i % _AHEAD])
            )
        for future in line:
            future.wait()
        total = sum(size for _, _, size in reads)
        return ReadSpeed(
            total / (time.perf_counter() - begun),
            total,
            paths_of({file.number: file.effective for file, _, _ in reads}.values()),
        )


def memory_speed() -> float:
    """Bytes a second that PyTorch's threads read from memory, measured on 128 MiB."""
    data = torch.ones(16 << 20, dtype=torch.float64)
    return data.nbytes * _rate(data.sum)


def gemm_speed(dtype: torch.dtype, rows: int) -> float:
    """Floating-point operations a second of a product of [rows, 1024] with [1024, 1024], with
    weights in cache: what computing can do."""
    a, b = (
        torch.ones((max(1, min(rows, 512)), 1024), dtype=dtype),
        torch.ones((1024, 1024), dtype=dtype),
    )
    return 2 * a.shape[0] * 1024 * 1024 * _rate(lambda: torch.nn.functional.linear(a, b))


def _rate(call: Callable[[], object]) -> float:
    """Calls a second, the best of some."""
    best, end = 0.0, time.perf_counter() + _RUN_S
    while not best or time.perf_counter() < end:
        begun = time.perf_counter()
        call()
        best = max(best, 1 / (time.perf_counter() - begun))
    return best
