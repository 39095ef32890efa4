"""Which path the `gds` engine takes and what it says when it cannot: files, driver, registration,
missing packages."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.storage import Engine, FileHandle, NativeEngine, Plan, open_engine
from espnx.storage.gds import cufile as gds_driver
from espnx.storage.gds.engine import GdsEngine
from tests.storage.gds.common import MakeEngine, items_of, make, stub_of, write_file
from tests.storage.gds.cufile_stub import CuFileStub, HostMemory, Rule

__all__ = ["make"]  # a fixture is found by its name in this module


def test_opening_files(make: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, 5000)
    path.chmod(0o444)
    engine = make()
    file = engine.open(path)
    assert (file.path, file.size_bytes, file.requested, file.effective) == (
        str(path),
        5000,
        "gds-compat",
        "gds-compat",
    )
    assert (file.direct, file.alignment_bytes) == (True, 4096)
    buffered = engine.open(path, direct=False)
    assert (buffered.effective, buffered.alignment_bytes) == ("gds-compat (buffered)", 1)
    with pytest.raises(errors.FileMissingError):
        engine.open(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()
    with pytest.raises(errors.ReadError):
        engine.open(tmp_path)
    with pytest.raises(errors.InvalidInputError, match="uring"):
        engine.open(path, "w")
    assert path.stat().st_size == 5000


def test_first_read_of_a_file_fails(make: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, 5000)
    engine = make(CuFileStub(rules=[Rule("error", errno.EIO, count=1)]))
    with pytest.raises(errors.ReadError) as caught:
        engine.open(path)
    assert (caught.value.errno, caught.value.path) == (errno.EIO, str(path))
    assert stub_of(engine).handles == {}
    engine.open(path)


@pytest.mark.parametrize(
    ("requested", "direct", "effective"),
    [
        ("gds", True, "gds"),
        ("gds", False, None),
        ("gds-compat", True, "gds"),
        ("gds-compat", False, "gds-compat"),
    ],
)
def test_effective_path(
    make: MakeEngine, tmp_path: Path, requested: str, direct: bool, effective: str | None
) -> None:
    path, data = write_file(tmp_path, 5000)
    stub = CuFileStub(direct=direct)
    if effective is None:
        with pytest.raises(errors.PathUnavailableError, match="gds-compat"):
            make(stub, requested)
        assert stub.open_count == 0
        return
    engine = make(stub, requested)
    file = engine.open(path)
    assert (file.effective, file.requested) == (effective, requested)
    assert stub.allow_compat is (requested == "gds-compat")
    empty = tmp_path / "empty"
    empty.touch()
    engine.open(empty)
    future = engine.read(Plan.of(file, [4000], [1000]))
    assert items_of(future.wait(), future.position_bytes, [1000]) == [data[4000:]]


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({"driver": False}, False),
        ({"force_compat": True}, False),
        ({"driver": False, "p2p": True}, True),
        ({}, True),
    ],
)
def test_no_batches_where_no_read_is_direct(
    make: MakeEngine, tmp_path: Path, settings: dict[str, bool], batches: bool
) -> None:
    path, data = write_file(tmp_path, 3000 * 512)
    stub = CuFileStub(order="random")
    for name, value in settings.items():
        setattr(stub, name, value)
    engine = make(stub, batch_bytes=4096)
    file = engine.open(path)
    assert file.effective == "gds-compat"
    at_open = stub.count("batch_io_submit")  # what the path is found out by
    offsets = [4096 * (i * 7 % 375) for i in range(375)]
    future = engine.read(Plan.of(file, offsets, [512] * 375), gap_bytes=0)
    assert items_of(future.wait(), future.position_bytes, [512] * 375) == [
        data[offset : offset + 512] for offset in offsets
    ]
    assert (stub.count("batch_io_submit") > at_open) is batches
    assert ("no read can be direct here" in engine.fallback_reason) is not batches


@pytest.mark.parametrize("direct", [True, False])
def test_other_libraries_find_the_driver_as_it_was(make: MakeEngine, direct: bool) -> None:
    """`auto` tries `gds`, which refuses compatibility mode: KvikIO, say, opens the driver later."""
    stub = CuFileStub(direct=direct)
    for _ in range(2):
        try:
            engine = make(stub, "gds")
            assert not stub.allow_compat
            engine.close()
        except errors.PathUnavailableError:
            assert not direct
        assert (stub.open_count, stub.allow_compat) == (0, True)
    stub.set_parameter_bool(1, False)  # as the other one wants it
    make(stub, "gds-compat").close()
    assert not stub.allow_compat


def test_driver_that_another_library_opened(make: MakeEngine, tmp_path: Path) -> None:
    """Then compatibility mode cannot be switched off, and statistics have to show that reads are
    direct."""
    path, _ = write_file(tmp_path, 5000)
    stub = CuFileStub(direct=True)
    stub.open_count = 1
    assert make(stub, "gds").open(path).effective == "gds"
    for spoil in ({"force_compat": True}, {"statistics": False}, {"mixed": True}):
        stub = CuFileStub(direct=True)
        stub.open_count = 1
        engine = None
        vars(stub).update(spoil)
        with pytest.raises(errors.PathUnavailableError, match="gds-compat"):
            engine = make(stub, "gds")
            engine.open(path)
        if engine is not None:
            engine.close()
        assert stub.open_count == 1  # it is not ours to close
        assert stub.handles == {}


def test_the_driver_stays_open_when_the_library_that_opened_it_leaves(
    make: MakeEngine, tmp_path: Path
) -> None:
    path, data = write_file(tmp_path, 5000)
    for counts in (True, False):
        stub = CuFileStub()
        stub.open_count, stub.counts_opens = 1, counts
        engine = make(stub)
        file = engine.open(path)
        assert stub.open_count == (2 if counts else 1)
        if counts:
            stub.driver_close()  # the other library's
            future = engine.read(Plan.of(file, [1], [100]))
            assert items_of(future.wait(), future.position_bytes, [100]) == [data[1:101]]
            del future
        engine.close()
        assert stub.open_count == (0 if counts else 1)  # closed as often as opened


def test_what_stands_in_the_way_is_named_rightly(make: MakeEngine) -> None:
    """Where cuFile has PCI P2PDMA, its absence is not the reason."""
    stub = CuFileStub()
    stub.driver = False
    assert "no PCI P2PDMA" in make(stub).properties.obstacle()
    stub = CuFileStub()
    stub.p2p = True
    assert "file system" in make(stub).properties.obstacle()


def test_two_engines_share_the_driver(make: MakeEngine) -> None:
    stub = CuFileStub()
    first, second = make(stub), make(stub)
    first.close()
    assert stub.open_count == 1
    second.close()
    assert stub.open_count == 0
    assert stub.count("driver_open") == 1


def test_memory_that_cannot_be_registered(make: MakeEngine, tmp_path: Path) -> None:
    """Direct reads need it; in compatibility mode cuFile has buffers of its own, and the engine
    says so."""
    path, data = write_file(tmp_path, 5000)
    stub = CuFileStub(direct=True)
    stub.register_fails = True
    with pytest.raises(errors.PathUnavailableError, match="registered"):
        make(stub, "gds")
    stub = CuFileStub()
    stub.register_fails = True
    engine = make(stub)
    future = engine.read(Plan.of(engine.open(path), [1], [4000]))
    assert items_of(future.wait(), future.position_bytes, [4000]) == [data[1:4001]]
    assert "not registered" in engine.fallback_reason


@pytest.mark.parametrize(
    "options",
    [
        {"path": "uring"},
        {"batch_size": 0},
        {"batches": 0},
        {"threads": 0},
        {"batch_bytes": 1000},
        {"large_bytes": 0},
        {"arena_bytes": 1},
    ],
)
def test_options_out_of_range(make: MakeEngine, options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidInputError):
        make(**options)


def test_driver_that_hangs(monkeypatch: pytest.MonkeyPatch, make: MakeEngine) -> None:
    stub = CuFileStub()
    gate = threading.Event()
    monkeypatch.setattr(gds_driver, "_OPEN_LIMIT_S", 0.05)
    monkeypatch.setattr(stub, "driver_open", lambda: gate.wait(10) and None, raising=False)
    with pytest.raises(errors.PathUnavailableError, match="did not return"):
        make(stub)
    gate.set()


def fake_package(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None) -> None:
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.cufile", module)  # None: the import fails


def test_missing_bindings_and_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(monkeypatch, None)
    with pytest.raises(errors.MissingDependencyError, match="cuda-bindings"):
        GdsEngine("gds", memory=HostMemory())
    module: Any = types.ModuleType("cuda.bindings.cufile")

    def get_version() -> int:
        raise RuntimeError('Failure finding "libcufile.so.0"')

    module.get_version = get_version
    fake_package(monkeypatch, module)
    with pytest.raises(errors.MissingDependencyError, match="libcufile"):
        GdsEngine("gds-compat", memory=HostMemory())


def test_no_gpu_is_said_in_one_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    for path in ("gds", "gds-compat"):
        with pytest.raises(errors.PathUnavailableError, match="CUDA device"):
            open_engine(path)


def test_importing_storage_imports_no_cuda() -> None:
    code = (
        # torch itself imports cuda.bindings where they are
        "import sys, torch; before = set(sys.modules)\n"
        "import espnx.storage; added = set(sys.modules) - before\n"
        "print([m for m in added if m.split('.')[0] in ('cuda', 'cupy') or '.gds' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_structures_are_those_of_the_bindings() -> None:
    """Our layouts of the C structures against the installed bindings', field by field."""
    cufile = pytest.importorskip(
        "cuda.bindings.cufile",
        reason="cuda-bindings is not installed (pip install espnx[gds])",
        exc_type=ImportError,
    )
    flat = cufile.io_params_dtype
    inner = flat["u"]["batch"]
    at = {name: flat.fields[name][1] for name in ("mode", "fh", "opcode", "cookie")}
    at |= {
        name: flat.fields["u"][1] + inner.fields[name][1]
        for name in ("dev_ptr_base", "file_offset", "dev_ptr_offset", "size_")
    }
    names = {
        "mode": "mode",
        "base": "dev_ptr_base",
        "file_offset": "file_offset",
        "base_offset": "dev_ptr_offset",
    }
    names |= {"size": "size_", "handle": "fh", "opcode": "opcode", "cookie": "cookie"}
    ours = gds_driver._PARAMS
    assert {name: ours.fields[name][1] for name in names} == {
        name: at[theirs] for name, theirs in names.items()
    }
    assert ours.itemsize == flat.itemsize
    assert [gds_driver.EVENTS.fields[name][1] for name in ("cookie", "status", "ret")] == [0, 8, 16]
    assert gds_driver.EVENTS.itemsize == cufile.io_events_dtype.itemsize
    assert gds_driver._DESCRIPTOR.itemsize == cufile.descr_dtype.itemsize
    assert [gds_driver._DESCRIPTOR.fields[n][1] for n in ("type", "fd", "fs_ops")] == [
        cufile.descr_dtype.fields[n][1] for n in ("type", "handle", "fs_ops")
    ]
    stats = cufile.stats_level1_dtype
    counters = {
        "nvfs_submit": gds_driver._NVFS_AT,
        "p2p_submit": gds_driver._P2P_AT,
        "posix_enqueued": gds_driver._POSIX_AT,
    }
    counters |= {"aio_submit": gds_driver._AIO_AT, "iouring_submit": gds_driver._IO_URING_AT}
    assert {name: stats.fields[f"batch_{name}_ops"][1] for name in counters} == counters
    assert stats.itemsize < gds_driver._STATS_BYTES
    codes = {
        "DRIVER_ALREADY_OPEN": gds_driver.DRIVER_ALREADY_OPEN,
        "IO_NOT_SUPPORTED": 5008,
        "BATCH_NOCOMPAT_ERROR": 5049,
    }
    assert {name: int(getattr(cufile.OpError, name)) for name in codes} == codes
    statuses = ("WAITING", "PENDING", "INVALID", "CANCELED", "COMPLETE", "TIMEOUT", "FAILED")
    assert [int(getattr(cufile.Status, name)) for name in statuses] == [
        getattr(gds_driver, name) for name in statuses
    ]


def test_a_plan_of_another_engine(make: MakeEngine, tmp_path: Path) -> None:
    """Files of two engines never have the same number, whatever the engines are: a plan for one
    reads nothing of the other's."""
    ours, data = write_file(tmp_path, 5000)
    other = tmp_path / "other"
    other.write_bytes(bytes(5000))
    one, two = make(), make()
    with NativeEngine("posix") as native:
        files = one.open(ours), two.open(other), native.open(other)
        assert len({file.number for file in files}) == 3
        foreign: list[tuple[Engine, FileHandle]] = [
            (two, files[0]),
            (one, files[1]),
            (one, files[2]),
            (native, files[0]),
        ]
        for engine, file in foreign:
            with pytest.raises(errors.InvalidInputError, match=str(file.number)):
                engine.read(Plan.of(file, [0], [100]))
            with pytest.raises(errors.InvalidInputError, match=str(file.number)):
                engine.close_file(file)
    assert bytes(one.read(Plan.of(files[0], [0], [100])).wait()[:100].tolist()) == data[:100]
