"""Launching csrc/cuda through a stand-in for the driver: what is called, and with which bytes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx.ops import device_code
from espnx.ops._native import on_current
from espnx.ops.device_code import Code, Driver, LaunchError, compiled_file, source_digest

CPU = torch.device("cpu")


class Library:
    """libcuda as far as `Driver` calls it; ``failing``: a function's name and what it returns."""

    def __init__(self, failing: dict[str, int] | None = None):
        self.failing = failing or {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls.append((name, args))
            if name in ("cuLibraryLoadData", "cuLibraryGetKernel", "cuDevicePrimaryCtxRetain"):
                args[0]._obj.value = len(self.calls)
            if name == "cuGetErrorName":
                args[1]._obj.value = b"CUDA_ERROR_OUT_OF_PATIENCE"
            return self.failing.get(name, 0)

        return call

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [args for each, args in self.calls if each == name]


def test_a_launch(tmp_path: Path) -> None:
    """Numbers and addresses come as the driver reads them: by pointers to them."""
    library = Library()
    driver = Driver(library)
    file = tmp_path / "x.fatbin"
    file.write_bytes(b"code")
    code = Code(driver, file)
    assert library.named("cuLibraryLoadData")[0][1] == b"code"
    kernel = code.kernel("espnx_x", 3, 0)
    args = (ctypes.c_uint64(2**63 + 5), ctypes.c_int64(-7), ctypes.c_uint32(2**32 - 1))
    driver.launch(kernel, 9, 256, 1024, 77, args)
    (found,) = library.named("cuLaunchKernel")
    assert found[0].value == kernel.value
    assert [each.value for each in found[1:8]] == [9, 1, 1, 256, 1, 1, 1024]
    assert found[8].value == 77
    for pointer, arg in zip(found[9], args, strict=True):
        kind = ctypes.POINTER(type(arg))
        assert ctypes.cast(pointer, kind).contents.value == arg.value


def test_shared_memory_is_asked_for_once_a_device(tmp_path: Path) -> None:
    library = Library()
    file = tmp_path / "x.fatbin"
    file.write_bytes(b"code")
    code = Code(Driver(library), file)
    for device, n_bytes in ((0, 48 << 10), (0, 160 << 10), (0, 160 << 10), (1, 160 << 10)):
        code.kernel("espnx_x", device, n_bytes)
    asked = library.named("cuKernelSetAttribute")
    assert [(each[0].value, each[1].value, each[3].value) for each in asked] == [
        (8, 160 << 10, 0),
        (8, 160 << 10, 1),
    ]
    assert len(library.named("cuLibraryGetKernel")) == 1


def test_a_thread_without_a_context_gets_the_devices_own() -> None:
    library = Library()
    Driver(library).ensure_context(2)
    (retained,) = library.named("cuDevicePrimaryCtxRetain")
    assert retained[1].value == 2
    assert len(library.named("cuCtxSetCurrent")) == 1


def test_a_device_is_made_the_current_one_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: str(device))
    nothing = on_current(CPU)
    assert on_current(torch.device("cuda", 1)) is nothing
    with nothing, nothing:
        pass
    assert on_current(torch.device("cuda", 0)) == "cuda:0"
    assert on_current(torch.device("cuda")) == "cuda"


def test_what_the_driver_refuses() -> None:
    with pytest.raises(LaunchError, match=r"cuLaunchKernel.*CUDA_ERROR_OUT_OF_PATIENCE \(701\)"):
        Driver(Library({"cuLaunchKernel": 701})).launch(ctypes.c_void_p(1), 1, 32, 0, 0, ())


@pytest.mark.parametrize(
    "failing", ["cuLibraryLoadData", "cuKernelSetAttribute", "cuKernelGetFunction"]
)
def test_another_version_is_used_where_code_cannot_run(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is too old, a GPU with less shared memory, PTX that cannot be compiled for it
    (the driver loads code when it is needed first), and a GPU before Ampere."""
    file = tmp_path / "x.fatbin"
    file.write_bytes(b"code")
    monkeypatch.setattr(device_code, "compiled_file", lambda name: file)
    for library, expected in ((Library({failing: 1}), False), (Library(), True)):
        monkeypatch.setattr(device_code, "_driver", lambda it=library: Driver(it))
        device_code._code.cache_clear()
        device_code.is_there.cache_clear()
        there = torch.device("cuda", 0)
        assert device_code.is_there("x", "espnx_x", there, 160 << 10) is expected
        pushed, popped = (library.named(f"cuCtx{each}Current_v2") for each in ("Push", "Pop"))
        assert len(pushed) == len(popped) == (failing == "cuKernelGetFunction" or expected)
        assert not device_code.is_there("x", "espnx_x", CPU, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((7, 5), False), ((8, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        device_code.is_there.cache_clear()
        assert device_code.is_there("x", "espnx_x", there, 0) is expected
    device_code._code.cache_clear()
    device_code.is_there.cache_clear()


def test_without_a_compiled_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_code, "_code", lambda name: None)
    with pytest.raises(LaunchError, match="not compiled"):
        device_code.launch("gather", "espnx_gather_1", 1, 32, (), torch.device("cuda", 0))


def test_a_clone_uses_what_was_compiled_of_its_sources_as_they_are(tmp_path: Path) -> None:
    package, sources = tmp_path / "espnx", tmp_path / "csrc" / "cuda"
    (package / "kernels").mkdir(parents=True)
    old = package / "kernels" / "x-0123.fatbin"
    old.write_bytes(b"")
    assert compiled_file("x", package) == old  # an installation has no sources
    sources.mkdir(parents=True)
    (sources / "x.cu").write_text("//")
    assert compiled_file("x", package) is None
    new = package / "kernels" / f"x-{source_digest(sources / 'x.cu')}.fatbin"
    new.write_bytes(b"")
    assert compiled_file("x", package) == new
    (sources / "y.cuh").write_text("//")
    assert compiled_file("x", package) is None  # its source may include that


def test_a_build_that_is_killed_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """Half a file by the right name would be taken for what was compiled, for good."""
    pytest.importorskip("setuptools")
    (tmp_path / "csrc" / "cuda").mkdir(parents=True)
    (tmp_path / "csrc" / "cuda" / "x.cu").write_text("//")
    shutil.copy(Path(__file__).resolve().parents[2] / "setup.py", tmp_path)
    build = "import runpy, pathlib as p; runpy.run_path('setup.py')['compile_device_code']"
    nvcc = tmp_path / "nvcc"
    for end, text in (("kill -9 $PPID", None), ("", "code")):
        # the last word is where it writes to
        nvcc.write_text(f'#!/bin/sh\nfor to in "$@"; do :; done\nprintf code > "$to"\n{end}\n')
        nvcc.chmod(0o755)
        environment = os.environ | {"ESPNX_NVCC": str(nvcc)}
        command = [sys.executable, "-c", f"{build}(p.Path('made'))"]
        subprocess.run(command, cwd=tmp_path, env=environment, timeout=120)
        found = list((tmp_path / "made").glob("x-*.fatbin"))
        assert [each.read_text() for each in found] == ([] if text is None else [text])
    assert len(list((tmp_path / "made").iterdir())) == 1
