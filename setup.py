"""Builds the C++ extension ``espnx._C``; everything else about the package is in pyproject.toml.

Environment:
    MAX_JOBS: how many compilers run at once (a translation unit with torch headers takes about 1.5 GB).
    ESPNX_REUSE_EXTENSION=1: package the extension already built in place instead of compiling it again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import setup

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    sys.exit(
        f"espnx compiles against the torch that you run, and torch cannot be imported here ({error}). "
        "Install torch 2.11 or newer first, then: pip install --no-build-isolation ."
    )

CSRC = Path("csrc")
URING_PROBE = """
#include <linux/io_uring.h>
#include <sys/syscall.h>
int main() { return IORING_OP_READ + IORING_FEAT_NODROP + __NR_io_uring_enter; }
"""


def kernel_headers_know_io_uring() -> bool:
    """True when the C++ compiler finds a usable <linux/io_uring.h>. Calls go straight to the kernel, so no library is needed."""
    with tempfile.TemporaryDirectory() as scratch:
        probe = Path(scratch, "probe.cpp")
        probe.write_text(URING_PROBE)
        command = [os.environ.get("CXX", "g++"), "-fsyntax-only", str(probe)]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            return False  # no compiler by that name: the build itself will say so better than we can here


def native_extension() -> CppExtension:
    # Sorted: the order of a glob differs between file systems, and with it the binary.
    sources = sorted(str(path) for path in CSRC.rglob("*.cpp") if "cuda" not in path.parts)
    # No -march: each kernel carries variants for several instruction sets and chooses when it runs.
    flags = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
    if not kernel_headers_know_io_uring():
        flags.append("-DESPNX_NO_URING")
    extension = CppExtension("espnx._C", sources, extra_compile_args={"cxx": flags}, extra_link_args=["-pthread"])
    # torch's headers as system headers, so that warnings are about our own lines only.
    for folder in extension.include_dirs:
        flags += ["-isystem", folder]
    extension.include_dirs = [str(CSRC.resolve())]
    extension.depends = sorted(str(path) for suffix in ("*.h", "*.hpp") for path in CSRC.rglob(suffix))
    return extension


class BuildOrReuse(BuildExtension):
    """Compiles, or takes the extension already built in place: a wheel for a test then costs a second, not minutes."""

    def build_extensions(self) -> None:
        if os.environ.get("ESPNX_REUSE_EXTENSION") != "1":
            super().build_extensions()
            return
        for extension in self.extensions:
            built = Path(*extension.name.split(".")).with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))
            if not built.is_file():
                sys.exit(f"ESPNX_REUSE_EXTENSION=1, but {built} does not exist. Build it first: python setup.py build_ext --inplace")
            target = Path(self.get_ext_fullpath(extension.name))
            if target.resolve() != built.resolve():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(built, target)


setup(ext_modules=[native_extension()], cmdclass={"build_ext": BuildOrReuse})
