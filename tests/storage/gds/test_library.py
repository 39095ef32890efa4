"""The `gds` engine on the real bindings and a libcufile of ours, whose threads are C's: what the
bindings make of errors, a driver that does not open, and random programs, also under the address
sanitizer."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from espnx import errors
from espnx.storage import Plan
from espnx.storage.gds import cufile as gds_driver
from espnx.storage.gds.cufile import CallFailedError, CuFile
from tests.storage.gds.common import MakeEngine, items_of, make, until, write_file
from tests.storage.gds.cufile_library import CuFileLibrary, build, load
from tests.storage.gds.cufile_stub import HostMemory, Rule
from tests.storage.gds.library_stress import stress

__all__ = ["make"]  # a fixture is found by its name in this module
only_library = pytest.mark.parametrize("make", ["library"], indirect=True)


def test_what_the_bindings_make_of_errors(tmp_path: Path) -> None:
    """A CUfileOpError is raised, but returned by ``read``; an errno of ``read`` is a ValueError
    that begins with it; an errno of any other call is taken for success."""
    load()
    library = CuFileLibrary()
    cufile = CuFile(library, HostMemory())
    cufile.open(refuse_compat=False)
    path, _ = write_file(tmp_path, 5000)
    descriptor = os.open(path, os.O_RDONLY)
    handle = cufile.register_file(descriptor)
    memory = np.zeros(4096, dtype=np.uint8)
    cufile.register_memory(memory.ctypes.data, memory.size)
    for code in (errno.EIO, errno.EINTR, errno.ENODEV, 5030, 5044):
        library.passing["read"] = [code]
        with pytest.raises(CallFailedError) as caught:
            cufile.read(handle, memory.ctypes.data, 0, 0, 4096)
        assert caught.value.code == code
        assert caught.value.errno == (code if code < 5000 else None)
        assert str(code if code > 5000 else os.strerror(code)) in str(caught.value)
    for call, arguments in (
        ("batch_io_set_up", (4,)),
        ("buf_register", (memory.ctypes.data, 100, 0)),
        ("driver_open", ()),
    ):
        library.passing[call] = [5037]
        with pytest.raises(CallFailedError, match=r"5037") as caught:
            cufile.call(call, *arguments)
        assert caught.value.code == 5037
        library.passing[call] = [errno.EAGAIN]
        cufile.call(call, *arguments)
    cufile.forget_memory(memory.ctypes.data)
    cufile.forget_file(handle)
    os.close(descriptor)
    cufile.close(abandoned=False)
    assert (library.violations, library.open_count) == ([], 0)


@only_library
def test_an_errno_that_the_bindings_hide_completes_nothing(
    make: MakeEngine, tmp_path: Path
) -> None:
    """A status call that "succeeds" without writing anything: old news are not taken for new."""
    path, data = write_file(tmp_path, 200_000)
    library = CuFileLibrary(rules=[Rule("hold", match=lambda offset, size: offset >= 102_400)])
    engine = make(library, batch_size=16)
    file = engine.open(path)
    first = [i * 8192 for i in range(12)]
    engine.read(Plan.of(file, first, [10] * 12)).wait()
    library.passing["batch_io_get_status"] = [errno.EINTR] * 10
    offsets = [102_400 + i * 8192 for i in range(11)]
    future = engine.read(Plan.of(file, offsets, [10] * 11))
    until(lambda: not library.passing["batch_io_get_status"])
    assert future.next(timeout_s=0.02)[0].numel() == 0
    library.release()
    assert items_of(future.wait(), future.position_bytes, [10] * 11) == [
        data[o : o + 10] for o in offsets
    ]


@only_library
def test_a_driver_that_does_not_open(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NVIDIA's own does on a machine without a GPU. If it opens in the end, it is closed: there
    is nobody left who would."""
    monkeypatch.setattr(gds_driver, "_OPEN_LIMIT_S", 0.2)
    library = CuFileLibrary()
    library.open_hangs = True
    begun = time.monotonic()
    with pytest.raises(errors.PathUnavailableError, match="driver_open: did not return within"):
        make(library)
    assert time.monotonic() - begun >= 0.2
    assert library.count("driver_close") == 0
    library.release()
    until(lambda: library.count("driver_close") == 1 and library.open_count == 0)
    monkeypatch.undo()
    make(library).close()
    assert library.open_count == 0


@pytest.mark.parametrize(
    "seeds",
    [range(4)]
    + [
        pytest.param(range(first, first + 7), marks=pytest.mark.sweep) for first in range(4, 200, 7)
    ],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}",
)
def test_random_programs(folder: Path, seeds: range) -> None:
    load()
    assert all(stress(folder, seed) for seed in seeds)


def test_under_the_address_sanitizer(folder: Path, tmp_path: Path) -> None:
    """Nothing is read into memory that the engine has given back, and that would be noticed."""
    load()
    build(tmp_path, "address")
    compiler = os.environ.get("CC", "cc")
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.storage.gds.library_stress", str(folder), "3"],
        capture_output=True,
        text=True,
        timeout=240,
        env={
            **os.environ,
            "LD_PRELOAD": found.stdout.strip(),
            "ESPNX_CUFILE_SANITIZER": "address",
            "ASAN_OPTIONS": "detect_leaks=0 alloc_dealloc_mismatch=0 exitcode=66",
        },
    )
    assert done.returncode == 66, done.stdout + done.stderr
    words = done.stdout.split()
    assert words[:2] == ["ended", "well:"], done.stderr
    assert int(words[2]) > 10
    assert words[3:] == ["into", "what", "is", "gone:"], done.stderr
    assert "heap-use-after-free" in done.stderr
    assert "cuFile" in done.stderr or "libcufile" in done.stderr
