"""Checks of the way into GPU memory. Where there is no NVIDIA GPU they say so and judge nothing."""

from __future__ import annotations

import functools
import importlib
from importlib import metadata, util
from pathlib import Path

from .. import host
from . import INFO, NA, PASS, WARN, Check


@functools.cache
def present() -> bool:
    """Whether the kernel driver of an NVIDIA GPU is loaded here."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def gpu() -> Check:
    if not present():
        return Check(
            NA, "gpu", "no NVIDIA GPU; espnx works on the CPU", evidence={"/dev/nvidia*": []}
        )
    torch = importlib.import_module("torch")
    evidence = {
        "driver": host.read_text("/proc/driver/nvidia/version"),
        "cuda_build": torch.version.cuda,
    }
    if torch.version.cuda is None:
        why = "the GPU stays idle"
        return Check(
            WARN,
            "gpu",
            f"torch {torch.__version__} is built without CUDA",
            why,
            "install a CUDA build of torch",
            evidence,
        )
    if not torch.cuda.is_available():
        why = "driver and CUDA build may not fit, or the device is not visible to this process"
        return Check(
            WARN,
            "gpu",
            "torch cannot use the GPU",
            why,
            "compare nvidia-smi with torch.version.cuda; see CUDA_VISIBLE_DEVICES",
            evidence,
        )
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check(PASS, "gpu", f"{len(names)} x {names[0]}", evidence=evidence | {"devices": names})


def libcufile() -> Check:
    if not present():
        return Check(NA, "libcufile", "no NVIDIA GPU")
    # torch's wheels bring a copy of their own, the toolkit another; which one is mapped first
    # decides what a GPU read does.
    importlib.import_module("torch")
    mapped = [
        path for path in host.mapped_libraries() if Path(path).name.startswith("libcufile.so")
    ]
    offered = sorted(
        {
            str(path)
            for folder in _library_folders()
            for path in folder.glob("libcufile.so*")
            if not path.is_symlink()
        }
    )
    evidence = {"mapped": mapped, "offered": offered}
    if not mapped and not offered:
        return Check(
            WARN,
            "libcufile",
            "no libcufile",
            "GPU reads go through host memory",
            "pip install 'espnx[gds]'",
            evidence,
        )
    if len(mapped) > 1 or len(offered) > 1:
        why = (
            "settings (cufile.json) and statistics belong to one copy, and reads may go through "
            "the other"
        )
        fix = "keep one: uninstall the toolkit's package or torch's nvidia-cufile"
        return Check(
            WARN,
            "libcufile",
            f"{max(len(mapped), len(offered))} copies of libcufile",
            why,
            fix,
            evidence,
        )
    return Check(PASS, "libcufile", f"libcufile at {(mapped or offered)[0]}", evidence=evidence)


def _library_folders() -> list[Path]:
    folders = [
        Path("/usr/lib/x86_64-linux-gnu"),
        Path("/usr/local/cuda/lib64"),
        Path("/usr/local/cuda/targets/x86_64-linux/lib"),
    ]
    nvidia = util.find_spec("nvidia")
    for place in (nvidia.submodule_search_locations or []) if nvidia else []:
        folders += [path.parent for path in Path(place).glob("*/lib/libcufile.so*")]
    return sorted({folder.resolve() for folder in folders})


def cuda_bindings() -> Check:
    name = "cuda-bindings"
    if not present():
        return Check(NA, name, "no NVIDIA GPU")
    try:
        found = util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # the parent package is missing
        found = False
    if not found:
        return Check(
            WARN,
            name,
            f"{name} is not installed",
            "reads into GPU memory go through it",
            "pip install 'espnx[gds]'",
        )
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    return Check(PASS, name, f"{name} {version}")


def nvidia_fs() -> Check:
    if not present():
        return Check(NA, "nvidia-fs", "no NVIDIA GPU")
    version = host.read_text("/proc/driver/nvidia-fs/version")
    if version is None:
        why = (
            "without it (or the kernel's own peer-to-peer DMA) cuFile copies through host memory: "
            "`gds-compat`, not `gds`"
        )
        fix = (
            "install nvidia-gds and load the module (modprobe nvidia-fs); virtio disks and most "
            "containers cannot use it"
        )
        return Check(INFO, "nvidia-fs", "the nvidia-fs kernel module is not loaded", why, fix)
    return Check(PASS, "nvidia-fs", "nvidia-fs is loaded", evidence={"version": version})


CHECKS = (gpu, libcufile, cuda_bindings, nvidia_fs)
