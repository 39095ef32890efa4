"""Builds the C++ extension ``espnx._C``, notes the commit it is of, and makes the package's page of
README.md; everything else is in pyproject.toml.

Environment:
    MAX_JOBS: how many compilers run at once; by default one a core.
    ESPNX_NVCC: the CUDA compiler, for csrc/cuda; by default nvcc of the PATH or /usr/local/cuda;
        none: leave those kernels out. Where none is found, or it fails, they are left out, too:
        the package then uses Triton's and torch's on a GPU.
    ESPNX_REUSE_EXTENSION=1: package the extension already built in place instead of compiling it
        again.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError

CSRC = Path("csrc")
# By folder: results of these are fixed to the bit, and a fused multiply-add has one rounding less.
FIXED_TO_THE_BIT = ("cpu/accelerator", "cpu/postings", "simulate")
FLAGS_OF = {str(CSRC / name): ["-ffp-contract=off"] for name in FIXED_TO_THE_BIT}
SETUP = "setup.py"
DEVICE_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fatbin",
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
]
URING_PROBE = """
#include <linux/io_uring.h>
#include <sys/syscall.h>
int main() { return IORING_OP_READ + IORING_FEAT_NODROP + __NR_io_uring_enter; }
"""


def kernel_headers_know_io_uring() -> bool:
    """True when the C++ compiler finds a usable <linux/io_uring.h>. Calls go straight to the
    kernel, so no library is needed."""
    with tempfile.TemporaryDirectory() as scratch:
        probe = Path(scratch, "probe.cpp")
        probe.write_text(URING_PROBE)
        command = [os.environ.get("CXX", "g++"), "-fsyntax-only", str(probe)]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            # no compiler by that name: the build itself will say so better than we can here
            return False


def pybind11_headers() -> str:
    """The headers of the package, which pip brings for an isolated build. A torch carries them,
    too: where it is installed, nothing need be fetched."""
    if importlib.util.find_spec("pybind11"):
        import pybind11

        return pybind11.get_include()
    torch = importlib.util.find_spec("torch")
    for folder in torch.submodule_search_locations or () if torch else ():
        if Path(folder, "include", "pybind11", "pybind11.h").is_file():
            return str(Path(folder, "include"))
    sys.exit(
        "pybind11 is missing: pip install pybind11 (or let pip build in isolation, which brings it)"
    )


def native_extension() -> Extension:
    # Sorted: the order of a glob differs between file systems, and with it the binary.
    sources = sorted(str(path) for path in CSRC.rglob("*.cpp"))
    # No -march: each kernel carries variants for several instruction sets and chooses when it runs.
    # -MMD: see is_stale.
    flags = [
        "-std=c++17",
        "-O3",
        "-g0",
        "-fvisibility=hidden",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-MMD",
    ]
    if not kernel_headers_know_io_uring():
        flags.append("-DESPNX_NO_URING")
    # As system headers, so that warnings are about our own lines only.
    flags += ["-isystem", pybind11_headers()]
    headers = sorted(str(path) for path in CSRC.rglob("*.hpp"))
    return Extension(
        "espnx._C",
        sources,
        include_dirs=[str(CSRC)],
        extra_compile_args=flags,
        extra_link_args=["-pthread"],
        depends=[*headers, SETUP],
        language="c++",
    )


def inputs_of(made: str) -> list[Path]:
    """What went into an object file, as its compiler noted beside it (-MMD)."""
    notes = Path(made).with_suffix(".d").read_text()
    names = notes.replace("\\\n", " ").partition(": ")[2].replace("\\ ", "\0").split()
    return [Path(name.replace("\0", " ")) for name in names]


def is_stale(made: str, source: str) -> bool:
    """Whether an object file is older than what went into it, or than the flags above."""
    if not Path(made).with_suffix(".d").is_file():
        return True
    built = Path(made).stat().st_mtime_ns
    inputs = [*inputs_of(made), Path(source), Path(SETUP)]
    return not all(path.is_file() and path.stat().st_mtime_ns <= built for path in inputs)


def note_clean(made: str, source: str) -> None:
    """Beside an object file that was compiled without a warning: a hash of the compiler's version,
    of the source and of the headers of csrc. The test that looks for warnings then does not compile
    the source again (tests/test_style.py)."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:  # another one was found
        return
    command = [compiler, "-dumpversion"]
    digest = hashlib.sha256(subprocess.run(command, capture_output=True, check=False).stdout)
    own = {path for path in inputs_of(made) if path.is_relative_to(CSRC)}
    for path in [Path(source), *sorted(own - {Path(source)})]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    Path(made).with_suffix(".clean").write_text(digest.hexdigest())


def find_nvcc() -> str | None:
    asked = os.environ.get("ESPNX_NVCC")
    if asked:
        return None if asked == "none" else asked
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def compile_device_code(folder: Path) -> None:
    """A file in `folder` for each source of csrc/cuda, several at once, by the name that
    espnx.ops.device_code looks for; those of other sources go. Python alone is needed to use the
    package, so a compiler that fails is a warning."""
    nvcc = find_nvcc()

    def compile_one(source: Path) -> None:
        parts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.cuh")))]
        digest = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
        target = folder / f"{source.stem}-{digest}.fatbin"
        for old in set(folder.glob(f"{source.stem}-*.fatbin")) - {target}:
            old.unlink()
        built = Path("kernels", target.name)
        if target.is_file() and target.stat().st_mtime_ns >= Path(SETUP).stat().st_mtime_ns:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if built.is_file() and os.environ.get("ESPNX_REUSE_EXTENSION") == "1":
            shutil.copy2(built, target)
            return
        # a build that is ended half way must leave nothing by a name that counts
        made = folder / f".{source.stem}.fatbin"
        try:
            command = [nvcc, *DEVICE_FLAGS, str(source), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.replace(target)
        except (OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)
            made.unlink(missing_ok=True)
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            print(f"warning: {source} is left out: {said[-1] if said else error}", file=sys.stderr)

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, sorted((CSRC / "cuda").glob("*.cu")) if nvcc else ()))


class BuildOrReuse(build_ext):
    """Compiles what is stale, several files at once, or takes the extension already built in place:
    a wheel for a test then costs a second, not minutes."""

    def run(self) -> None:
        self.is_here = bool(self.inplace or getattr(self, "editable_mode", False))
        super().run()  # which builds as if it were elsewhere, and copies
        compile_device_code(
            Path("kernels") if self.is_here else Path(self.build_lib, "espnx", "kernels")
        )

    def build_extension(self, extension: Extension) -> None:
        def compile_one(source: str) -> str:
            (made,) = self.compiler.object_filenames([source], output_dir=self.build_temp)
            flags = extension.extra_compile_args + FLAGS_OF.get(os.path.dirname(source), [])

            def compile_with(*more: str) -> None:
                self.compiler.compile(
                    [source],
                    output_dir=self.build_temp,
                    include_dirs=extension.include_dirs,
                    extra_postargs=[*flags, *more],
                )

            if Path(made).is_file() and not is_stale(made, source):
                return made
            Path(made).with_suffix(".clean").unlink(missing_ok=True)
            if self.is_here:  # with somebody who works on it
                with contextlib.suppress(CompileError):
                    compile_with("-Werror")
                    note_clean(made, source)
                    return made
            compile_with()
            return made

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            made = list(pool.map(compile_one, extension.sources))
        linked = copy.copy(extension)
        linked.sources, linked.extra_objects, linked.depends = [], made, made
        super().build_extension(linked)

    def build_extensions(self) -> None:
        if os.environ.get("ESPNX_REUSE_EXTENSION") != "1":
            super().build_extensions()
            return
        for extension in self.extensions:
            built = Path(*extension.name.split(".")).with_suffix(
                sysconfig.get_config_var("EXT_SUFFIX")
            )
            if not built.is_file():
                sys.exit(
                    f"ESPNX_REUSE_EXTENSION=1, but {built} does not exist. Build it first: python "
                    "setup.py build_ext --inplace"
                )
            target = Path(self.get_ext_fullpath(extension.name))
            if target.resolve() != built.resolve():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(built, target)


class BuildPackage(build_py):
    """The package's files, none that an earlier build has left, and a note of the commit and the
    sources that they are of."""

    def run(self) -> None:
        made = Path(self.build_lib, "espnx")
        if not self.editable_mode:
            shutil.rmtree(made, ignore_errors=True)
        super().run()
        if not self.editable_mode:  # a clone is asked itself, whenever it is used
            note_origin(made)


class SourceArchive(sdist):
    """A source archive with the same note: what is built from it later knows no git."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        note_origin(Path(base_dir, "espnx"))


def note_origin(package: Path) -> None:
    origin = runpy.run_path(str(Path("espnx", "origin.py")))
    origin["write_record"](package, origin["make_record"](Path.cwd()))


def package_page(readme: str, source: str | None) -> str:
    """README.md as a package index shows it, away from the files beside it. `source` (pyproject's
    URL of that name) is where these can be looked at, https://HOST/OWNER/espnx/blob/v0.1.0; without
    one the words of their links stay, and links and pictures go."""

    def is_beside(path: str) -> bool:
        return re.match(r"[a-z]+:|#", path) is None

    def link(found: re.Match[str]) -> str:
        words, path = found.groups()
        return (
            found[0] if not is_beside(path) else f"[{words}]({source}/{path})" if source else words
        )

    def picture(found: re.Match[str]) -> str:
        before, path, after = found.groups()
        return (
            found[0]
            if not is_beside(path)
            else f"{before}{source.replace('/blob/', '/raw/')}/{path}{after}"
            if source
            else ""
        )

    parts = re.split(r"(^```.*?^```$)", readme, flags=re.MULTILINE | re.DOTALL)
    for i in range(0, len(parts), 2):  # between blocks of code
        parts[i] = re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", link, parts[i])
        parts[i] = re.sub(r"(!\[[^\]]*\]\()([^)\s]+)(\))", picture, parts[i])
        parts[i] = re.sub(r'(<img [^>]*src=")([^"]+)("[^>]*>)', picture, parts[i])
    return "".join(parts)


if __name__ == "__main__":
    urls = tomllib.loads(Path("pyproject.toml").read_text())["project"].get("urls", {})
    setup(
        ext_modules=[native_extension()],
        cmdclass={"build_ext": BuildOrReuse, "build_py": BuildPackage, "sdist": SourceArchive},
        long_description=package_page(Path("README.md").read_text(), urls.get("Source")),
        long_description_content_type="text/markdown",
    )
