#!/usr/bin/env python3
"""A wheel for each Python that is to be had on this machine, in dist/; each is installed in a fresh
environment and tried.

    make wheel
    .venv/bin/python scripts/wheels.py [3.11 ...]

The wheel of this Python takes the extension that `make setup` compiled; the others compile their
own, some minutes each, as `pip install .` does. A Python that is not there is skipped and named. No
wheel holds torch: one serves every torch from 2.11 on.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
USABLE = (
    "import os, sys, sysconfig, venv, ensurepip; os.stat(sysconfig.get_path('include') + "
    "'/Python.h'); print('%d.%d' % sys.version_info[:2])"
)
#: What every wheel can do without torch: its extension links, for it is given every symbol; and
#: with one, a checksum that RFC 3720 gives.
LINKS = (
    "import ctypes, os, espnx, espnx.origin as o; from importlib.util import find_spec as f; "
    "ctypes.CDLL(f('espnx._C').origin, mode=os.RTLD_NOW); print(espnx.__version__, "
    "o.source_state(), espnx.demo_model().name)"
)
COMPUTES = (
    "import espnx, torch; from espnx.ops import crc32c_ranges as f; t = torch.tensor([0]); "
    "assert f(torch.zeros(32, dtype=torch.uint8), t, t + 32).tolist() == [2324772522]"
)


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """What a command prints; with its complaint where it fails. Nothing of this environment's
    packages is seen by it."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    } | environment
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def interpreters(version: str) -> Iterator[Path]:
    """Yields where that Python may be: on the path, or among those of pyenv."""
    if version == OWN:
        yield Path(sys.executable)
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    yield from sorted(
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(
            f"versions/{version}.*/bin/python"
        ),
        reverse=True,
    )


def find_python(version: str) -> Path | None:
    """One that runs, makes environments and has the headers that an extension wants; None where
    there is none."""
    for python in interpreters(version):
        done = subprocess.run([python, "-c", USABLE], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:
            return python
    return None


def build(version: str, python: Path, dist: Path) -> Path:
    """The wheel. With the extension that is compiled in place for this Python; in isolation for
    another, as pip builds for a user."""
    tag = f"cp{version.replace('.', '')}"
    for old in dist.glob(f"espnx-*-{tag}-*.whl"):
        old.unlink()
    if version == OWN:
        wheel = (
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-build-isolation",
            "--no-deps",
            "-w",
            dist,
            ".",
        )
        run(*wheel, ESPNX_REUSE_EXTENSION="1")
    else:
        with tempfile.TemporaryDirectory() as scratch:
            run(python, "-m", "venv", scratch)
            run(
                Path(scratch, "bin", "python"),
                "-m",
                "pip",
                "wheel",
                "-q",
                "--no-deps",
                "-w",
                dist,
                ".",
            )
    (made,) = dist.glob(f"espnx-*-{tag}-*.whl")
    return made


def cpu_torch() -> str:
    """The CPU build of the torch that constraints.txt pins: no wheel is tried with gigabytes of
    CUDA."""
    (version,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return f"torch=={version}+cpu"


def try_out(wheel: Path, python: Path) -> str:
    """Installs it in a fresh environment and uses it, away from this clone. Returns what was tried;
    ends the program where that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        run(python, "-m", "venv", "env", cwd=Path(scratch))
        fresh = Path(scratch, "env", "bin", "python")
        pip = (str(fresh), "-m", "pip", "install", "-q", "--progress-bar", "off")
        has_torch = (
            subprocess.run([*pip, cpu_torch()], cwd=scratch, capture_output=True).returncode == 0
        )
        run(*pip, *([] if has_torch else ["--no-deps"]), wheel, cwd=Path(scratch))
        said = run(fresh, "-c", LINKS, cwd=Path(scratch)).strip()
        run(fresh, "-m", "espnx", "--help", cwd=Path(scratch))
        if not has_torch:
            return (
                f"{said}; it links (no CPU build of torch for this Python is to be had, so nothing "
                "was computed)"
            )
        run(fresh, "-c", COMPUTES, cwd=Path(scratch))
        return f"{said}; it computes, beside {cpu_torch()}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "versions", nargs="*", default=PYTHONS, help=f"of Python (default: {' '.join(PYTHONS)})"
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    for version in args.versions:
        python, begun = find_python(version), time.perf_counter()
        if python is None:
            print(
                f"Python {version}: skipped, for no such Python (with venv and headers) is on this "
                "machine",
                flush=True,
            )
            continue
        wheel = build(version, python, args.dist)
        print(
            f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB, {time.perf_counter() - begun:.0f} s)",
            flush=True,
        )
        print(f"  {try_out(wheel, python)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
